"""How many queries decide a selection: dropping the others must not change what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvtest.compression import compress_layer, formats_for, make_inputs
from kvtest.methods import PRESETS

from kvferry.shared.compression.formats import num_observed_queries
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.question import Question

NUM_TOKENS, DIM = 203, 16
NEED_ALL = (
    *("h2o", "d2o", "rocketkv-d2o"),
    *("compactor", "compactor-hsa", "compactor-kivi", "compactor-rdkv", "rdkv-union"),
)


def resolved_for(method: str, budget: Budget | None):
    return resolve_plan(
        plan_for(method, budget=budget),
        num_prompt_tokens=NUM_TOKENS,
        max_new_tokens=9,
        num_layers=3,
        head_dim=DIM,
    )


@pytest.mark.parametrize("method", PRESETS)
@pytest.mark.parametrize(
    "question", [None, Question(num_tokens=99, num_after=7), Question(num_tokens=3, num_after=20)], ids=str
)
def test_a_selection_needs_no_more_queries_than_it_says(method: str, question: Question | None) -> None:
    resolved = resolved_for(method, Budget(tokens=64) if PRESETS[method].takes_budget else None)
    inputs = replace(make_inputs(NUM_TOKENS, head_dim=DIM, seed=5), question=question)
    observed = num_observed_queries(resolved, formats_for(resolved, inputs), question)
    assert (observed is None) == (method in NEED_ALL)
    if observed is None:
        return
    whole = compress_layer(resolved, inputs)
    short = compress_layer(resolved, replace(inputs, queries=inputs.queries[:, :, -observed:]))
    assert list(whole) == list(short)
    assert whole
    assert all(torch.equal(tensor, short[name]) for name, tensor in whole.items())


def test_what_keeps_everything_observes_the_last_query_alone() -> None:
    for method in ("h2o", "compactor", "rocketkv"):
        resolved = resolved_for(method, Budget(tokens=NUM_TOKENS))
        formats = formats_for(resolved, make_inputs(NUM_TOKENS, head_dim=DIM))
        assert num_observed_queries(resolved, formats) == 1
        assert num_observed_queries(resolved, formats, Question(num_tokens=9, num_after=5)) == 1


def test_the_window_of_a_question_needs_the_queries_after_it_too() -> None:
    resolved = resolved_for("snapkv", Budget(tokens=64))
    formats = formats_for(resolved, make_inputs(NUM_TOKENS, head_dim=DIM))
    assert num_observed_queries(resolved, formats) == 32
    assert num_observed_queries(resolved, formats, Question(num_tokens=50, num_after=5)) == 37
