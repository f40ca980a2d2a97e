"""A model with latent attention (MLA) over the real stack: processes and in one process, history on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.families import FAMILIES
from kvtest.lanes import some

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

TOKEN_BYTES = 4 * (16 + 4) * 4
"""Layers, latent and rotary channels, float32."""


def ask(stack: Any, prompt: list[int], session_id: str) -> dict[str, Any]:
    response = httpx.post(
        f"{stack.base_url}/v1/completions",
        json={
            "model": "tiny",
            "prompt": prompt,
            "session_id": session_id,
            "kv_compression": {"method": "snapkv", "token_budget": 48},
            "temperature": 0,
            "max_tokens": 16,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        timeout=120,
    )
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("where", some([(), ("--in-process",)], ()), ids=["processes", "in one process"])
def test_turns_before_and_after_a_restart_equal_the_oracle(
    where: tuple[str, ...], start_stack: Callable[..., Any], tmp_path: Path
) -> None:
    folder = FAMILIES["deepseek_v3"].save(tmp_path / "tiny")
    model = load_model(folder, device="cpu", max_model_len=512)
    generator, oracle = OneProcessGenerator(model), OracleSession()
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    plan = plan_for("snapkv", budget=Budget(tokens=48))
    options = (
        *("--model", str(folder), "--model-name", "tiny", "--max-model-len", "512"),
        *("--history-disk", str(tmp_path / "kv"), "--history-disk-bytes", "1GiB", *where),
    )
    prompt = list(range(10, 210))
    for turns in (2, 1):
        with start_stack(*options) as stack:
            for _ in range(turns):
                answer = ask(stack, prompt, "s")
                expected = [
                    token.token_id
                    for token in generator.generate(prompt, plan=plan, sampling=sampling, session=oracle)
                ]
                assert answer["choices"][0]["token_ids"] == expected
                assert answer["kv"]["full_bytes"] == len(prompt) * TOKEN_BYTES
                assert answer["kv"]["shipped_bytes"] < 48 * (TOKEN_BYTES + 16) + 4000
                prompt = [*prompt, *expected, *range(300, 320)]
            stored = stack.wait_kept("s")
            assert stored["history_bytes"] == (len(prompt) - 21) * TOKEN_BYTES
    assert answer["kv"]["reused_tokens"] == 200 + 2 * 36 - 21
