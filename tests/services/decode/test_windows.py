"""Models with windows, soft-capping and sinks decode in captured steps, by kernels, as their oracle does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvtest.families import FAMILIES, WINDOW
from kvtest.transformers_model import prompt_of

from kvferry.kernels import dispatch
from kvferry.kernels.quarantine import quarantined
from kvferry.shared.model.loading import load_model
from kvferry.tools.oracle import OneProcessGenerator

NUM_NEW = 5


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "method", "op"),
    [
        ("gemma2", "full", "dense_decode"),
        ("gemma3_text", "full", "dense_decode"),
        ("gpt_oss", "rocketkv", "hsa"),
        ("ministral", "full", "dense_decode"),
        ("llama4_text", "snapkv", "dense_decode"),
    ],
)
async def test_every_layer_is_batched_and_steps_are_captured(
    runs_ahead: None, harness: Any, request_of: Any, tmp_path: Path, family: str, method: str, op: str
) -> None:
    settings = {**FAMILIES[family].settings, "num_hidden_layers": 2}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"][:2]
    folder = replace(FAMILIES[family], settings=settings).save(tmp_path)
    model = load_model(folder, name="tiny", device="cpu", max_model_len=256)
    assert any(layer.window for layer in model.spec.layers)
    made = await harness(model=model, prefill_model=model, max_batch_size=2, arena_bytes=1 << 21)
    changes = {"tokens": 20} if method != "full" else {}
    requests = [
        request_of(
            prompt_of(length, seed=length), request_id=str(length), method=method, max_tokens=NUM_NEW,
            model_fingerprint=model.spec.fingerprint, **changes,
        )
        for length in (2 * WINDOW + 5, WINDOW - 2)
    ]  # fmt: skip
    before = dispatch.calls()
    tokens = await asyncio.gather(*(made.tokens(request, timeout_s=600) for request in requests))
    after = dispatch.calls()
    with dispatch.torch_only():
        oracle = OneProcessGenerator(model)
        for request, found in zip(requests, tokens, strict=True):
            expected = oracle.generate(
                list(request.prompt_token_ids), plan=request.plan, sampling=request.sampling
            )
            assert found == [token.token_id for token in expected]
    assert made.value("decode_steps_total", path="graph") > 0
    new_shape = made.value("decode_steps_total", path="eager", reason="new_shape")
    assert made.value("decode_steps_total", path="eager") == new_shape
    assert not quarantined()
    assert after[op, "interpreter"] > before.get((op, "interpreter"), 0)
    assert after.get((op, "torch"), 0) == before.get((op, "torch"), 0)
