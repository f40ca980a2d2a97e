"""Which queries observe where the prompt's question is known, and what they make of the scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import compress_layer, formats_for, make_inputs
from kvtest.reference.scores import causal_attention
from torch import Tensor

from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.interface import Ahead, LayerInputs
from kvferry.shared.compression.plan import Budget, Part
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.rdkv.allocation import allocate
from kvferry.shared.compression.rdkv.compress import allocate_layer, channel_weights, pooled
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.model.question import Question

DIM = 16


def asked(num_tokens: int, num_after: int) -> Question:
    return Question(num_tokens=num_tokens, num_after=num_after)


def observed(num_prompt: int, num_new: int, window: int, question: Question | None) -> tuple[list[int], int]:
    """The positions of the queries that observe, and how many tokens come after them."""
    inputs = make_inputs(num_prompt, new_tokens=num_new, group_size=1, num_kv_heads=1)
    positions = torch.arange(num_prompt - num_new, num_prompt, dtype=torch.float32)
    queries = positions[None, None, :, None].expand_as(inputs.queries)
    found = replace(inputs, queries=queries, question=question).observing(window)
    return found.queries[0, 0, :, 0].int().tolist(), found.num_after


@pytest.mark.parametrize(
    ("num_question", "num_observing"), [(1, 8), (5, 8), (8, 8), (9, 9), (31, 31), (45, 32), (500, 32)]
)
@pytest.mark.parametrize("num_after", [0, 1, 5])
def test_the_window_is_the_question_at_most_32_and_at_least_8(
    num_question: int, num_observing: int, num_after: int
) -> None:
    end = 700 - num_after
    positions = observed(700, 700, 32, asked(num_question, num_after))
    assert positions == (list(range(end - num_observing, end)), num_after)


@pytest.mark.parametrize(
    ("window", "num_question", "first"),
    [(1, 45, 94), (3, 1, 92), (8, 1, 87), (64, 45, 50), (64, 1, 87), (64, 500, 31), (4096, 500, 0)],
)
def test_the_windows_parameter_is_the_most(window: int, num_question: int, first: int) -> None:
    assert observed(100, 100, window, asked(num_question, 5)) == (list(range(first, 95)), 5)


@pytest.mark.parametrize(
    ("num_new", "num_after", "expected"),
    [
        (100, 4, range(70, 96)),
        (20, 4, range(80, 96)),
        (5, 4, range(95, 96)),
        (4, 4, range(96, 100)),
        (1, 4, range(99, 100)),
        (1, 0, range(99, 100)),
    ],
)
def test_with_history_the_new_tokens_observe_as_far_as_they_are_the_questions(
    num_new: int, num_after: int, expected: range
) -> None:
    positions, after = observed(100, num_new, 32, asked(26, num_after))
    assert positions == list(expected)
    assert after == (num_after if num_new > num_after else 0)


@given(
    num_new=st.integers(1, 60),
    window=st.integers(1, 70),
    question=st.builds(asked, st.integers(1, 70), st.integers(0, 70)),
)
def test_the_window_is_one_run_of_new_tokens(num_new: int, window: int, question: Question) -> None:
    positions, num_after = observed(60, num_new, window, question)
    assert 1 <= len(positions) <= window
    assert positions == list(range(positions[0], 60 - num_after))
    assert positions[0] >= 60 - num_new
    unknown, none_after = observed(60, num_new, window, None)
    assert unknown == list(range(60 - min(window, num_new), 60))
    assert none_after == 0


def reference_sums(inputs: LayerInputs, first: int, end: int) -> Tensor:
    """`s_t` over the queries at positions `first` to `end`, and for t >= end over those from `end` on."""
    num_prompt = inputs.keys.shape[1]
    attention = causal_attention(inputs.queries, inputs.keys, inputs.scaling)
    start = num_prompt - attention.shape[2]
    sums = attention[:, :, first - start : end - start].sum(dim=(1, 2))
    sums[:, end:] = attention[:, :, end - start :, end:].sum(dim=(1, 2))
    return sums


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("num_prompt", "num_new", "question"),
    [
        (1, 1, asked(1, 0)),
        (2, 2, asked(1, 1)),
        (97, 97, asked(11, 5)),
        (97, 97, asked(3, 1)),
        (97, 97, asked(500, 6)),
        (131, 9, asked(40, 7)),
        (131, 7, asked(40, 7)),
        (33, 33, None),
    ],
)
def test_sums_are_those_of_the_equation(
    num_prompt: int, num_new: int, question: Question | None, group: int
) -> None:
    inputs = replace(make_inputs(num_prompt, new_tokens=num_new, group_size=group), question=question)
    positions, num_after = observed(num_prompt, num_new, 32, question)
    expected = reference_sums(inputs, positions[0], num_prompt - num_after)
    sums = inputs.window_sums(32)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, expected, atol=1e-5, rtol=1e-5)


def test_queries_after_the_question_say_nothing_of_what_is_before_them() -> None:
    inputs = replace(make_inputs(70), question=asked(20, 4))
    other = replace(inputs, queries=inputs.queries.clone())
    other.queries[:, :, -4:] *= -3
    other.queries[:, :, :46] = torch.nan
    sums, changed = inputs.window_sums(32), other.window_sums(32)
    assert torch.equal(sums[:, :66], changed[:, :66])
    assert not torch.equal(sums[:, 66:], changed[:, 66:])
    torch.testing.assert_close(sums[:, :66].sum(1), torch.full((2,), 2.0 * 20), atol=1e-4, rtol=0)


def test_the_scorer_pools_these_sums_and_protects_the_last_rows() -> None:
    inputs = replace(make_inputs(120, group_size=3), question=asked(11, 5))
    params = {"window": 32, "pooling": "avg", "kernel_size": 9, "recents": 8}
    scores = make_scorer(Part(name="window_attention", params=params), rows=16)(inputs)
    sums = reference_sums(inputs, 104, 115)[:, :116]  # four of the last rows are protected
    expected = F.avg_pool1d(sums[:, None], 9, stride=1, padding=4)[:, 0]
    torch.testing.assert_close(scores[:, :116], expected, atol=1e-5, rtol=1e-5)
    assert (scores[:, 116:] == torch.inf).all()


def rdkv_of(method: str, inputs: LayerInputs) -> Rdkv:
    resolved = resolve_plan(
        plan_for(method, budget=Budget(tokens=6)),
        num_prompt_tokens=inputs.keys.shape[1],
        max_new_tokens=4,
        num_layers=1,
        head_dim=DIM,
    )
    (fmt,) = formats_for(resolved, inputs)
    assert isinstance(fmt, Rdkv)
    return fmt


def test_rdkv_weighs_tokens_and_channels_by_these_queries() -> None:
    inputs = replace(make_inputs(111, group_size=3, head_dim=DIM), question=asked(13, 4))
    inputs = replace(inputs, queries=4 * inputs.queries)
    settings = rdkv_of("rdkv", inputs).settings
    expected = allocate(
        pooled(reference_sums(inputs, 94, 107), 9),
        channel_weights(inputs.queries[:, :, 94:107], inputs.keys),
        budget_tokens=6,
        table=settings.table,
        widths=settings.widths,
    )
    found = allocate_layer(settings, inputs)
    assert torch.equal(found.keys, expected.keys)
    # of two tokens with nearly equal weights either may be the last one
    assert (found.values != expected.values).sum() <= 4
    plain = allocate_layer(settings, replace(inputs, question=None))
    assert not torch.equal(found.values, plain.values)


def test_a_draft_follows_the_prompts_last_query_not_the_questions() -> None:
    inputs = replace(make_inputs(90, head_dim=DIM), question=asked(13, 4))
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(2, 2, 3, DIM, generator=generator)
    keys, values = torch.randn(2, 2, 3, DIM, generator=generator).unbind()
    inputs = replace(inputs, ahead=Ahead(queries=queries, keys=keys, values=values))
    settings = rdkv_of("rdkv-draft", inputs).settings
    found = allocate_layer(settings, inputs)
    changed = inputs.queries.clone()
    changed[:, :, -1] *= -5
    other = allocate_layer(settings, replace(inputs, queries=changed))
    assert not torch.equal(found.values[:, :86], other.values[:, :86])


@pytest.mark.parametrize("method", ["snapkv", "rocketkv", "rdkv", "think", "adakv", "snapkv-kivi"])
def test_a_question_at_the_end_that_fills_the_window_changes_nothing(method: str) -> None:
    inputs = make_inputs(150, head_dim=DIM)
    budget = Budget(tokens=24) if method != "think" else None
    resolved = resolve_plan(
        plan_for(method, budget=budget), num_prompt_tokens=150, max_new_tokens=4, num_layers=1, head_dim=DIM
    )
    plain = compress_layer(resolved, inputs)
    same = compress_layer(resolved, replace(inputs, question=asked(40, 0)))
    other = compress_layer(resolved, replace(inputs, question=asked(9, 6)))
    assert list(plain) == list(same)
    assert all(torch.equal(tensor, same[name]) for name, tensor in plain.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in plain.items())


def test_thinks_channels_are_of_these_queries() -> None:
    inputs = replace(make_inputs(75, group_size=3, head_dim=9), question=asked(10, 5))
    resolved = resolve_plan(
        plan_for("think"), num_prompt_tokens=75, max_new_tokens=3, num_layers=1, head_dim=9
    )
    channels = compress_layer(resolved, inputs)["channels"]
    for head in range(2):
        norms = [
            float(torch.outer(inputs.queries[head, :, 60:70, c].flatten(), inputs.keys[head, :, c]).norm())
            for c in range(9)
        ]
        assert channels[head].tolist() == sorted(sorted(range(9), key=lambda c: -norms[c])[:5])
