"""Bytes that an agent's conversation ships, and tokens that it prefills, of what it would without KV reuse.

    python benchmarks/agent.py [--turns 20] [--tokens 256] [--plans rocketkv:1024 ...] [--output FILE]

A scripted agent talks to `kvferry serve` with the demo model. Each turn's answer is a number, the argument of
a call, and the agent adds the call's result: a document of at least --tokens tokens and what to look up in it
next. The last turn asks about the first document. The agent sends its whole conversation every time, once
with a session id and once without.

    shipped share   bytes shipped / bytes of every turn's full selection
    prefill share   tokens that prefill ran / tokens of prompts that stood in no prompt or answer before

The counts are prefill's own counters and do not depend on how busy the machine is. The demo model's
vocabulary has no JSON, so its calls are the numbers alone, and its chat template gets tools and results here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvferry.models import DEMO_MODEL
from kvferry.shared.history.records import common_prefix
from kvferry.tools.bench.serving import served
from kvferry.tools.evaluation.provenance import commit
from kvferry.tools.recall.tasks import TASKS

TIMEOUT_S = 300.0
PLANS = ("rocketkv:1024", "rocketkv:512", "snapkv:1024", "snapkv:512")
IDS = ("session_id", "no_id")
COUNTERS = {
    "shipped_bytes": "kvferry_kv_transfer_bytes_total",
    "spared_bytes": "kvferry_kv_delta_saved_bytes_total",
    "prefilled_tokens": "kvferry_prefill_tokens_total",
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": description}}
    for name, description in (("read", "read the document of a number"), ("find", "find a number"))
]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|> ' }}{% for tool in tools %}"
    "{{ tool.function.name + ' : ' + tool.function.description + ' . ' }}{% endfor %}"
    "{{ '<|end|> ' }}{% endif %}{% for m in messages %}"
    "{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_FACTS = re.compile(r"\bthe ([a-z]+(?: [a-z]+)?) of the ([a-z]+ [a-z]+) is ((?:\d ?)+\d)")


@contextlib.contextmanager
def tool_model() -> Iterator[Path]:
    """The demo model with a chat template that has tools."""
    with tempfile.TemporaryDirectory(prefix="kvferry-agent-") as folder:
        model = Path(folder) / "model"
        shutil.copytree(DEMO_MODEL, model)
        config = model / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
        yield model


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the agent says, and the right answers.

    Attributes: lines: the task, the results of the calls, and the last question.
    """

    lines: tuple[str, ...]
    answers: tuple[str, ...]

    @classmethod
    def make(cls, num_turns: int, num_tokens: int) -> Script:
        lines, answers = [], []
        for turn in range(num_turns - 1):
            length = num_tokens * (4, 5, 4, 6)[turn % 4] // 4
            document = TASKS["multi_key_dense"].example(num_tokens=length, seed=turn + 1).document
            attribute, entity, value = _FACTS.findall(document)[0]
            answers.append(value)
            lines.append(f"{document} what is the {attribute} of the {entity} ?")
        first = lines[0].index("what is the")
        return cls(lines=(*lines, lines[0][first:]), answers=(*answers, answers[0]))


class Agent:
    """Runs a script once."""

    def __init__(self, client: httpx.Client, plan: str, ids: str) -> None:
        method, budget = plan.split(":")
        self._client = client
        self._headers = {"Authorization": f"Bearer {plan}, {ids}"}
        self._fields: dict[str, Any] = {
            "model": "demo", "tools": TOOLS, "max_tokens": 12, "temperature": 0, "return_token_ids": True,
            "kv_compression": {"method": method, "token_budget": int(budget)},
        }  # fmt: skip
        if ids == "session_id":
            self._fields["session_id"] = plan
        self._messages: list[dict[str, str]] = []
        self._known: list[tuple[int, ...]] = []
        self.num_right = 0
        self.turns: list[dict[str, Any]] = []

    def run(self, script: Script) -> None:
        for turn, (line, right) in enumerate(zip(script.lines, script.answers, strict=True)):
            role = "tool" if 0 < turn < len(script.lines) - 1 else "user"
            self._messages.append({"role": role, "content": line})
            self.num_right += self._ask() == right

    def _ask(self) -> str:
        body = {**self._fields, "messages": self._messages}
        response = self._client.post("/v1/chat/completions", json=body, headers=self._headers)
        if response.status_code != 200:
            raise SystemExit(response.text)
        answer = response.json()
        choice, prompt = answer["choices"][0], tuple(answer["prompt_token_ids"])
        known = max((common_prefix(tokens, prompt) for tokens in self._known), default=0)
        self._known.append((*prompt, *choice["token_ids"]))
        self.turns.append(
            {
                "prompt_tokens": len(prompt),
                "new_tokens": len(prompt) - known,
                "history": answer["kv"].get("history"),
                "shipped_bytes": answer["kv"]["shipped_bytes"],
            }
        )
        content: str = choice["message"]["content"]
        self._messages.append({"role": "assistant", "content": content})
        return content


def _counts(url: str) -> dict[str, float]:
    text = httpx.get(url, timeout=TIMEOUT_S).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        name: sum(sample.value for sample in samples if sample.name == counter)
        for name, counter in COUNTERS.items()
    }


def measure(client: httpx.Client, metrics_url: str, plan: str, ids: str, script: Script) -> dict[str, Any]:
    """One conversation, with an API key of its own, so that no other one's KV is found."""
    before = _counts(metrics_url)
    agent = Agent(client, plan, ids)
    agent.run(script)
    counts = {name: int(value - before[name]) for name, value in _counts(metrics_url).items()}
    whole_bytes = counts["shipped_bytes"] + counts.pop("spared_bytes")
    new_tokens = sum(turn["new_tokens"] for turn in agent.turns)
    return {
        **counts,
        "whole_bytes": whole_bytes,
        "shipped_share": round(counts["shipped_bytes"] / whole_bytes, 4),
        "new_tokens": new_tokens,
        "prefill_share": round(counts["prefilled_tokens"] / new_tokens, 4),
        "right_answers": agent.num_right,
        "turns": agent.turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="of the shortest tool results; at least 256")
    parser.add_argument("--plans", nargs="+", default=PLANS, help="METHOD:TOKEN_BUDGET each")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    measured_by = commit()
    script = Script.make(options.turns, options.tokens)
    results: dict[str, Any] = {}
    with (
        tool_model() as model,
        served("--in-process", "--model", str(model), "--model-name", "demo") as addresses,
        httpx.Client(base_url=addresses["url"], timeout=TIMEOUT_S, trust_env=False) as client,
    ):
        metrics_url = f"http://{addresses['prefill_metrics']}/metrics"
        for plan in options.plans:
            results[plan] = {ids: measure(client, metrics_url, plan, ids, script) for ids in IDS}
            for ids, measured in results[plan].items():
                sys.stdout.write(
                    f"{plan}, {ids}: ships {measured['shipped_share']:.2f} of its full selections, "
                    f"prefills {measured['prefill_share']:.2f} of its new tokens\n"
                )
    if options.output:
        figures = {
            "command": sys.argv,
            "commit": measured_by,
            "turns": options.turns,
            "tokens": options.tokens,
            "plans": results,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
