"""What it costs that prefill, decode and router are processes of their own, on one machine.

    python benchmarks/disaggregation.py [--repeats 7] [--output FILE]

Serves the demo model twice: `kvferry serve`, whose KV travels by shared memory, and `kvferry serve
--in-process`. Each cell is a number of requests at once, streamed, with new random prompts, `method=full`
and an answer of fixed length. The two servers are asked in turn, so that other work on the machine slows
both; a cell's ratio and difference are medians over its pairs of runs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvferry.tools.bench.serving import served
from kvferry.tools.evaluation.provenance import commit

CELLS = {
    (128, 1): 512, (128, 8): 128, (128, 16): 128, (1024, 1): 128, (1024, 8): 64, (4096, 1): 32, (4096, 8): 32,
}  # fmt: skip
"""Prompt tokens and requests at once; tokens of an answer."""
SERVERS = {"apart": (), "one_process": ("--in-process",)}
PAIRS_ALONE = 4
"""So many times as many pairs for a lone request: other work on the machine disturbs it most."""
TOKEN_IDS = range(20, 400)
TIMEOUT_S = 300.0


def ask(address: str, prompt: list[int], answer_tokens: int) -> float:
    """Seconds to the first token of one request; returns after its last one."""
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "kv_compression": {"method": "full"},
    }  # fmt: skip
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        begin_s, first_s, usage = time.perf_counter(), None, None
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise SystemExit(f"{address} answers {response.status}: {response.read()[:2000]!r}")
        # one read a token and no parsing: the client shares the processors with what it measures
        for line in response:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - begin_s
                usage = line
        counted = json.loads(usage[6:])["usage"]["completion_tokens"] if usage else 0
        if first_s is None or counted != answer_tokens:
            raise SystemExit(f"{address}: {counted} of {answer_tokens} tokens")
        return first_s
    finally:
        connection.close()


def measure(address: str, cell: tuple[int, int], chance: random.Random) -> dict[str, float]:
    """One run of a cell."""
    prompt_tokens, concurrency = cell
    prompts = [chance.choices(TOKEN_IDS, k=prompt_tokens) for _ in range(concurrency)]
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        firsts = list(pool.map(lambda prompt: ask(address, prompt, CELLS[cell]), prompts))
    rate = concurrency * CELLS[cell] / (time.perf_counter() - begin_s)
    return {"output_tokens_per_s": rate, "first_token_ms": 1e3 * statistics.median(firsts)}


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Medians over the pairs."""
    pairs = list(zip(runs["apart"], runs["one_process"], strict=True))
    rates = [apart["output_tokens_per_s"] / one["output_tokens_per_s"] for apart, one in pairs]
    firsts = [apart["first_token_ms"] - one["first_token_ms"] for apart, one in pairs]
    return {
        "throughput_apart_over_one_process": statistics.median(rates),
        "first_token_ms_more_apart": statistics.median(firsts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="pairs of runs of a crowd")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    chance = random.Random(0)
    found: dict[tuple[int, int], dict[str, list[dict[str, float]]]]
    found = {cell: {name: [] for name in SERVERS} for cell in CELLS}
    with served(*SERVERS["apart"]) as apart, served(*SERVERS["one_process"]) as one_process:
        addresses = {"apart": apart["address"], "one_process": one_process["address"]}
        # repeat 0 warms both up, and does not count
        runs = [(repeat, cell) for repeat in range(options.repeats + 1) for cell in CELLS]
        for repeat, cell in tqdm(runs, desc="cells"):
            for pair in range(PAIRS_ALONE if cell[1] == 1 else 1):
                for name in sorted(SERVERS, reverse=bool((repeat + pair) % 2)):
                    figures = measure(addresses[name], cell, chance)
                    if repeat:
                        found[cell][name].append(figures)
    cells: list[dict[str, Any]] = []
    for cell, by_server in found.items():
        comparison = compared(by_server)
        sizes = {"prompt_tokens": cell[0], "concurrency": cell[1], "output_tokens": CELLS[cell]}
        cells.append({**sizes, **comparison, "runs": by_server})
        sys.stdout.write(
            f"{cell[0]:>5} x {cell[1]:<3}"
            f" throughput {comparison['throughput_apart_over_one_process']:.2f} of one process's,"
            f" first token {comparison['first_token_ms_more_apart']:+.1f} ms\n"
        )
    if options.output:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        command = "python benchmarks/disaggregation.py " + " ".join(sys.argv[1:])
        result = {"command": command, "commit": commit(), "machine": machine, "cells": cells}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
