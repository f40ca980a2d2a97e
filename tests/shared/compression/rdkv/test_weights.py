"""Distortion weights equal the equations written out, at every awkward length."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.compression.rdkv.compress import (
    channel_weights,
    joint_weights,
    score_weights,
    token_weights,
)


def make(num_tokens, window, *, group_size=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(2, group_size, window, 6, generator=generator)
    return queries, torch.randn(2, num_tokens, 6, generator=generator)


def reference_token_weights(queries, keys, scaling, kernel_size):
    num_kv_heads, group_size, window, _ = queries.shape
    num_tokens = keys.shape[1]
    sums = torch.zeros(num_kv_heads, num_tokens)
    for h in range(num_kv_heads):
        for g in range(group_size):
            for i in range(window):
                seen = num_tokens - window + i + 1
                sums[h, :seen] += torch.softmax(keys[h, :seen] @ queries[h, g, i] * scaling, dim=0)
    half = kernel_size // 2
    if num_tokens <= half:
        return sums
    pooled = torch.zeros_like(sums)
    for t in range(num_tokens):
        for offset in range(-half, half + 1):
            at = abs(t + offset)
            at = at if at < num_tokens else 2 * (num_tokens - 1) - at
            pooled[:, t] += sums[:, at] / kernel_size
    return pooled


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    ("num_tokens", "window"), [(1, 1), (2, 2), (3, 3), (4, 1), (31, 31), (32, 32), (33, 32), (97, 32)]
)
def test_token_weights_equal_the_reference(group_size, num_tokens, window):
    queries, keys = make(num_tokens, window, group_size=group_size, seed=num_tokens)
    weights = token_weights(queries, keys, scaling=0.4)
    expected = reference_token_weights(queries, keys, 0.4, 5)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-5)


def test_up_to_two_tokens_are_not_pooled():
    queries, keys = make(2, 2)
    unpooled = token_weights(queries, keys, scaling=0.4, kernel_size=1)
    assert torch.equal(token_weights(queries, keys, scaling=0.4), unpooled)


def test_the_windows_own_columns_are_weighed_and_none_is_forced():
    queries, keys = make(40, 32)
    weights = token_weights(queries, keys, scaling=0.4, kernel_size=1)
    assert weights.isfinite().all()
    torch.testing.assert_close(weights.sum(dim=1), torch.full((2,), 32.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("group_size", [1, 3])
def test_channel_weights_are_the_norm_of_the_logits_that_a_channel_carries(group_size):
    queries, keys = make(23, 5, group_size=group_size)
    weights = channel_weights(queries, keys)
    for h in range(2):
        for c in range(6):
            # Prop. 3.2: the spectral norm of delta Z, all the group's queries stacked
            lost = torch.outer(queries[h, :, :, c].flatten(), keys[h, :, c]) / math.sqrt(6)
            assert float(weights[h, c]) == pytest.approx(
                float(torch.linalg.matrix_norm(lost, ord=2)), rel=1e-4
            )


def test_the_codes_variant_is_the_papers_weight_squared_but_for_a_shared_factor():
    queries, keys = make(23, 5, group_size=2)
    ratio = channel_weights(queries, keys, variant="mean_squares") / channel_weights(queries, keys).square()
    torch.testing.assert_close(ratio, torch.full_like(ratio, 6 / (2 * 5 * 23)), rtol=1e-4, atol=0)
    one = float(queries[1, :, :, 2].square().mean() * keys[1, :, 2].square().mean())
    assert float(channel_weights(queries, keys, variant="mean_squares")[1, 2]) == pytest.approx(one, rel=1e-5)


def test_weights_of_scores_grow_with_them_and_protected_tokens_weigh_as_much_as_the_best():
    inf = math.inf
    scores = torch.tensor([[inf, -1.0, 0.0, 3.0, inf], [inf, inf, inf, inf, inf], [0.0, 8.0, -8.0, 1.0, inf]])
    expected = torch.tensor(
        [
            [math.exp(0.375), math.exp(-0.125), 1.0, math.exp(0.375), math.exp(0.375)],
            [1.0] * 5,
            [1.0, math.e, 1 / math.e, math.exp(0.125), math.e],
        ]
    )
    torch.testing.assert_close(score_weights(scores), expected)


def test_one_protected_token_has_a_weight():
    assert torch.equal(score_weights(torch.tensor([[math.inf]])), torch.ones(1, 1))


SMALL = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(SMALL, SMALL | st.just(math.inf)), min_size=1, max_size=40))
def test_a_joint_weight_is_the_larger_of_ones_own_and_the_one_of_the_scores_rank(head):
    attention, scores = torch.tensor(head).T[:, None].contiguous()
    descending = sorted((weight for weight, _ in head), reverse=True)
    # of equal scores the first token ranks higher
    ranking = sorted(range(len(head)), key=lambda t: (-head[t][1], t))
    expected = [max(head[t][0], descending[ranking.index(t)]) for t in range(len(head))]
    assert joint_weights(attention, scores)[0].tolist() == expected


def test_heads_rank_for_themselves():
    attention = torch.tensor([[5.0, 1.0, 2.0, 0.0], [0.5, 0.0, 0.0, 0.25]])
    scores = torch.tensor([[-1.0, 0.0, 3.0, math.inf], [0.0, -2.0, 7.0, -3.0]])
    expected = [[5.0, 1.0, 2.0, 5.0], [0.5, 0.0, 0.5, 0.25]]
    assert joint_weights(attention, scores).tolist() == expected


def test_joint_weights_of_attention_that_is_not_finite_are_not_finite():
    attention = torch.tensor([[1.0, math.nan, 2.0]])
    assert joint_weights(attention, torch.zeros(1, 3)).isnan().any()
