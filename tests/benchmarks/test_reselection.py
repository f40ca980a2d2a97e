"""What a selection that follows the answer could win is measured as the benchmark says."""

from __future__ import annotations

import importlib.util
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.tools.evaluation.budgets import Target
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.recall.tasks import TASKS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reselection.py"
_spec = importlib.util.spec_from_file_location("reselection", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
reselection = importlib.util.module_from_spec(_spec)
sys.modules["reselection"] = reselection
_spec.loader.exec_module(reselection)


@pytest.mark.parametrize("method", ["snapkv", "rocketkv", "rdkv"])
def test_what_is_selected_again_changes_nothing_before_it_and_nothing_where_all_is_kept(
    demo_model_dir: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reselection, "MAX_NEW_TOKENS", 12)
    model = load_model(demo_model_dir, name="demo", device="cpu", dtype="float32")
    measured = reselection.Measured(model, EvalConfig(model=str(demo_model_dir)))
    prompt = TASKS["multi_key_8"].example(num_tokens=320, seed=1).prompt_token_ids
    answer = measured.answer(prompt)
    answer.tokens[:] = prompt[5:17]  # longer than the demo model's own
    answer = reselection.Answer(
        captured=answer.captured, tokens=answer.tokens, logprobs=measured.fed(answer.captured, answer.tokens)
    )
    share = Target(label="20%", kind="retention", value=Fraction(1, 5))
    once = measured.divergences(answer, plan_for(method), share, 0)
    again = measured.divergences(answer, plan_for(method), share, 4)
    assert len(once) == len(again) == 11
    assert once[:4] == again[:4]
    assert once[4:] != again[4:]
    everything = Target(label="100%", kind="retention", value=Fraction(1))
    if method == "snapkv":
        assert max(measured.divergences(answer, plan_for(method), everything, 4)) < 1e-4
    assert reselection.by_place([[1.0] * 16, [3.0] * 20])[:3] == [2.0, 3.0, None]
