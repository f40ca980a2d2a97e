"""A sequence's layout: disjoint aligned regions, room for growth, views that write through."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import make_sizing, make_spec

from kvferry.kernels.packed.layout import packed_bound
from kvferry.shared.cache.arena import ALIGNMENT_BYTES, sequence_layout
from kvferry.shared.compression.formats import format_class, make_formats
from kvferry.shared.compression.formats.evicting import Evicting
from kvferry.shared.compression.formats.rdkv import PackedSegments
from kvferry.shared.compression.plan import Budget, CompressionPlan, LayerPlan, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.spec import TORCH_DTYPES


def make_resolved(layers, *, max_new_tokens):
    return ResolvedPlan(
        plan=CompressionPlan(method="m"),
        method="m",
        num_prompt_tokens=max(layer.rows for layer in layers),
        max_new_tokens=max_new_tokens,
        layers=tuple(layers),
    )


def layout_of(spec, resolved, **options):
    return sequence_layout(make_formats(spec, resolved, **options))


def used_bytes(layout, num_appended, *, prompt_bytes=None):
    """Of all layers."""
    return sum(layer.format.used_bytes(num_appended, prompt_bytes) for layer in layout.layers)


def regions_of(layout):
    """In the order in which they lie."""
    return [region for layer in layout.layers for region in layer.regions.values()]


def assert_disjoint(layout):
    for region, following in itertools.pairwise(regions_of(layout)):
        assert region.offset % ALIGNMENT_BYTES == 0
        assert region.offset + region.size_bytes <= following.offset


layer_plans = st.builds(
    LayerPlan,
    rows=st.integers(1, 40),
    attention=st.sampled_from(
        [
            Part(name="dense"),
            Part(name="exact_topk", params={"num_tokens": 3}),
            Part(name="sparq", params={"num_channels": 2, "num_tokens": 3}),
            *(Part(name="quest", params={"page_size": p, "num_tokens": 3}) for p in (1, 3, 50)),
            *(
                Part(name="hsa", params={"page_size": p, "num_channels": 1, "num_tokens": 3})
                for p in (1, 2, 5)
            ),
        ]
    ),
)


def auxiliary_shapes(attention, capacity, num_kv_heads, head_dim, dtype):
    match attention.name:
        case "hsa" | "quest" if attention.params["page_size"] > 1:
            piece = 16 // TORCH_DTYPES[dtype].itemsize  # a channel's pages, read 16 bytes at a time
            pages = math.ceil(capacity / attention.params["page_size"])
            return [(2, num_kv_heads, head_dim, math.ceil(pages / piece) * piece)]
        case "sparq":
            return [(num_kv_heads, head_dim)]
        case _:
            return []


@given(
    layers=st.lists(layer_plans, min_size=1, max_size=4),
    max_new_tokens=st.integers(1, 30),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8, 20]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_regions_are_aligned_disjoint_and_shaped_for_the_whole_sequence(
    layers, max_new_tokens, num_kv_heads, head_dim, dtype
):
    spec = make_spec(num_layers=len(layers), num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    layout = layout_of(spec, make_resolved(layers, max_new_tokens=max_new_tokens))
    buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    views = [layer.views(buffer) for layer in layout.layers]
    end = 0
    mark = 0
    for plan, placed, view in zip(layers, layout.layers, views, strict=True):
        capacity = plan.rows + max_new_tokens - 1
        assert list(placed.regions)[:2] == ["keys", "values"]
        regions, tensors = list(placed.regions.values()), list(view.values())
        shapes = [
            *[(num_kv_heads, capacity, head_dim)] * 2,
            *auxiliary_shapes(plan.attention, capacity, num_kv_heads, head_dim, dtype),
        ]
        for region, tensor, shape in zip(regions, tensors, shapes, strict=True):
            assert region.offset % ALIGNMENT_BYTES == 0
            assert region.offset >= end
            end = region.offset + region.size_bytes
            assert tensor.shape == shape
            mark += 1
            tensor.fill_(mark)
    assert end <= layout.size_bytes < end + ALIGNMENT_BYTES
    written = [tensor for view in views for tensor in view.values()]
    assert [float(t.flatten()[0]) for t in written] == list(range(1, mark + 1))
    assert all((t == t.flatten()[0]).all() for t in written)


@pytest.mark.parametrize(("max_new_tokens", "capacity"), [(1, 5), (2, 6), (9, 13)])
def test_the_last_token_gets_no_row(max_new_tokens, capacity):
    layout = layout_of(make_spec(), make_resolved([LayerPlan(rows=5)] * 2, max_new_tokens=max_new_tokens))
    assert [layer.regions["keys"].shape[1] for layer in layout.layers] == [capacity, capacity]
    assert [layer.regions["keys"].shape[1] for layer in layout.layers] == [capacity, capacity]


def test_used_bytes_grow_by_rows_and_by_pages_begun_and_fit_the_layout():
    hsa = Part(name="hsa", params={"page_size": 3, "num_channels": 2, "num_tokens": 4})
    spec = make_spec(num_layers=2)
    layout = layout_of(
        spec, make_resolved([LayerPlan(rows=5), LayerPlan(rows=5, attention=hsa)], max_new_tokens=9)
    )
    row = 2 * 8 * 4
    assert used_bytes(layout, 0) == 2 * (5 + 5 + 2) * row
    assert used_bytes(layout, 1) == 2 * (6 + 6 + 2) * row
    assert used_bytes(layout, 2) == 2 * (7 + 7 + 3) * row
    assert used_bytes(layout, 8) <= layout.size_bytes


@given(
    budget_tokens=st.integers(1, 50),
    max_new_tokens=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8]),
)
def test_a_packed_layer_has_room_for_its_bound_and_for_new_rows_only(
    budget_tokens, max_new_tokens, num_kv_heads, head_dim
):
    spec = make_spec(num_kv_heads=num_kv_heads, head_dim=head_dim)
    plan = plan_for("rdkv")
    sizing = make_sizing(budget_tokens, num_tokens=60, head_dim=head_dim, max_new_tokens=max_new_tokens)
    packed = format_class(plan.representation).plan_layer(plan, sizing)
    resolved = dataclasses.replace(
        make_resolved([packed, LayerPlan(rows=60)], max_new_tokens=max_new_tokens), plan=plan
    )
    layout = layout_of(spec, resolved)
    first, second = layout.layers
    limit = packed_bound(
        num_tokens=60, budget_tokens=budget_tokens, num_kv_heads=num_kv_heads, head_dim=head_dim
    ).size_bytes
    assert list(first.regions) == ["packed", "keys", "values"]
    assert [first.regions[name].shape[1] for name in ("keys", "values")] == [max_new_tokens - 1] * 2
    assert first.regions["packed"].size_bytes == first.format.limit_bytes == limit
    assert second.format.rows == 60
    assert list(second.regions) == ["keys", "values"]
    assert_disjoint(layout)
    row = num_kv_heads * head_dim * 4
    assert used_bytes(layout, 0, prompt_bytes=77) == 77 + 2 * 60 * row
    assert used_bytes(layout, max_new_tokens - 1, prompt_bytes=limit) <= layout.size_bytes


@given(
    segment=st.integers(16, 70),
    max_new_tokens=st.integers(1, 300),
    budget_tokens=st.integers(1, 20),
    returns=st.booleans(),
)
def test_generated_tokens_that_are_packed_have_room_for_one_segment_of_rows_and_for_all_segments(
    segment, max_new_tokens, budget_tokens, returns
):
    spec = make_spec(head_dim=16, num_layers=1)
    plan = plan_for(
        "rdkv", overrides={"rebudget_tokens": segment, "window": 9}, budget=Budget(tokens=budget_tokens)
    )
    resolved = resolve_plan(
        plan, num_prompt_tokens=200, max_new_tokens=max_new_tokens, num_layers=1, head_dim=16
    )
    layout = layout_of(spec, resolved, returns_generated=returns)
    (layer,) = layout.layers
    capacity = layer.regions["keys"].shape[1]
    num_segments = max(max_new_tokens - 2, 0) // segment
    growth = layer.format.segments
    if growth is None:
        assert "segments" not in layer.regions
        bound = packed_bound(
            num_tokens=segment, budget_tokens=-(-segment * budget_tokens // 200), num_kv_heads=1, head_dim=16
        ).size_bytes
        assert num_segments == 0 or bound >= 2 * segment * 16 * 2
        assert capacity == max_new_tokens - 1
        return
    assert isinstance(growth, PackedSegments)
    assert capacity == segment
    assert growth.max_segments == num_segments >= 1
    assert layer.format.shape.returns_generated == returns
    assert layer.regions["segments"].size_bytes == num_segments * growth.limit_bytes
    assert growth.limit_bytes < 2 * 2 * segment * 16 * 2
    last = layer.regions["segment_queries"]
    assert last.shape == (2, 2, 9, 16)
    assert last.offset + last.size_bytes <= layout.size_bytes
    appended = range(max_new_tokens)
    row = 2 * 2 * 16 * 4
    rows = [(n - 1) % segment + 1 if n else 0 for n in appended]
    queries = [last.size_bytes if n > segment - 9 else 0 for n in appended]
    used = [layer.format.used_bytes(n, 0) for n in appended]
    assert used == [n * row + beside for n, beside in zip(rows, queries, strict=True)]


def test_a_running_sum_is_used_once_whatever_the_length():
    sparq = Part(name="sparq", params={"num_channels": 2, "num_tokens": 4})
    spec = make_spec(num_layers=1, dtype="float16")
    layout = layout_of(spec, make_resolved([LayerPlan(rows=5, attention=sparq)], max_new_tokens=9))
    assert used_bytes(layout, 0) == 2 * 5 * 2 * 8 * 2 + 2 * 8 * 4
    assert used_bytes(layout, 8) == 2 * 13 * 2 * 8 * 2 + 2 * 8 * 4
    assert layout.layers[0].regions["auxiliary_0"].dtype == torch.float32


@pytest.mark.parametrize("returns_generated", [False, True])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 9])
def test_a_layer_that_evicts_has_one_row_more_and_room_for_returned_rows(max_new_tokens, returns_generated):
    spec = make_spec(num_layers=2)
    resolved = make_resolved(
        [LayerPlan(rows=5, attention=Part(name="merge")), LayerPlan(rows=5)], max_new_tokens=max_new_tokens
    )
    layout = layout_of(spec, resolved, returns_generated=returns_generated)
    num_new = max_new_tokens - 1
    evicting, growing = layout.layers
    assert isinstance(evicting.format, Evicting)
    assert evicting.format.rows == 5
    assert evicting.regions["keys"].shape == evicting.regions["values"].shape == (2, 5 + min(num_new, 1), 8)
    assert growing.regions["keys"].shape == (2, 5 + num_new, 8)
    assert list(growing.regions) == ["keys", "values"]
    generated = [region for name, region in evicting.regions.items() if name.startswith("generated_")]
    assert [own.shape for own in generated] == ([(2, num_new, 8)] * 2 if returns_generated else [])
    assert_disjoint(layout)
    row, beside, own = 2 * 2 * 8 * 4, 2 * (4 + 4), 2 * 2 * 8 * 4 if returns_generated else 0
    for appended in range(max_new_tokens):
        rows = 5 + min(appended, 1)
        held = rows * (row + beside) + 2 * 4 + appended * own + (5 + appended) * row
        assert used_bytes(layout, appended) == held
    assert held <= layout.size_bytes
