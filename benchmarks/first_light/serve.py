"""Stages `serve` and `long`: `kvferry serve` from its start to its answers, and what it says of itself.

`serve` has the demo model: the README's call, other methods, 16 streams at a time. `long` has a random model
of Llama-3.2-1B's shape and prompts of 32K tokens, one after another: time to first token and shipped bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import script
from prometheus_client.parser import text_string_to_metric_families
from record import Record

DEMO = Path(__file__).parents[2] / "models" / "demo"
ANSWER = "6 5 6 3"
METHODS = ("full", "rocketkv", "compactor")
"""Asked the README's question, beside its own."""
READY_SHARE = 0.7
"""Of the stage's time, in which it must be ready."""
TIMEOUT_S = 120.0
LOG_LINES = 60
"""Of a server that is not ready in time."""
SHORT_S = 0.1
"""Phases of its start that take less are left out."""
EAGER_REASONS = ("cpu", "new_shape")
"""There are no graphs on a CPU, and a batch that load has made runs eagerly before it is captured."""
FIGURES = ("complete", "requests_per_s", "output_tokens_per_s")
LATENCIES = ("first_token_ms", "per_token_ms")


def serve(record: Record, given: script.Given) -> None:
    """Ask a server of the demo model."""
    with serving(record, given) as addresses:
        url = f"http://{addresses['address']}"
        example = json.loads((DEMO / "example.json").read_text())
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
            for method in (example["kv_compression"]["method"], *METHODS):
                if method in METHODS:
                    budget = {} if method == "full" else {"token_budget": 256}
                    example["kv_compression"] = {"method": method, **budget}
                begin_s = time.perf_counter()
                answer = client.post("/v1/chat/completions", json=example).raise_for_status().json()
                said = answer["choices"][0]["message"]["content"]
                row = {"method": method, "content": said, "seconds": time.perf_counter() - begin_s}
                record.add("calls", row | answer["kv"])
                if said.strip() != ANSWER:
                    record.fail(f"{method} answers {said!r}, not {ANSWER!r}")
            record.fields["version"] = client.get("/version").json()
        mix = ("16", "64:8") if given.is_tiny else ("64", "512:64,2048:64@1")
        load = ("--concurrency", "16", "--conversations", mix[0], "--mix", mix[1])
        figures, _ = bench(url, given, *load)
        latencies = {
            f"{name}_{part}": figures[name][part]
            for name in LATENCIES
            for part in ("p50", "p90")
            if figures[name]
        }
        record.add("bench", {**{name: figures[name] for name in FIGURES}, **latencies})
        if sum(figures["failed"].values()):
            record.fail(f"requests of the load failed: {figures['first_errors']}")
        read_metrics(record, addresses)


def long(record: Record, given: script.Given) -> None:
    """Send long prompts to a server of a random model."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), given)
        with serving(record, given, "--model", folder) as addresses:
            url = f"http://{addresses['address']}"
            for number, method in enumerate(("full", "rocketkv", "rdkv")):
                budget = () if method == "full" else ("--token-budget", "64" if given.is_tiny else "512")
                # other prompts for each method, so that none finds the KV of the one before
                load = ("--concurrency", "1", "--conversations", "2", "--warmup", "1", "--seed", str(number))
                mix = ("--mix", "300:4" if given.is_tiny else "32768:16")
                for sample in bench(url, given, "--method", method, *budget, *load, *mix)[1]:
                    if sample["outcome"] != "complete":
                        record.fail(f"{method}: {sample['error']}")
                        continue
                    ttft_ms = 1e3 * (sample["first_s"] - sample["due_s"])
                    row = {
                        "method": method,
                        "tokens": sample["prompt_tokens"],
                        "ttft_ms": ttft_ms,
                        **sample["kv"],
                    }
                    record.add("prompts", row)
                    if row["reused_tokens"]:
                        record.fail(f"{method}: {row['reused_tokens']} tokens of a new prompt were reused")
            read_metrics(record, addresses)


@contextlib.contextmanager
def serving(record: Record, given: script.Given, *options: str) -> Iterator[dict[str, str]]:
    """Run `kvferry serve`; yields its addresses once it is ready. Its log is printed, and its last lines
    are in the record if it is not ready in time.

    Raises: RuntimeError: it ended; TimeoutError: it was not ready in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready, log = Path(folder, "ready.json"), Path(folder, "serve.log")
        began, begin_s = datetime.now(UTC), time.monotonic()
        until_s = begin_s + READY_SHARE * given.left_s
        words = ("serve", "--device", given.device, "--listen", "127.0.0.1:0", "--ready-file", str(ready))
        with log.open("w") as file:
            server = subprocess.Popen(
                [*script.KVFERRY, *words, "--log-level", "info", "--log-format", "json", *options],
                stdout=file, stderr=file,
            )  # fmt: skip
        try:
            while not ready.exists() and server.poll() is None and time.monotonic() < until_s:
                time.sleep(0.1)
            lines = log.read_text().splitlines()
            record.add("startup", *startup(lines, began))
            record.fields["ready_s"] = time.monotonic() - begin_s
            if not ready.exists():
                record.fields["log"] = lines[-LOG_LINES:]
                if server.poll() is not None:
                    raise RuntimeError(f"kvferry serve ended with status {server.returncode}")
                raise TimeoutError(f"kvferry serve was not ready after {record.fields['ready_s']:.0f} s")
            yield json.loads(ready.read_text())
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()
            sys.stdout.write(log.read_text())


def startup(lines: list[str], began: datetime) -> list[dict[str, Any]]:
    """Return how long each service took for each of its phases, which its log's lines end: "kernel tested",
    "warm-up", "decode listens"; "start" is what came before its first line."""
    seconds: dict[tuple[str, str], float] = {}
    last: dict[str, datetime] = {}
    for line in lines:
        try:
            said = json.loads(line)
            service, event, at = said["service"], said["event"], datetime.fromisoformat(said["timestamp"])
        except (ValueError, KeyError, TypeError):  # what libraries print
            continue
        phase = service, event if service in last else "start"
        seconds[phase] = seconds.get(phase, 0.0) + (at - last.get(service, began)).total_seconds()
        last[service] = at
    return [
        {"service": service, "phase": phase, "seconds": of_phase}
        for (service, phase), of_phase in seconds.items()
        if of_phase >= SHORT_S
    ]


def bench(url: str, given: script.Given, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run `kvferry bench`. Returns its figures, and its requests.

    Raises: subprocess.CalledProcessError: no request was complete; TimeoutExpired: there was too little time.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*script.KVFERRY, "bench", "--url", url, "--out", folder, *options]
        subprocess.run(command, check=True, timeout=given.left_s)
        result = json.loads(Path(folder, "results.json").read_text())
        requests = [json.loads(line) for line in Path(folder, "requests.jsonl").read_text().splitlines()]
    return result["servers"]["url"]["median"], requests


def read_metrics(record: Record, addresses: dict[str, str]) -> None:
    """Note decode's steps by path, and what is wrong with the paths that the workers take."""
    for role in ("prefill", "decode"):
        text = httpx.get(f"http://{addresses[f'{role}_metrics']}/metrics", trust_env=False).text
        rows, problems = paths(text)
        record.add("steps_by_path", *rows)
        for problem in problems:
            record.fail(f"{role}: {problem}")


def paths(metrics: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return decode's steps by path, and what is wrong: quarantined kernels, steps not captured."""
    rows: list[dict[str, Any]] = []
    problems = []
    families = text_string_to_metric_families(metrics)
    for sample in itertools.chain.from_iterable(family.samples for family in families):
        labels = sample.labels
        if sample.name == "kvferry_decode_steps_total":
            rows.append({**labels, "steps": sample.value})
            if labels["path"] == "eager" and labels["reason"] not in EAGER_REASONS and sample.value:
                problems.append(f"{sample.value:.0f} steps ran eagerly: {labels['reason']}")
        elif sample.name == "kvferry_kernel_quarantined" and sample.value:
            problems.append(f"{labels['op']} is quarantined: {labels['reason']}")
    return rows, problems


def make_model(folder: Path, given: script.Given) -> None:
    """Write a checkpoint of random weights with the demo model's tokenizer, and a vocabulary of its size."""
    import torch
    from shapes import TINY_SHAPES, transformers_config
    from transformers import AutoModelForCausalLM

    from kvferry.tools.kernel_cache.shapes import SHIPPED

    shape = TINY_SHAPES[0] if given.is_tiny else SHIPPED["Llama-3.2-1B"]
    size = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    config = transformers_config(replace(shape, vocab_size=size), max_model_len=131072)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(given.device):
        make(config, dtype=getattr(torch, shape.dtype)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, folder / name)


if __name__ == "__main__":
    sys.exit(script.run(long if "--long" in sys.argv else serve))
