"""Many concurrent streams against `kvferry serve`, with answers whose length nobody knows beforehand.

    python benchmarks/concurrent_streams.py [--streams 256] [--longest 2048] [--arena-bytes 64MiB]
        [--output FILE]

Serves the demo model with one decode worker and starts all streams at once. Every request allows `--longest`
tokens, is drawn at a temperature with a seed, and ends at a stop token: 16 to `--longest` tokens,
log-uniformly. The arena is too small for all of them, so requests wait and sequences are swapped out. Every
answer is compared with the one-process oracle's, no request may be refused or fail, and the arena is to be
nearly full while a request waits for memory. One sample may find the memory of a sequence that has just
ended, an eighth of the arena, before it is given out again; two in a row may not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor

from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.checkpoint import resolve_model_path
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.tools.bench.serving import served
from kvferry.tools.oracle import OneProcessGenerator

TIMEOUT_S = 3600.0
SHORTEST = 16
SAMPLE_S = 0.5
LEAST_USED = 0.85
"""The least share of the arena in use while a request waits for memory, in the better of two samples."""
TEMPERATURE, TOP_K = 1.6, 16
CLEAR = 1e-5
"""A draw counts as clear if it is this far, in probability, from another token."""
PROMPTS = (
    ("full", None), ("snapkv", 64), ("snapkv", 96), ("full", None), ("streamingllm", 64), ("compactor", 128),
    ("rdkv", 128),
)  # fmt: skip
"""rdkv is the default. Not rocketkv, which selects tokens at every step: of two scores that differ by
rounding alone it may select either."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A request's body without its end, and the token ids that the oracle generates for it."""

    body: dict[str, Any]
    token_ids: list[int]

    def ending_near(self, length: int) -> tuple[int, int]:
        """A stop token and the number of tokens with which the answer ends at it, close to this length."""
        first = {token: i for i, token in reversed(list(enumerate(self.token_ids)))}
        at = min((i for i in first.values() if i >= SHORTEST - 1), key=lambda i: abs(i + 1 - length))
        return self.token_ids[at], at + 1


def oracle_answers(longest: int) -> list[Answer]:
    """What one process generates for each prompt."""
    model = load_model("demo", device="cpu")
    tokenizer = ChatTokenizer.load(resolve_model_path("demo", weights=False))
    answers = []
    for i, (method, tokens) in enumerate(PROMPTS):
        text = "the old sailor painted the quiet bridge . " * (8 + 9 * i)
        prompt = tokenizer.encode(text)
        compression = {"method": method} | ({} if tokens is None else {"token_budget": tokens})
        plan = plan_for(method, budget=None if tokens is None else Budget(tokens=tokens))
        sampling, token_ids = clear_answer(model, prompt, plan, longest, first_seed=1000 * i)
        body = {
            "model": "demo", "prompt": prompt, "temperature": TEMPERATURE, "top_k": TOP_K,
            "seed": sampling.seed, "stream": True, "ignore_eos": True, "max_tokens": longest,
            "kv_compression": compression, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answers.append(Answer(body=body, token_ids=token_ids))
    return answers


def clear_answer(
    model: TransformersModel, prompt: list[int], plan: CompressionPlan, longest: int, *, first_seed: int
) -> tuple[SamplingParams, list[int]]:
    """The first seed's sampling and answer of which no draw is closer than CLEAR to another token.

    The logits of a batch differ from those of one sequence by float32 rounding, so a draw that close may go
    either way.
    """
    generator = OneProcessGenerator(model)
    captured = generator.capture(prompt)
    assert captured.logits is not None
    start = generator.compress(captured, plan=plan, max_new_tokens=longest)
    for seed in range(first_seed, first_seed + 100):
        sampling = SamplingParams(
            max_tokens=longest, temperature=TEMPERATURE, top_k=TOP_K, seed=seed, ignore_eos=True
        )
        sampler = SequenceSampler(sampling, tuple(prompt), model.spec.vocab_size)
        continuation, logits = start.fork(), captured.logits
        token_ids: list[int] = []
        while is_clear(logits, sampler.uniforms(1, at=len(token_ids))[0]):
            token_ids.append(sampler.sample(logits).token_id)
            if len(token_ids) == longest:
                return sampling, token_ids
            logits = continuation.step(token_ids[-1])
    raise SystemExit("no seed gives an answer without a draw close to another token")


def is_clear(logits: Tensor, uniform: float) -> bool:
    """Whether no rounding of the logits changes the token that a uniform number draws."""
    largest, ids = (logits.double() / TEMPERATURE).topk(TOP_K + 1)
    cut = float(largest[-2] - largest[-1])
    probabilities = largest[:-1][ids[:-1].argsort()].softmax(0).cumsum(0)
    return min(cut, float((probabilities - uniform).abs().min())) > CLEAR


async def ask(client: httpx.AsyncClient, answer: Answer, length: int) -> dict[str, Any]:
    """Stream one answer. Returns how it differs from the oracle's, if it does, and its length."""
    stop, num_tokens = answer.ending_near(length)
    body = answer.body | {"stop_token_ids": [stop]}
    text, usage, error = "", {}, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            error = f"{response.status_code}: {(await response.aread()).decode()[:300]}"
        else:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[len("data: ") :])
                    error = error or json.dumps(chunk.get("error", ""))[:300].strip('"')
                    text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                    usage = chunk.get("usage") or usage
    return {
        "method": body["kv_compression"]["method"],
        "error": error,
        "tokens": usage.get("completion_tokens", 0),
        "expected_tokens": num_tokens,
        "text": text,
        "expected_ids": answer.token_ids[:num_tokens],
    }


async def sample(address: str, samples: list[tuple[float, float]]) -> None:
    """Note the waiting requests and the share of the arena in use, until cancelled."""
    async with httpx.AsyncClient() as client:
        while True:
            lines = (await client.get(f"{address}/metrics", timeout=60)).text.splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            arena = {name: float(value) for name, value in values.items() if "kvferry_arena_bytes" in name}
            free = arena['kvferry_arena_bytes{state="free"}'] + arena['kvferry_arena_bytes{state="retained"}']
            samples.append((float(values["kvferry_decode_waiting"]), 1 - free / sum(arena.values())))
            await asyncio.sleep(SAMPLE_S)


async def run(address: str, metrics: str, answers: list[Answer], lengths: list[int]) -> dict[str, Any]:
    samples: list[tuple[float, float]] = []
    sampling = asyncio.create_task(sample(metrics, samples))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    began_s = time.monotonic()
    async with httpx.AsyncClient(base_url=address, timeout=TIMEOUT_S, limits=limits) as client:
        asked = (ask(client, answers[i % len(answers)], length) for i, length in enumerate(lengths))
        results = await asyncio.gather(*asked)
    seconds = time.monotonic() - began_s
    sampling.cancel()
    tokenizer = ChatTokenizer.load(resolve_model_path("demo", weights=False))
    wrong = [
        result
        for result in results
        if not result["error"]
        and (
            result["tokens"] != result["expected_tokens"]
            # the text of the stop token is not part of the answer
            or result["text"] not in {tokenizer.decode(result["expected_ids"][:n]) for n in (-1, None)}
        )
    ]
    used = [share for waiting, share in samples if waiting]
    pairs = itertools.pairwise(samples)
    lasting = [max(one[1], other[1]) for one, other in pairs if one[0] and other[0]]
    return {
        "seconds": round(seconds, 1),
        "tokens": sum(result["tokens"] for result in results),
        "answer_tokens": {
            name: pick(result["tokens"] for result in results)
            for name, pick in (("least", min), ("median", statistics.median), ("most", max))
        },
        "errors": [result["error"] for result in results if result["error"]],
        "other_than_the_oracle": [difference(result, tokenizer) for result in wrong],
        "samples": len(samples),
        "samples_with_a_waiting_request": len(used),
        "most_waiting": max(waiting for waiting, _ in samples),
        "arena_used_while_a_request_waits": {
            "least": round(min(used, default=1.0), 4),
            "least_lasting": round(min(lasting, default=1.0), 4),
            "mean": round(statistics.mean(used), 4) if used else 0.0,
        },
    }


def difference(result: dict[str, Any], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The method of a wrong answer, and how many of its characters are right."""
    expected = tokenizer.decode(result["expected_ids"])
    pairs = enumerate(zip(result["text"], expected, strict=False))
    first = next((at for at, (ours, right) in pairs if ours != right), len(result["text"]))
    return {"method": result["method"], "right_characters": first, "of": len(expected)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--arena-bytes", default="64MiB")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    answers = oracle_answers(given.longest)
    draw = random.Random(0)
    lengths = [int(SHORTEST * (given.longest / SHORTEST) ** draw.random()) for _ in range(given.streams)]
    options = ("--arena-bytes", given.arena_bytes, "--max-waiting", str(given.streams))
    waits = ("--admission-wait-s", str(TIMEOUT_S), "--request-timeout-s", str(TIMEOUT_S))
    with served(*options, *waits) as addresses:
        metrics = f"http://{addresses['decode_metrics']}"
        figures = asyncio.run(run(addresses["url"], metrics, answers, lengths))
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    if given.output:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        setting = {
            "commit": commit.stdout.strip(),
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "streams": given.streams,
            "longest": given.longest,
            "arena_bytes": given.arena_bytes,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(setting | {"figures": figures}, indent=1) + "\n")
    least = figures["arena_used_while_a_request_waits"]["least_lasting"]
    if figures["errors"] or figures["other_than_the_oracle"] or least < LEAST_USED:
        raise SystemExit("a request failed, an answer is not the oracle's, or memory was left unused")


if __name__ == "__main__":
    main()
