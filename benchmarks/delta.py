"""Bytes that a conversation about one document ships, of what whole selections at every turn would be.

    python benchmarks/delta.py [--tokens 4096] [--turns 10] [--plans rocketkv:1024 ...] [--output FILE]

Serves the demo model with `kvferry serve` and asks about another fact of the document at every turn. Both
numbers are prefill's own counters: bytes shipped, and bytes of rows left out because decode retains them.
They are counts and do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvferry.tools.bench.serving import served
from kvferry.tools.recall.tasks import TASKS

TIMEOUT_S = 300.0
PLANS = ("rocketkv:1024", "rocketkv:256", "snapkv:512", "compactor:512")
_FACT = re.compile(r"\bthe ([a-z]+(?: [a-z]+)?) of the ([a-z]+ [a-z]+) is ")


def _lines(num_tokens: int, num_turns: int) -> list[str]:
    """The turns' messages: the document and a question about it, then a question each."""
    document = TASKS["multi_key_dense"].example(num_tokens=num_tokens, seed=1).document
    assert document is not None
    facts = list(dict.fromkeys(_FACT.findall(document)))[:num_turns]
    if len(facts) < num_turns:
        raise SystemExit(
            f"the document of {num_tokens} tokens has {len(facts)} facts; --turns is {num_turns}"
        )
    questions = [f"what is the {attribute} of the {entity} ?" for attribute, entity in facts]
    return [f"{document} {questions[0]}", *questions[1:]]


def _total(client: httpx.Client, url: str, name: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(client.get(url).raise_for_status().text)
        for sample in family.samples
        if sample.name == name
    )


def _measure(client: httpx.Client, addresses: dict[str, str], plan: str, lines: list[str]) -> dict[str, Any]:
    """Bytes shipped and left out in one conversation."""
    method, budget = plan.split(":")
    url = f"http://{addresses['prefill_metrics']}/metrics"
    names = ("kvferry_kv_transfer_bytes_total", "kvferry_kv_delta_saved_bytes_total")
    before = [_total(client, url, name) for name in names]
    by_turn = []
    for line in lines:
        body = {
            "model": "demo", "messages": [{"role": "user", "content": line}], "session_id": plan,
            "session_mode": "append", "max_tokens": 12, "temperature": 0,
            "kv_compression": {"method": method, "token_budget": int(budget)},
        }  # fmt: skip
        reply = client.post(f"http://{addresses['address']}/v1/chat/completions", json=body)
        by_turn.append(reply.raise_for_status().json()["kv"]["shipped_bytes"])
    shipped, spared = (_total(client, url, name) - was for name, was in zip(names, before, strict=True))
    return {
        "shipped_bytes": int(shipped),
        "whole_bytes": int(shipped + spared),
        "share": round(shipped / (shipped + spared), 4),
        "shipped_bytes_by_turn": by_turn,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="the document's length")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--plans", nargs="+", default=PLANS, help="METHOD:TOKEN_BUDGET each")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    lines = _lines(options.tokens, options.turns)
    results = {}
    with served("--in-process") as addresses, httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        for plan in options.plans:
            results[plan] = _measure(client, addresses, plan, lines)
            sys.stdout.write(f"{plan}: {results[plan]['share']:.2f} of full re-selection\n")
    if options.output:
        figures = {"command": sys.argv, "tokens": options.tokens, "turns": options.turns, "plans": results}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
