"""Kinds that evict: tensors from a layout, state from prefill, step by step as the cache does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvferry.shared.compression.attention import ATTENTIONS
from kvferry.shared.compression.attention.evicting import Evict, Merge
from kvferry.shared.compression.d2o.cache import EvictingCache
from kvferry.shared.compression.d2o.eviction import half_zones, zones

HEADS, D = 2, 8


def loaded(kind: Evict | Merge, num_tokens: int, rows: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """K and V with a poisoned row for the token under way, and auxiliary tensors, of a compressed prompt."""
    generator = torch.Generator().manual_seed(num_tokens * 100 + rows)
    keys, values = torch.randn(2, HEADS, num_tokens, D, generator=generator)
    sums = torch.rand(HEADS, num_tokens, generator=generator)
    older = torch.stack(
        [torch.randperm(num_tokens - 1, generator=generator)[: rows - 1] for _ in range(HEADS)]
    )
    newest = torch.full((HEADS, 1), num_tokens - 1)
    positions = torch.cat([older, newest], 1).sort(1).values.int()
    kept_keys, kept_values, state = kind.keep(keys, values, sums, positions)
    assert state.shape == (kind.state_size(num_kv_heads=HEADS, num_rows=rows),)
    assert kept_keys.is_contiguous()
    assert kept_values.is_contiguous()
    specs = kind.auxiliary_specs(num_kv_heads=HEADS, num_rows=rows + 1, head_dim=D, dtype=torch.float32)
    auxiliary = tuple(torch.full(s.shape, -7, dtype=s.dtype) for s in specs)
    kind.load(auxiliary, positions=None if rows == num_tokens else positions, state=state, length=rows)
    assert torch.equal(auxiliary[0][:, :rows], sums.gather(1, positions.long()))
    assert torch.equal(auxiliary[1][:, :rows], positions)
    spare = torch.full((HEADS, 1, D), torch.nan)
    return torch.cat([kept_keys, spare], 1), torch.cat([kept_values, spare], 1), auxiliary


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 1), (2, 1), (13, 13), (31, 7)])
@pytest.mark.parametrize("kind", [Evict(), Merge()], ids=["evict", "merge"])
def test_steps_are_those_of_the_cache(kind: Evict | Merge, num_tokens: int, rows: int, group: int) -> None:
    keys, values, auxiliary = loaded(kind, num_tokens, rows)
    merges = isinstance(kind, Merge)
    cache = EvictingCache(
        keys=keys.clone(),
        values=values.clone(),
        scores=auxiliary[0][:, :rows].clone(),
        positions=auxiliary[1][:, :rows].clone(),
        layer_zones=zones(rows) if merges else half_zones(rows),
        thresholds=auxiliary[2].clone() if merges else None,
    )
    generator = torch.Generator().manual_seed(1)
    for length in range(rows + 1, rows + 40):
        key, value = torch.randn(2, HEADS, D, generator=generator)
        queries = torch.randn(HEADS, group, D, generator=generator)
        kind.append(keys, values, auxiliary, key, value, position=length - 1)
        output = kind.attend(queries, keys, values, auxiliary, length=length, scaling=0.3)
        cache.append(key, value)
        expected, row = cache.attend(queries, scaling=0.3)
        cache.evict(row)
        assert torch.equal(output, expected)
        assert torch.equal(keys, cache.keys)
        assert torch.equal(values, cache.values)
        assert torch.equal(auxiliary[0][:, :rows], cache.scores)
        assert torch.equal(auxiliary[1][:, :rows], cache.positions)
    assert (auxiliary[1][:, :rows].amax(1) == num_tokens + 38).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -0.5])
def test_scores_that_no_attention_sums_to_are_refused(number: float) -> None:
    kind = Evict()
    specs = kind.auxiliary_specs(num_kv_heads=1, num_rows=4, head_dim=D, dtype=torch.float32)
    auxiliary = tuple(torch.zeros(s.shape, dtype=s.dtype) for s in specs)
    with pytest.raises(ValueError, match="finite and at least 0"):
        kind.load(auxiliary, positions=None, state=torch.tensor([0.0, number, 1.0]), length=3)


def test_a_threshold_may_be_unset_and_not_infinite() -> None:
    kind = Merge()
    specs = kind.auxiliary_specs(num_kv_heads=1, num_rows=2, head_dim=D, dtype=torch.float32)
    auxiliary = tuple(torch.zeros(s.shape, dtype=s.dtype) for s in specs)
    kind.load(auxiliary, positions=None, state=torch.tensor([1.0, torch.nan]), length=1)
    assert auxiliary[2].isnan().all()
    with pytest.raises(ValueError, match="infinite"):
        kind.load(auxiliary, positions=None, state=torch.tensor([1.0, -torch.inf]), length=1)


def test_a_step_reads_rows_and_state_and_keys_once_more_to_merge() -> None:
    sizes = {"num_rows": 10, "head_dim": D, "element_bytes": 2}
    assert Evict().read_bytes(**sizes) == 10 * (2 * D * 2 + 8)
    assert Merge().read_bytes(**sizes) == 10 * (3 * D * 2 + 8)


def test_only_kinds_that_evict_carry_state() -> None:
    for name, kind in ATTENTIONS.items():
        made = kind.sized(cap=100, budget=20, head_dim=D)
        assert (
            (made.state_size(num_kv_heads=HEADS, num_rows=5) > 0)
            == (name in ("evict", "merge"))
            == made.evicts
        )
