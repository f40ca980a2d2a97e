"""A sequence's layout: disjoint aligned regions, room for growth, views that write through."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.packed import max_packed_bytes
from kvferry.shared.cache.layout import (
    ALIGNMENT_BYTES,
    TORCH_DTYPES,
    sequence_layout,
    used_bytes,
    view_layers,
)
from kvferry.shared.compression.plan import Budget, CompressionPlan, LayerPlan, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.representation import packed_layer_plan
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.spec import ModelSpec


def make_spec(*, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"):
    return ModelSpec(
        name="m",
        fingerprint="f",
        num_layers=num_layers,
        num_heads=num_kv_heads * 2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=10,
        max_model_len=512,
        dtype=dtype,
        eos_token_ids=(1,),
    )


def make_resolved(layers, *, max_new_tokens):
    return ResolvedPlan(
        plan=CompressionPlan(method="m"),
        method="m",
        num_prompt_tokens=max(layer.rows for layer in layers),
        max_new_tokens=max_new_tokens,
        layers=tuple(layers),
    )


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


@settings(max_examples=60, deadline=None)
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
    layout = sequence_layout(spec, make_resolved(layers, max_new_tokens=max_new_tokens))
    buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    views = view_layers(layout, buffer)
    end = 0
    mark = 0
    for plan, placed, view in zip(layers, layout.layers, views, strict=True):
        capacity = plan.rows + max_new_tokens - 1
        regions = [placed.keys, placed.values, *placed.auxiliary]
        tensors = [view.keys, view.values, *view.auxiliary]
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
    written = [t for v in views for t in (v.keys, v.values, *v.auxiliary)]
    assert [float(t.flatten()[0]) for t in written] == list(range(1, mark + 1))
    assert all((t == t.flatten()[0]).all() for t in written)


@pytest.mark.parametrize(("max_new_tokens", "capacity"), [(1, 5), (2, 6), (9, 13)])
def test_the_last_token_gets_no_row(max_new_tokens, capacity):
    layout = sequence_layout(
        make_spec(), make_resolved([LayerPlan(rows=5)] * 2, max_new_tokens=max_new_tokens)
    )
    assert [layer.capacity for layer in layout.layers] == [capacity, capacity]


def test_used_bytes_grow_by_rows_and_by_pages_begun_and_fit_the_layout():
    hsa = Part(name="hsa", params={"page_size": 3, "num_channels": 2, "num_tokens": 4})
    spec = make_spec(num_layers=2)
    layout = sequence_layout(
        spec, make_resolved([LayerPlan(rows=5), LayerPlan(rows=5, attention=hsa)], max_new_tokens=9)
    )
    row = 2 * 8 * 4
    assert used_bytes(layout, spec, 0) == 2 * (5 + 5 + 2) * row
    assert used_bytes(layout, spec, 1) == 2 * (6 + 6 + 2) * row
    assert used_bytes(layout, spec, 2) == 2 * (7 + 7 + 3) * row
    assert used_bytes(layout, spec, 8) <= layout.size_bytes


@settings(max_examples=40, deadline=None)
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
    packed = packed_layer_plan(
        plan_for("rdkv").representation,
        budget_tokens=budget_tokens,
        num_prompt_tokens=60,
        max_new_tokens=max_new_tokens,
        head_dim=head_dim,
    )
    resolved = make_resolved([packed, LayerPlan(rows=60)], max_new_tokens=max_new_tokens)
    layout = sequence_layout(spec, resolved)
    first, second = layout.layers
    limit = max_packed_bytes(
        num_tokens=60, budget_tokens=budget_tokens, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    assert (first.rows, first.capacity, first.packed.size_bytes) == (0, max_new_tokens - 1, limit)
    assert (second.rows, second.packed) == (60, None)
    regions = [first.packed, first.keys, first.values, second.keys, second.values]
    for region, following in itertools.pairwise(regions):
        assert region.offset % ALIGNMENT_BYTES == 0
        assert region.offset + region.size_bytes <= following.offset
    row = num_kv_heads * head_dim * 4
    assert used_bytes(layout, spec, 0, packed_bytes=77) == 77 + 2 * 60 * row
    assert used_bytes(layout, spec, max_new_tokens - 1, packed_bytes=limit) <= layout.size_bytes


@settings(max_examples=25, deadline=None)
@given(
    segment=st.integers(16, 70),
    max_new_tokens=st.integers(1, 300),
    budget_tokens=st.integers(1, 20),
    returns=st.booleans(),
)
def test_generated_tokens_that_are_packed_have_room_for_one_segment_of_rows_and_for_all_segments(
    segment, max_new_tokens, budget_tokens, returns
):
    spec = make_spec(head_dim=16)
    plan = plan_for(
        "rdkv", overrides={"rebudget_tokens": segment, "window": 9}, budget=Budget(tokens=budget_tokens)
    )
    resolved = resolve_plan(
        plan, num_prompt_tokens=200, max_new_tokens=max_new_tokens, num_layers=1, head_dim=16
    )
    layout = sequence_layout(spec, resolved, returns_generated=returns)
    (layer,) = layout.layers
    num_segments = max(max_new_tokens - 2, 0) // segment
    if layer.segments is None:
        bound = max_packed_bytes(
            num_tokens=segment, budget_tokens=-(-segment * budget_tokens // 200), num_kv_heads=1, head_dim=16
        )
        assert num_segments == 0 or bound >= 2 * segment * 16 * 2
        assert layer.capacity == max_new_tokens - 1
        return
    assert layer.capacity == segment
    assert layer.segments.rebudgeting.max_segments == num_segments >= 1
    assert layer.segments.returns_rows == returns
    assert layer.segments.packed.size_bytes == num_segments * layer.segments.rebudgeting.limit_bytes
    assert layer.segments.rebudgeting.limit_bytes < 2 * 2 * segment * 16 * 2
    last = layer.segments.queries
    assert last.shape == (2, 2, 9, 16)
    assert last.offset + last.size_bytes <= layout.size_bytes
    appended = range(max_new_tokens)
    assert [layer.rows_in_use(n) for n in appended] == [(n - 1) % segment + 1 if n else 0 for n in appended]


def test_a_running_sum_is_used_once_whatever_the_length():
    sparq = Part(name="sparq", params={"num_channels": 2, "num_tokens": 4})
    spec = make_spec(num_layers=1, dtype="float16")
    layout = sequence_layout(spec, make_resolved([LayerPlan(rows=5, attention=sparq)], max_new_tokens=9))
    assert used_bytes(layout, spec, 0) == 2 * 5 * 2 * 8 * 2 + 2 * 8 * 4
    assert used_bytes(layout, spec, 8) == 2 * 13 * 2 * 8 * 2 + 2 * 8 * 4
    assert layout.layers[0].auxiliary[0].dtype == torch.float32


@pytest.mark.parametrize("returns_generated", [False, True])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 9])
def test_a_layer_that_evicts_has_one_row_more_and_room_for_returned_rows(max_new_tokens, returns_generated):
    spec = make_spec(num_layers=2)
    resolved = make_resolved(
        [LayerPlan(rows=5, attention=Part(name="merge")), LayerPlan(rows=5)], max_new_tokens=max_new_tokens
    )
    layout = sequence_layout(spec, resolved, returns_generated=returns_generated)
    num_new = max_new_tokens - 1
    evicting, growing = layout.layers
    assert (evicting.rows, evicting.capacity) == (5, 5 + min(num_new, 1))
    assert growing.capacity == 5 + num_new
    assert growing.generated is None
    buffer = torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8)
    first, _ = view_layers(layout, buffer)
    if returns_generated:
        assert [own.shape for own in first.generated] == [(2, num_new, 8)] * 2
        regions = [evicting.keys, evicting.values, *evicting.auxiliary, *evicting.generated, growing.keys]
        for region, following in itertools.pairwise(regions):
            assert region.offset + region.size_bytes <= following.offset
    else:
        assert first.generated is None
    row, beside, own = 2 * 2 * 8 * 4, 2 * (4 + 4), 2 * 2 * 8 * 4 if returns_generated else 0
    for appended in range(max_new_tokens):
        rows = 5 + min(appended, 1)
        held = rows * (row + beside) + 2 * 4 + appended * own + (5 + appended) * row
        assert used_bytes(layout, spec, appended) == held
    assert held <= layout.size_bytes
