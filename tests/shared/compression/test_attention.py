"""Every kind of decode attention: sizes as the papers give them, traffic within the budget, one protocol."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.baselines.exact_topk import ExactTopK
from kvferry.baselines.quest import Quest
from kvferry.baselines.sparq import SparQ
from kvferry.shared.compression.attention import (
    EVICTIONS,
    CacheView,
    Hsa,
    attentions,
    check_attention,
    make_attention,
    size_attention,
)
from kvferry.shared.compression.interface import LayerShape, Sizing
from kvferry.shared.compression.plan import Part
from kvferry.shared.errors import InvalidRequest

HEADS, D = 2, 12
ATTENTIONS = attentions()


def shape_of(head_dim: int, *, num_kv_heads: int = 1, dtype: torch.dtype = torch.float16) -> LayerShape:
    return LayerShape(
        num_prompt_tokens=1,
        max_new_tokens=1,
        num_kv_heads=num_kv_heads,
        group_size=1,
        head_dim=head_dim,
        dtype=dtype,
    )


SHAPE = shape_of(D, num_kv_heads=HEADS, dtype=torch.float32)
NOT_DENSE = [name for name in (*ATTENTIONS, *EVICTIONS) if name != "dense"]
SCORERS_OF = {"evict": Part(name="heavy_hitters"), "merge": Part(name="accumulated_attention")}


def test_sizes_of_a_64_times_budget() -> None:
    """S 16384 and t 256: c 64, so pages of 64, a 64th of the channels, half the budget attended."""
    sizes = {"cap": 16384, "budget": 256, "head_dim": 128, "row_dim": 256}
    assert Quest.sized(**sizes) == Quest(page_size=64, num_tokens=128)
    assert SparQ.sized(**sizes) == SparQ(num_channels=2, num_tokens=128)
    assert ExactTopK.sized(**sizes) == ExactTopK(num_tokens=256)
    assert Hsa.sized(**sizes | {"cap": 1595}) == Hsa(page_size=3, num_channels=61, num_tokens=128)


def test_estimates_of_latent_rows_take_half_of_what_the_rows_take() -> None:
    """576 channels, stored once: half of 256 rows is 73,728 values."""
    sizes = {"cap": 16384, "budget": 256, "head_dim": 576, "row_dim": 576}
    assert Quest.sized(**sizes) == Quest(page_size=128, num_tokens=128)
    assert 576 * 16384 // 128 == 128 * 576
    assert SparQ.sized(**sizes) == SparQ(num_channels=4, num_tokens=128)
    assert Hsa.sized(**sizes) == Hsa(page_size=8, num_channels=36, num_tokens=128)
    assert 36 * 16384 // 8 == 128 * 576


@given(more=st.integers(0, 300_000), budget=st.integers(1, 9000), head_dim=st.sampled_from([8, 64, 80, 128]))
def test_a_step_reads_no_more_than_the_budget_where_sizes_are_not_at_their_least(
    more: int, budget: int, head_dim: int
) -> None:
    cap = budget + more
    token_bytes = 2 * head_dim * 2
    for name in ("exact_topk", "quest", "sparq"):
        kind = ATTENTIONS[name].sized(cap=cap, budget=budget, head_dim=head_dim, row_dim=2 * head_dim)
        assert all(size >= 1 for size in dataclasses.asdict(kind).values())
        read = kind.read_bytes(shape_of(head_dim), cap)
        slack = 4 * head_dim if name == "sparq" else 0  # the mean value
        if name == "quest":
            slack += token_bytes // 2  # the last page is begun
        floored = budget < 2 or (isinstance(kind, SparQ) and kind.num_channels * cap > head_dim * budget)
        assert floored or read <= budget * token_bytes + slack


@pytest.mark.parametrize("name", ATTENTIONS)
def test_up_to_the_tokens_attended_every_row_is_read_and_no_estimate(name: str) -> None:
    kind = ATTENTIONS[name].sized(cap=100, budget=20, head_dim=D, row_dim=2 * D)
    assert kind.read_bytes(SHAPE, 10) == HEADS * 2 * 10 * D * 4


def sized(part: Part, *, layer: int, cap: int, budget: int) -> Part:
    """The attention of one layer of rows."""
    sizing = Sizing(
        layer=layer,
        rows=cap,
        budget=budget,
        num_prompt_tokens=cap,
        max_new_tokens=1,
        head_dim=D,
    )
    return size_attention(part, sizing, cap=cap)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_latent_rows_are_attended_as_rows_whose_values_are_their_keys(name: str) -> None:
    """The values' channels of the output are the same, also with the values a view of the keys."""
    kind = make_attention(sized(Part(name=name), layer=0, cap=40, budget=12))
    generator = torch.Generator().manual_seed(6)
    keys, queries = torch.randn(HEADS, 40, D, generator=generator), torch.randn(HEADS, 5, D)
    whole = kind.rebuilt(SHAPE, keys, keys.clone())
    shape = dataclasses.replace(SHAPE, latent_dim=7)
    latent = kind.rebuilt(shape, keys, keys[..., :7])
    expected = kind.attend(queries, whole, length=40, scaling=0.3)[..., :7]
    output = kind.attend(queries, latent, length=40, scaling=0.3)
    assert output.shape == (HEADS, 5, 7)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_appending_row_by_row_attends_as_building_at_once_does(name: str, group: int) -> None:
    kind = make_attention(sized(Part(name=name), layer=0, cap=40, budget=12))
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(2, HEADS, 41, D, generator=generator)
    grown = torch.full_like(rows, torch.nan)
    grown[:, :, :17] = rows[:, :, :17]
    auxiliary = tuple(torch.full(s.shape, torch.nan, dtype=s.dtype) for s in kind.specs(SHAPE, 41))
    cache = CacheView(keys=grown[0], values=grown[1], auxiliary=auxiliary)
    kind.build(cache, length=17)
    for length in range(18, 42):
        new = length - 1
        kind.append(cache, rows[0, :, new], rows[1, :, new], position=new)
        queries = torch.randn(HEADS, group, D, generator=generator)
        output = kind.attend(queries, cache, length=length, scaling=0.3)
        rebuilt = kind.rebuilt(SHAPE, rows[0, :, :length].clone(), rows[1, :, :length].clone())
        expected = kind.attend(queries, rebuilt, length=length, scaling=0.3)
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)
    with pytest.raises((IndexError, ValueError)):
        kind.append(cache, rows[0, :, 0], rows[1, :, 0], position=41)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    "kind", [Hsa(page_size=1, num_channels=5, num_tokens=7), Quest(page_size=1, num_tokens=7)]
)
def test_pages_of_one_token_are_the_keys_themselves_and_take_no_memory(kind: Hsa | Quest, group: int) -> None:
    generator = torch.Generator().manual_seed(6)
    keys, values = torch.randn(2, HEADS, 30, D, generator=generator)
    queries = torch.randn(HEADS, group, D, generator=generator)
    assert kind.specs(SHAPE, 30) == ()
    cache = CacheView(keys=keys, values=values)
    kind.build(cache, length=29)
    key, value = keys[:, 29].clone(), values[:, 29].clone()
    keys[:, 29] = values[:, 29] = torch.nan
    kind.append(cache, key, value, position=29)
    output = kind.attend(queries, cache, length=30, scaling=0.3)
    stored = CacheView(keys=keys, values=values, auxiliary=(torch.stack([keys, keys]).mT,))
    assert torch.equal(output, kind.attend(queries, stored, length=30, scaling=0.3))


@pytest.mark.parametrize("name", NOT_DENSE)
def test_the_first_layers_may_attend_densely(name: str) -> None:
    part = Part(name=name, params={"dense_layers": 2})
    check_attention(part, scorer=SCORERS_OF.get(name))
    names = [sized(part, layer=i, cap=100, budget=20).name for i in range(4)]
    assert names == ["dense", "dense", name, name]


@pytest.mark.parametrize(
    "part",
    [
        Part(name="nosuch"),
        Part(name="dense", params={"dense_layers": 1}),
        Part(name="hsa", params={"page_size": 3}),
        Part(name="quest", params={"dense_layers": -1}),
        Part(name="quest", params={"dense_layers": True}),
        Part(name="quest", params={"dense_layers": 1.0}),
    ],
    ids=str,
)
def test_an_attention_that_no_worker_can_size_is_refused_by_name(part: Part) -> None:
    with pytest.raises(InvalidRequest, match=part.name):
        check_attention(part, scorer=None)


@pytest.mark.parametrize(
    "sized",
    [
        Part(name="nosuch"),
        Part(name="dense", params={"num_tokens": 3}),
        Part(name="exact_topk"),
        Part(name="exact_topk", params={"num_tokens": 0}),
        Part(name="exact_topk", params={"num_tokens": True}),
        Part(name="exact_topk", params={"num_tokens": 3.0}),
        Part(name="exact_topk", params={"num_tokens": 3, "page_size": 1}),
    ],
    ids=str,
)
def test_sizes_that_a_kind_does_not_have_are_refused(sized: Part) -> None:
    with pytest.raises(InvalidRequest, match=sized.name):
        make_attention(sized)


def test_rocketkv_stores_and_reads_what_table_1_says_in_bytes() -> None:
    """Table 1: Kmax and Kmin are 1/P of the kept rows together; a step reads t/2 tokens' worth of estimates
    and t/2 tokens of K and V."""
    num_rows, head_dim, budget = 1595, 128, 256
    kind = Hsa.sized(cap=num_rows, budget=budget, head_dim=head_dim, row_dim=2 * head_dim)
    shape = shape_of(head_dim, dtype=torch.bfloat16)
    specs = kind.specs(shape, num_rows)
    rows_bytes = num_rows * head_dim * 2 * 2
    pages_bytes = sum(spec.size_bytes for spec in specs)
    assert pages_bytes == 2 * 532 * 128 * 2  # ceil(1595 / 3) pages
    assert pages_bytes / rows_bytes == pytest.approx(1 / kind.page_size, rel=1e-3)
    read = kind.read_bytes(shape, num_rows)
    estimates = 532 * kind.num_channels * 2
    assert read == estimates + 128 * head_dim * 4
    token_bytes = head_dim * 4
    assert estimates == pytest.approx(budget / 2 * token_bytes, rel=0.02)
    assert read <= budget * token_bytes
