"""A kernel that fails reaches no client: answers over HTTP are the oracle's, and /version names it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from kvtest import faulty_kernels
from kvtest.steps import interpreter as interpreter

from kvferry.kernels import dispatch, quarantine
from kvferry.services.launcher.config import ServeConfig
from kvferry.services.launcher.in_process import InProcessStack
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.device import self_test
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process import worker
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

PROMPT = list(range(20, 84))
MAX_TOKENS, BUDGET = 4, 24
EXPECTED = {
    ("decode", "hsa", "wrong_result"),
    ("decode", "dense_decode", "out_of_resources"),
    ("prefill", "dense_decode", "out_of_resources"),  # for its drafts, in the process that both are in
    ("prefill", "window_scores", "exception"),
}
METHODS: dict[str, dict[str, Any]] = {"full": {}, "rocketkv": {"token_budget": BUDGET}}


def oracle(folder: Path) -> dict[str, str]:
    """The greedy answer by method, of torch."""
    model, tokenizer = load_model(folder, device="cpu"), ChatTokenizer.load(folder)
    answers = {}
    for method, options in METHODS.items():
        budget = Budget(tokens=options["token_budget"]) if options else None
        tokens = OneProcessGenerator(model).generate(
            PROMPT,
            plan=plan_for(method, budget=budget),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
        )
        answers[method] = tokenizer.decode([token.token_id for token in tokens])
    return answers


async def answer(client: httpx.AsyncClient, method: str) -> str:
    body = {
        "model": "demo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "kv_compression": {"method": method, **METHODS[method]},
    }  # fmt: skip
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """hsa's results are wrong, which the self-test finds; two others raise when they serve."""
    for op, kind in (
        ("hsa", "wrong_result"), ("dense_decode", "out_of_resources"), ("window_scores", "exception"),
    ):  # fmt: skip
        faulty_kernels.install(op, kind, monkeypatch.setattr)
    # a process that cannot test: the worker does it itself, with the fault that is installed here
    without_process = functools.partial(self_test.self_test, command=("false",))
    monkeypatch.setattr(worker, "self_test", without_process)
    monkeypatch.setattr(self_test, "OPS", {"prefill": (), "decode": ("hsa",)})
    yield
    quarantine.state.by_op = {}


def quarantines(kernels: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Role, kernel and fault of each quarantine in `/version`."""
    return {
        (role, op, text.removeprefix("torch (quarantined: ").removesuffix(")"))
        for role, ops in kernels.items()
        for op, paths in ops.items()
        for text in paths
        if "quarantined" in text
    }


async def serve_and_ask() -> tuple[dict[str, str], dict[str, Any]]:
    """Answers by method, and `/version`'s kernels once they name the quarantines."""
    stack = InProcessStack(
        ServeConfig(listen="127.0.0.1:0", arena_bytes=1 << 22, kernels="triton", warm_up=False)
    )
    try:
        await stack.start()
        address = f"http://{stack.addresses['address']}"
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:
            answers = {method: await answer(client, method) for method in METHODS}
            async with asyncio.timeout(120):
                while True:  # the router asks its workers now and then
                    kernels = (await client.get("/version")).json()["kernels"]
                    if quarantines(kernels) == EXPECTED:
                        return answers, kernels
                    await asyncio.sleep(0.05)
    finally:
        await stack.close()


def test_answers_are_the_oracle_s_and_the_version_names_each_quarantine(
    demo_model_dir: Path, faults: None, interpreter: None
) -> None:
    dispatch.configure("auto", torch.device("cpu"))
    expected = oracle(demo_model_dir)
    answers, kernels = asyncio.run(serve_and_ask())
    assert answers == expected
    assert kernels["decode"]["trizone"] == ["interpreter"]
