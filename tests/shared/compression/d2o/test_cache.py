"""Decode's cache equals the paper token by token and never changes its size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from kvtest.d2o_reference import ReferenceCache, ReferenceRow
from kvtest.reference.dense import dense_decode
from torch import Tensor

from kvferry.shared.compression.d2o.eviction import EvictingCache, Zones, half_zones, protected, zones
from kvferry.shared.compression.d2o.merging import merge_prompt
from kvferry.shared.compression.formats.interface import select_rows

HEADS, HEAD_DIM = 2, 8
SCALING = HEAD_DIM**-0.5


@dataclass(kw_only=True)
class PromptRows:
    """What prefill leaves of a layer."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor
    thresholds: Tensor


def compressed_prompt(num_tokens: int, rows: int, generator: torch.Generator) -> PromptRows:
    keys, values = torch.randn(2, HEADS, num_tokens, HEAD_DIM, generator=generator)
    scores = torch.rand(HEADS, num_tokens, generator=generator)
    positions = select_rows(protected(scores, zones(rows)), rows)
    merged = merge_prompt(keys, values, positions)
    return PromptRows(
        keys=merged.keys,
        values=merged.values,
        positions=positions,
        scores=scores.gather(1, positions.long()),
        thresholds=merged.thresholds,
    )


def step(cache: EvictingCache, attention_row: Tensor, key: Tensor, value: Tensor) -> None:
    """Append and evict, for a token whose attention is given."""
    cache.append(key, value)
    cache.evict(attention_row)


def next_position(cache: EvictingCache) -> int:
    newest = cache.positions.amax(1)
    assert (newest == newest[0]).all()
    return int(newest[0]) + 1


def make_cache(prompt: PromptRows, dtype: torch.dtype = torch.float32) -> EvictingCache:
    rows = prompt.scores.shape[1]
    # the row of the token under way is poisoned until a token is appended
    buffers = torch.full((2, HEADS, rows + 1, HEAD_DIM), math.nan, dtype=dtype)
    buffers[0, :, :rows] = prompt.keys
    buffers[1, :, :rows] = prompt.values
    return EvictingCache(
        keys=buffers[0],
        values=buffers[1],
        scores=prompt.scores.clone(),
        thresholds=prompt.thresholds.clone(),
        positions=prompt.positions.clone(),
        layer_zones=zones(rows),
    )


def make_references(prompt: PromptRows) -> list[ReferenceCache]:
    return [
        ReferenceCache(
            [
                ReferenceRow(
                    position=int(prompt.positions[h, i]),
                    key=prompt.keys[h, i].double(),
                    value=prompt.values[h, i].double(),
                    score=float(prompt.scores[h, i]),
                )
                for i in range(prompt.scores.shape[1])
            ],
            float(prompt.thresholds[h]),
        )
        for h in range(HEADS)
    ]


def assert_equal(cache: EvictingCache, references: list[ReferenceCache]) -> None:
    for h, expected in enumerate(references):
        order = cache.positions[h].argsort()
        assert cache.positions[h][order].tolist() == [row.position for row in expected.rows]
        for tensor, name in ((cache.keys, "key"), (cache.values, "value")):
            rows = torch.stack([getattr(row, name) for row in expected.rows])
            # every merge rounds to float32 once
            torch.testing.assert_close(tensor[h][order].double(), rows, atol=1e-4, rtol=1e-4)
        scores = torch.tensor([row.score for row in expected.rows])
        torch.testing.assert_close(cache.scores[h][order], scores, atol=1e-4, rtol=1e-4)
        assert cache.thresholds[h].item() == pytest.approx(expected.tau, abs=1e-5)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("num_tokens", "rows"), [(1, 1), (2, 2), (7, 4), (5, 5), (31, 6), (31, 13), (13, 13), (97, 24)]
)
def test_every_step_equals_the_paper(group: int, num_tokens: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens * 10 + rows + group)
    prompt = compressed_prompt(num_tokens, rows, generator)
    cache, references = make_cache(prompt), make_references(prompt)
    for position in range(num_tokens, num_tokens + 60):
        key, value = torch.randn(2, HEADS, HEAD_DIM, generator=generator)
        queries = torch.randn(HEADS, group, HEAD_DIM, generator=generator)
        cache.append(key, value)
        output, row = cache.attend(queries, scaling=SCALING)
        torch.testing.assert_close(
            output, dense_decode(queries, cache.keys, cache.values, scaling=SCALING), atol=1e-5, rtol=1e-5
        )
        cache_positions = torch.cat([cache.positions, torch.full((HEADS, 1), position)], 1)
        cache.evict(row)
        for h, expected in enumerate(references):
            new = ReferenceRow(position=position, key=key[h].double(), value=value[h].double(), score=0.0)
            keys = torch.stack([r.key for r in [*expected.rows, new]])
            # as the paper has it: a softmax over the kept rows and the new one, summed over the group
            attention = torch.softmax(queries[h].double() @ keys.T * SCALING, dim=-1).sum(0)
            in_order = row[h][cache_positions[h].argsort()].double()
            torch.testing.assert_close(in_order, attention, atol=1e-4, rtol=1e-4)
            expected.step(attention.tolist(), new)
        assert_equal(cache, references)


def test_the_cache_stays_at_its_size_over_a_thousand_steps() -> None:
    generator = torch.Generator().manual_seed(1)
    num_tokens, rows = 101, 29
    cache = make_cache(compressed_prompt(num_tokens, rows, generator))
    shapes = {name: (t.shape, t.untyped_storage().nbytes()) for name, t in tensors_of(cache).items()}
    places = (
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        cache.scores.data_ptr(),
        cache.positions.data_ptr(),
    )
    for _ in range(1000):
        key, value = torch.randn(2, HEADS, HEAD_DIM, generator=generator)
        cache.append(key, value)
        _, row = cache.attend(torch.randn(HEADS, 4, HEAD_DIM, generator=generator), scaling=SCALING)
        cache.evict(row)
    assert shapes == {name: (t.shape, t.untyped_storage().nbytes()) for name, t in tensors_of(cache).items()}
    assert places == (
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        cache.scores.data_ptr(),
        cache.positions.data_ptr(),
    )
    assert all(tensor.isfinite().all() for tensor in tensors_of(cache).values())
    assert next_position(cache) == num_tokens + 1000
    for positions in cache.positions.tolist():
        assert len(set(positions)) == rows
        assert set(range(4)) <= set(positions)
        # (29 - 4) // 4 recents
        assert set(range(num_tokens + 1000 - 6, num_tokens + 1000)) <= set(positions)


def tensors_of(cache: EvictingCache) -> dict[str, Tensor]:
    return {name: value for name, value in vars(cache).items() if isinstance(value, Tensor)}


def test_steps_are_deterministic() -> None:
    prompt = compressed_prompt(31, 13, torch.Generator().manual_seed(5))
    caches = [make_cache(prompt) for _ in range(3)]
    generator = torch.Generator().manual_seed(6)
    for _ in range(20):
        key, value = torch.randn(2, HEADS, HEAD_DIM, generator=generator)
        row = torch.rand(HEADS, 14, generator=generator)
        for cache in caches:
            step(cache, row, key, value)
    for name, tensor in tensors_of(caches[0]).items():
        for cache in caches[1:]:
            # the row of the token under way is as the last token left it
            assert torch.equal(getattr(cache, name), tensor), name


def one_head(
    keys: list[list[float]], scores: list[float], threshold: float, *, num_sinks: int
) -> EvictingCache:
    buffer = torch.tensor([[*keys, [math.nan, math.nan]]])
    return EvictingCache(
        keys=buffer,
        values=buffer.clone() * 10,
        scores=torch.tensor([scores]),
        thresholds=torch.tensor([threshold]),
        positions=torch.arange(len(keys))[None],
        layer_zones=zones(len(keys), num_sinks=num_sinks),
    )


KEYS = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [-1.0, 0.0]]


def test_a_similar_row_is_merged_and_its_score_is_not_inherited() -> None:
    cache = one_head(KEYS, [9.0, 3.0, 1.0, 5.0], 0.5, num_sinks=1)
    step(
        cache,
        torch.tensor([[0.1, 0.2, 0.3, 0.1, 0.3]]),
        torch.tensor([[0.0, -1.0]]),
        torch.tensor([[7.0, 7.0]]),
    )
    # row 2 leaves; its nearest is row 1 with u = 0.8
    weight = math.exp(0.8) / (math.e + math.exp(0.8))
    expected = [weight * 0.6, 1 - weight + weight * 0.8]
    assert cache.keys[0, 1].tolist() == pytest.approx(expected)
    assert cache.values[0, 1].tolist() == pytest.approx([10 * x for x in expected])
    assert cache.thresholds.item() == pytest.approx(0.7 * 0.8 + 0.3 * 0.5)
    assert cache.scores[0].tolist() == pytest.approx([9.1, 3.2, 0.3, 5.1])
    assert cache.positions[0].tolist() == [0, 1, 4, 3]
    assert cache.keys[0, 2].tolist() == [0.0, -1.0]
    assert cache.values[0, 2].tolist() == [7.0, 7.0]


def test_a_row_below_the_threshold_is_dropped_and_moves_the_threshold_all_the_same() -> None:
    cache = one_head(KEYS, [9.0, 3.0, 1.0, 5.0], 0.9, num_sinks=1)
    before = cache.keys.clone()
    step(cache, torch.full((1, 5), 0.2), torch.tensor([[0.0, -1.0]]), torch.tensor([[7.0, 7.0]]))
    assert torch.equal(cache.keys[0, [0, 1, 3]], before[0, [0, 1, 3]])
    assert cache.positions[0].tolist() == [0, 1, 4, 3]
    assert cache.thresholds.item() == pytest.approx(0.7 * 0.8 + 0.3 * 0.9)


def test_dropped_rows_leave_the_others_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(10)
    cache = make_cache(compressed_prompt(61, 33, generator))
    before = {int(p): cache.keys[0, i].clone() for i, p in enumerate(cache.positions[0])}
    for _ in range(12):
        cache.thresholds.fill_(5.0)
        key, value = torch.randn(2, HEADS, HEAD_DIM, generator=generator)
        step(cache, torch.rand(HEADS, 34, generator=generator), key, value)
    left = [i for i, p in enumerate(cache.positions[0].tolist()) if p in before]
    assert len(left) >= 33 - 12
    assert all(torch.equal(cache.keys[0, i], before[int(cache.positions[0, i])]) for i in left)


def test_an_unset_threshold_takes_the_first_similarity_and_so_merges() -> None:
    cache = one_head(KEYS, [9.0, 3.0, 5.0, 5.0], math.nan, num_sinks=1)
    # row 1 leaves; it is opposite to the new row and nearest to row 2 (u = 0.8)
    step(cache, torch.full((1, 5), 0.2), torch.tensor([[0.0, -1.0]]), torch.tensor([[7.0, 7.0]]))
    assert cache.thresholds.item() == pytest.approx(0.8)
    assert cache.keys[0, 2].tolist() != [0.6, 0.8]


def test_a_row_unlike_all_others_is_not_its_own_nearest() -> None:
    cache = one_head([[1.0, 0.0], [-1.0, 0.1], [1.0, 0.1]], [9.0, 1.0, 5.0], math.nan, num_sinks=1)
    step(cache, torch.full((1, 4), 0.25), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    assert cache.thresholds.item() < 0
    assert sorted(cache.positions[0].tolist()) == [0, 2, 3]


def test_the_new_token_can_take_the_evicted_row_in() -> None:
    cache = one_head(KEYS, [9.0, 8.0, 1.0, 5.0], 0.0, num_sinks=1)
    step(cache, torch.full((1, 5), 0.2), torch.tensor([[0.6, 0.8]]), torch.tensor([[0.0, 0.0]]))
    # equal keys weigh the same, and the merged row lies where the evicted one was
    assert cache.keys[0, 2].tolist() == pytest.approx([0.6, 0.8])
    assert cache.values[0, 2].tolist() == pytest.approx([3.0, 4.0])
    assert cache.positions[0, 2] == 4


def test_of_equal_scores_the_later_token_leaves() -> None:
    cache = one_head([*KEYS, [0.0, -1.0]], [9.0, 1.0, 1.0, 1.0, 1.0], 2.0, num_sinks=1)
    # one recent: the token before the new one may leave too
    step(cache, torch.zeros(1, 6), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 0.0]]))
    assert sorted(cache.positions[0].tolist()) == [0, 1, 2, 3, 5]
    step(cache, torch.zeros(1, 6), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 0.0]]))
    assert sorted(cache.positions[0].tolist()) == [0, 1, 2, 3, 6]


def test_half_precision_rows_are_scored_and_merged_in_float32() -> None:
    generator = torch.Generator().manual_seed(8)
    prompt = compressed_prompt(31, 13, generator)
    cache = make_cache(prompt, torch.bfloat16)
    for _ in range(50):
        key, value = torch.randn(2, HEADS, HEAD_DIM, generator=generator).bfloat16()
        cache.append(key, value)
        output, row = cache.attend(torch.randn(HEADS, 4, HEAD_DIM).bfloat16(), scaling=SCALING)
        assert output.dtype == torch.bfloat16
        assert row.dtype == torch.float32
        torch.testing.assert_close(row.sum(1), torch.full((HEADS,), 4.0))
        cache.evict(row)
    assert cache.keys.dtype == torch.bfloat16
    assert cache.scores.dtype == cache.thresholds.dtype == torch.float32
    assert cache.keys.isfinite().all()


def test_weights_of_every_row_sum_to_one_over_a_thousand_steps() -> None:
    generator = torch.Generator().manual_seed(21)
    num_tokens, rows, num_steps = 37, 17, 1000
    width = num_tokens + num_steps
    keys = torch.randn(1, width, 8, generator=generator)
    # values that name their token make every row's value its weights
    names = torch.eye(width)[None]
    scores = torch.rand(1, num_tokens, generator=generator)
    positions = select_rows(protected(scores, zones(rows)), rows)
    merged = merge_prompt(keys[:, :num_tokens], names[:, :num_tokens], positions)
    cache = EvictingCache(
        keys=F.pad(merged.keys, (0, width - 8, 0, 1)),
        values=torch.cat([merged.values, torch.zeros(1, 1, width)], 1),
        scores=scores.gather(1, positions.long()),
        positions=positions,
        layer_zones=zones(rows),
        thresholds=merged.thresholds,
    )
    num_merged = 0
    for token in range(num_tokens, width):
        key = F.pad(keys[:, token], (0, width - 8))
        step(cache, torch.rand(1, rows + 1, generator=generator), key, names[:, token])
        if token % 20:
            continue
        weights = cache.values[0, :rows]
        torch.testing.assert_close(weights.sum(-1), torch.ones(rows), atol=1e-4, rtol=0)
        assert weights.min() >= 0
        # a token is in one row at most, and the largest weight of a row names the row's own token
        assert ((weights > 0).sum(0) <= 1).all()
        num_merged += int((weights > 0).sum() > rows)
    assert num_merged > num_steps // 40


def test_without_thresholds_rows_are_dropped_and_the_others_stay_as_they_were() -> None:
    generator = torch.Generator().manual_seed(22)
    num_tokens, rows, num_steps = 61, 9, 200
    keys, values = torch.randn(2, HEADS, num_tokens + num_steps, HEAD_DIM, generator=generator)
    scores = torch.rand(HEADS, num_tokens, generator=generator)
    positions = select_rows(protected(scores, half_zones(rows)), rows)
    index = positions.long()[:, :, None].expand(-1, -1, HEAD_DIM)
    spare = torch.full((HEADS, 1, HEAD_DIM), math.nan)
    kept = {h: {int(p): float(scores[h, p]) for p in positions[h]} for h in range(HEADS)}
    cache = EvictingCache(
        keys=torch.cat([keys.gather(1, index), spare], 1),
        values=torch.cat([values.gather(1, index), spare], 1),
        scores=scores.gather(1, positions.long()),
        positions=positions,
        layer_zones=half_zones(rows),
    )
    for token in range(num_tokens, num_tokens + num_steps):
        order = cache.positions.tolist()
        row = torch.rand(HEADS, rows + 1, generator=generator)
        step(cache, row, keys[:, token], values[:, token])
        for h in range(HEADS):
            # H2O: the sums go on; the least of those that are not among the latest half leaves
            for i, position in enumerate(order[h]):
                kept[h][position] += float(row[h, i])
            kept[h][token] = float(row[h, rows])
            older = sorted(kept[h])[: rows + 1 - (rows - rows // 2)]
            del kept[h][min(older, key=lambda p: (kept[h][p], -p))]
            assert sorted(cache.positions[h].tolist()) == sorted(kept[h])
            held = cache.positions[h].long()
            assert torch.equal(cache.keys[h, :rows], keys[h, held])
            assert torch.equal(cache.values[h, :rows], values[h, held])


def test_zones_of_another_size_are_an_assertion() -> None:
    with pytest.raises(AssertionError):
        EvictingCache(
            keys=torch.zeros(1, 4, 2),
            values=torch.zeros(1, 4, 2),
            scores=torch.zeros(1, 3),
            positions=torch.arange(3)[None],
            layer_zones=Zones(num_sinks=1, num_important=1, num_recents=2),
        )
