"""Layers that evict: regions from a layout, state from prefill, step by step as the cache does."""

from __future__ import annotations

import pytest
import torch
from kvtest.compression import Placed, make_inputs, one_format
from torch import Tensor

from kvferry.shared.compression.d2o.eviction import EvictingCache, half_zones, zones
from kvferry.shared.compression.formats import FORMATS
from kvferry.shared.compression.formats.evicting import Evicting, EvictingLayer
from kvferry.shared.compression.formats.interface import InvalidTensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Part

HEADS, D = 2, 8


def make_format(name: str, rows: int, num_tokens: int, *, group: int = 1, heads: int = HEADS) -> Evicting:
    fmt = one_format(
        Part(name=name),
        rows=rows,
        num_prompt_tokens=num_tokens,
        max_new_tokens=60,
        num_kv_heads=heads,
        group_size=group,
        head_dim=D,
    )
    assert isinstance(fmt, Evicting)
    return fmt


def loaded(fmt: Evicting, num_tokens: int, group: int) -> EvictingLayer:
    """A compressed prompt in the arena, with a poisoned row for the token under way."""
    inputs = make_inputs(num_tokens, group_size=group, head_dim=D, seed=num_tokens * 100 + fmt.rows)
    generator = torch.Generator().manual_seed(7)
    scores: Tensor | None = torch.rand(HEADS, num_tokens, generator=generator)
    assert scores is not None
    scores[:, -1] = torch.inf
    tensors = fmt.compress(inputs, None if fmt.rows == num_tokens else scores)
    assert tensors["state"].shape == (HEADS * (fmt.rows + fmt.merges),)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert ("index" in tensors) == (fmt.rows < num_tokens)
    placed = Placed.of(fmt)
    cache = placed.open(tensors)
    assert isinstance(cache, EvictingLayer)
    positions = tensors.get("index", torch.arange(num_tokens, dtype=torch.int32).expand(HEADS, -1))
    sums = column_sums_of(inputs).gather(1, positions.long())
    assert torch.equal(placed.regions["scores"][:, : fmt.rows], sums)
    assert torch.equal(placed.regions["positions"][:, : fmt.rows], positions)
    assert placed.regions["keys"][:, fmt.rows].isnan().all()
    return cache


def column_sums_of(inputs: LayerInputs) -> Tensor:
    sums = inputs.with_sums().sums
    assert sums is not None
    return sums.sums


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 1), (2, 1), (13, 13), (31, 7)])
@pytest.mark.parametrize("name", ["evict", "merge"])
def test_steps_are_those_of_the_cache(name: str, num_tokens: int, rows: int, group: int) -> None:
    fmt = make_format(name, rows, num_tokens, group=group)
    layer = loaded(fmt, num_tokens, group)
    regions = layer.regions
    cache = EvictingCache(
        keys=regions["keys"].clone(),
        values=regions["values"].clone(),
        scores=regions["scores"][:, :rows].clone(),
        positions=regions["positions"][:, :rows].clone(),
        layer_zones=zones(rows) if fmt.merges else half_zones(rows),
        thresholds=regions["thresholds"].clone() if fmt.merges else None,
    )
    generator = torch.Generator().manual_seed(1)
    for appended in range(39):
        key, value = torch.randn(2, HEADS, D, generator=generator)
        queries = torch.randn(HEADS, group, D, generator=generator)
        output = layer.append_and_attend(queries, key, value, num_appended=appended, scaling=0.3)
        cache.append(key, value)
        expected, row = cache.attend(queries, scaling=0.3)
        cache.evict(row)
        assert torch.equal(output, expected)
        assert torch.equal(regions["keys"], cache.keys)
        assert torch.equal(regions["values"], cache.values)
        assert torch.equal(regions["scores"][:, :rows], cache.scores)
        assert torch.equal(regions["positions"][:, :rows], cache.positions)
    assert (regions["positions"][:, :rows].amax(1) == num_tokens + 38).all()


def arrived(fmt: Evicting, state: list[float]) -> EvictingLayer:
    """A layer of one KV head whose rows are all kept, with this state."""
    rows = torch.zeros(1, fmt.rows, D)
    cache = Placed.of(fmt).open({"keys": rows, "values": rows, "state": torch.tensor(state)})
    assert isinstance(cache, EvictingLayer)
    return cache


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -0.5])
@pytest.mark.parametrize("name", ["evict", "merge"])
def test_scores_that_no_attention_sums_to_are_refused(name: str, number: float) -> None:
    state = [0.0, number, 1.0, *([0.5] if name == "merge" else [])]
    with pytest.raises(InvalidTensors, match="finite and at least 0") as caught:
        arrived(make_format(name, 3, 3, heads=1), state)
    assert caught.value.reason == "state"


def test_a_threshold_may_be_unset_and_not_infinite() -> None:
    fmt = make_format("merge", 1, 1, heads=1)
    assert arrived(fmt, [1.0, torch.nan]).regions["thresholds"].isnan().all()
    with pytest.raises(InvalidTensors, match="infinite") as caught:
        arrived(fmt, [1.0, -torch.inf])
    assert caught.value.reason == "state"


def test_a_step_reads_rows_and_state_and_keys_once_more_to_merge() -> None:
    sizes = {"rows": 10, "num_tokens": 40, "heads": 1}
    assert make_format("evict", **sizes).read_bytes() == 10 * (2 * D * 4 + 8)
    assert make_format("merge", **sizes).read_bytes() == 10 * (3 * D * 4 + 8)


def test_only_layers_that_evict_carry_state() -> None:
    assert {name for name, fmt in FORMATS.items() if "state" in fmt.kinds} == set()
    assert Evicting.kinds["state"] == "state"
    for part in (Part(name="dense"), Part(name="exact_topk", params={"num_tokens": 3})):
        assert "state" not in one_format(part, rows=5, num_prompt_tokens=9).tensors()
    for name in ("evict", "merge"):
        assert make_format(name, 5, 9).tensors()["state"].shape == (HEADS * (5 + (name == "merge")),)
