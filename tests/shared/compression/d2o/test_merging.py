"""Merging a prompt equals the paper row by row, and its weights sum to one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest import d2o_reference as reference
from kvtest.compression import compress_layer, make_inputs, make_resolved
from torch import Tensor

from kvferry.kernels.column_sums import column_sums
from kvferry.shared.compression.d2o import merging
from kvferry.shared.compression.d2o.eviction import protected, zones
from kvferry.shared.compression.d2o.merging import (
    MergedRows,
    cosine_similarities,
    merge_prompt,
    merge_weight,
    next_threshold,
)
from kvferry.shared.compression.formats.interface import select_rows
from kvferry.shared.compression.plan import LayerPlan, Part


def make(num_tokens: int, rows: int, *, heads: int = 2, head_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens * 101 + rows)
    keys = torch.randn(heads, num_tokens, head_dim, generator=generator)
    values = torch.randn(heads, num_tokens, head_dim, generator=generator)
    scores = torch.rand(heads, num_tokens, generator=generator)
    return keys, values, select_rows(protected(scores, zones(rows)), rows)


def assert_equals_reference(keys: Tensor, values: Tensor, positions: Tensor, merged) -> None:
    for h in range(keys.shape[0]):
        expected_keys, expected_values, tau = reference.merge_prompt_head(
            list(keys[h].double()), list(values[h].double()), positions[h].tolist()
        )
        # float32 sums of up to T rows of size one
        torch.testing.assert_close(merged.keys[h].double(), torch.stack(expected_keys), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            merged.values[h].double(), torch.stack(expected_values), atol=1e-5, rtol=1e-5
        )
        assert merged.thresholds[h].item() == pytest.approx(tau, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(1, 1), (2, 1), (2, 2), (7, 5), (7, 6), (53, 1), (53, 5), (53, 13), (53, 52), (97, 24)],
)
def test_merging_equals_the_paper_row_by_row(num_tokens: int, rows: int) -> None:
    keys, values, positions = make(num_tokens, rows)
    assert_equals_reference(keys, values, positions, merge_prompt(keys, values, positions))


@pytest.mark.parametrize("max_similarities", [1, 70, 1000])
def test_chunking_changes_nothing(monkeypatch: pytest.MonkeyPatch, max_similarities: int) -> None:
    keys, values, positions = make(53, 13)
    monkeypatch.setattr(merging, "MAX_SIMILARITIES", max_similarities)
    merged = merge_prompt(keys, values, positions)
    assert_equals_reference(keys, values, positions, merged)


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 10**6))
def test_weights_of_each_merged_row_are_positive_and_sum_to_one(tokens: int, rows: int, seed: int) -> None:
    rows = min(rows, tokens)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, tokens, 4, generator=generator)
    positions = select_rows(protected(torch.rand(2, tokens, generator=generator), zones(rows)), rows)
    # with unit vectors for values a merged row *is* its weights
    weights = merge_prompt(keys, torch.eye(tokens).repeat(2, 1, 1), positions).values
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, rows), atol=1e-5, rtol=0)
    assert weights.min() >= 0
    # an evicted token goes into one row or into none; a kept one stays in its own, with the largest weight
    assert ((weights > 0).sum(1) <= 1).all()
    assert (weights.argmax(-1) == positions).all()


def test_the_same_weights_merge_keys_and_values() -> None:
    keys, _, positions = make(53, 13)
    merged = merge_prompt(keys, keys, positions)
    assert torch.equal(merged.keys, merged.values)


def test_rows_that_nothing_is_merged_into_stay_bit_for_bit() -> None:
    keys, values, positions = make(53, 40)
    weights = merge_prompt(keys, torch.eye(53).repeat(2, 1, 1), positions).values
    untouched = (weights > 0).sum(-1) == 1
    assert untouched.any()
    assert not untouched.all()
    merged = merge_prompt(keys, values, positions)
    for h in range(2):
        kept = positions[h].long()
        assert torch.equal(merged.keys[h][untouched[h]], keys[h, kept][untouched[h]])
        assert torch.equal(merged.values[h][untouched[h]], values[h, kept][untouched[h]])


def test_weights_are_the_consistent_reading_of_equation_12() -> None:
    # two evicted rows equal to the kept row 0: u = 1, so all three weigh the same
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]])
    values = torch.tensor([[[3.0, 0.0], [6.0, 3.0], [0.0, 3.0], [9.0, 9.0]]])
    merged = merge_prompt(keys, values, torch.tensor([[0, 3]]))
    torch.testing.assert_close(merged.values, torch.tensor([[[3.0, 2.0], [9.0, 9.0]]]))
    torch.testing.assert_close(merged.keys, torch.tensor([[[4 / 3, 0.0], [0.0, 1.0]]]))
    assert merged.thresholds.tolist() == [1.0]


def test_rows_less_similar_than_the_mean_are_dropped() -> None:
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.1, -1.0]]])
    values = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [50.0, 50.0]]])
    merged = merge_prompt(keys, values, torch.tensor([[0]]))
    u = 1.0 / math.hypot(1.0, 0.1)
    weight = math.exp(u) / (math.e + math.exp(u))
    torch.testing.assert_close(merged.values[0, 0], torch.tensor([1 - weight, weight]))


@pytest.mark.parametrize("num_tokens", [2, 4, 8, 24, 98])
def test_equally_similar_rows_are_all_merged_though_a_mean_can_round_above_them(num_tokens: int) -> None:
    keys = torch.tensor([1.0, 0.3]).repeat(8, num_tokens, 1)
    keys[:, 0, 1] = torch.linspace(-0.5, 0.2, 8)
    weights = merge_prompt(keys, torch.eye(num_tokens).repeat(8, 1, 1), torch.zeros(8, 1, dtype=torch.int32))
    assert (weights.values > 0).all()


def test_keeping_everything_leaves_the_threshold_unset() -> None:
    keys, values, positions = make(7, 7)
    merged = merge_prompt(keys, values, positions)
    assert torch.equal(merged.keys, keys)
    assert torch.equal(merged.values, values)
    assert merged.thresholds.isnan().all()


def test_zero_keys_resemble_nothing_and_make_no_nan() -> None:
    keys = torch.zeros(1, 6, 4)
    keys[0, 0, 0] = 1.0
    similarities = cosine_similarities(keys[:, 1:], keys[:, :1])
    assert torch.equal(similarities, torch.zeros(1, 5, 1))
    merged = merge_prompt(keys, keys, torch.tensor([[0, 3]]))
    assert merged.keys.isfinite().all()
    assert merged.thresholds.tolist() == [0.0]


def test_half_precision_rows_are_merged_in_float32_and_stored_in_their_own_dtype() -> None:
    keys, values, positions = make(53, 13)
    keys, values = keys.bfloat16(), values.bfloat16()
    merged = merge_prompt(keys, values, positions)
    assert merged.keys.dtype == merged.values.dtype == torch.bfloat16
    exact = merge_prompt(keys.float(), values.float(), positions)
    assert torch.equal(merged.keys, exact.keys.bfloat16())
    assert torch.equal(merged.values, exact.values.bfloat16())


def test_threshold_moves_by_beta_and_an_unset_one_takes_the_first_similarity() -> None:
    threshold = torch.tensor([0.5, math.nan])
    moved = next_threshold(threshold, torch.tensor([0.9, -0.3]))
    torch.testing.assert_close(moved, torch.tensor([0.7 * 0.9 + 0.3 * 0.5, -0.3]))
    assert merge_weight(torch.tensor([-0.3]), moved[1:]).item() == pytest.approx(math.exp(-0.3))


@given(st.floats(-1, 1, width=32), st.floats(-1, 1, width=32))
def test_a_row_is_merged_exactly_where_it_is_as_similar_as_the_threshold_was(u: float, tau: float) -> None:
    similarity = torch.tensor([u])
    moved = next_threshold(torch.tensor([tau]), similarity)
    if u >= tau:
        assert moved <= similarity
    elif tau - u > 1e-6:
        assert moved > similarity


@pytest.mark.parametrize("group", [1, 4])
def test_a_layer_is_brought_to_its_budget_from_its_column_sums(group: int) -> None:
    inputs = make_inputs(61, group_size=group, seed=group)
    sums = column_sums(inputs.queries, inputs.keys, scaling=inputs.scaling).sums
    positions = select_rows(protected(sums, zones(17)), 17)
    layer = LayerPlan(rows=17, attention=Part(name="merge"))
    kept = compress_layer(make_resolved(layer, num_prompt_tokens=61, method="d2o"), inputs)
    state = kept["state"]
    assert state.shape == (2 * 17 + 2,)
    assert torch.equal(kept["index"], positions)
    for h in range(2):
        assert positions[h].tolist() == reference.kept_tokens(sums[h].tolist(), 17)
        assert torch.equal(state[h * 17 : (h + 1) * 17], sums[h, positions[h].long()])
    left = MergedRows(keys=kept["keys"], values=kept["values"], thresholds=state[2 * 17 :])
    assert_equals_reference(inputs.keys, inputs.values, positions, left)
