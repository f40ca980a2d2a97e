"""AdaKV's heads divided among ranks: each part has its own number of rows, and room for the most that it can
have until they are announced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import make_resolved, make_spec
from torch import Tensor

from kvferry.shared.cache.arena import ArrivingLayout, header_of, layout_like, place_layer, sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerCache, LayerFormat, Tensors
from kvferry.shared.compression.formats.ragged import Ragged, head_budgets, select_ragged_rows
from kvferry.shared.compression.plan import LayerPlan, Part, ResolvedPlan

HEADS, DIM, SCALING = 4, 7, 0.4


def resolve(num_tokens: int, rows: int, *, floor: float = 0.2) -> ResolvedPlan:
    """A ragged layer with so many rows per head."""
    layer = LayerPlan(rows=rows, representation=Part(name="ragged", params={"floor": floor}))
    return make_resolved(layer, num_prompt_tokens=num_tokens, max_new_tokens=5, method="adakv")


def of_parts(resolved: ResolvedPlan, num_parts: int, *, group_size: int = 1) -> tuple[LayerFormat, ...]:
    spec = make_spec(
        num_layers=len(resolved.layers),
        num_kv_heads=HEADS // num_parts,
        group_size=group_size,
        head_dim=DIM,
    )
    return make_formats(spec, resolved, num_parts=num_parts)


def layer_of(counts: list[int], num_tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """A layer whose heads have so many rows."""
    generator = torch.Generator().manual_seed(seed)
    heads = [torch.randperm(num_tokens, generator=generator)[:count].sort().values for count in counts]
    rows = [torch.randn(sum(counts), DIM, generator=generator) for _ in range(2)]
    return {
        "head_rows": torch.tensor(counts, dtype=torch.int32),
        "index": torch.cat(heads).to(torch.int32),
        **dict(zip(("keys", "values"), rows, strict=True)),
    }


def assert_same(given: Tensors, expected: Tensors) -> None:
    assert list(given) == list(expected)
    for name, its in expected.items():
        assert given[name].dtype == its.dtype
        assert torch.equal(given[name], its)


def attend(caches: list[LayerCache], step: int, group_size: int) -> Tensor:
    """Append a row to each cache's heads and attend; the outputs of all heads."""
    generator = torch.Generator().manual_seed(100 + step)
    queries = torch.randn(HEADS, group_size, DIM, generator=generator)
    key, value = (torch.randn(HEADS, DIM, generator=generator) for _ in range(2))
    size = HEADS // len(caches)
    outputs = []
    for number, cache in enumerate(caches):
        its = slice(number * size, (number + 1) * size)
        outputs.append(
            cache.append_and_attend(
                queries[its], key[its], value[its], num_appended=step, scaling=SCALING
            ).clone()
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize(
    ("num_tokens", "counts"),
    [(61, [5, 1, 37, 9]), (33, [0, 0, 33, 19]), (16, [16, 0, 0, 0]), (1, [1, 1, 1, 1])],
    ids=["odd", "an empty part", "one head has all", "one token"],
)
def test_parts_attend_as_the_whole_layer_and_join_to_it(
    num_tokens: int, counts: list[int], group_size: int, num_parts: int
) -> None:
    whole_layer = layer_of(counts, num_tokens)
    resolved = resolve(num_tokens, sum(counts) // HEADS, floor=0.0)
    (fmt,) = of_parts(resolved, 1, group_size=group_size)
    parts = fmt.parts(whole_layer, num_parts)
    assert len(parts) == num_parts
    assert_same(fmt.joined(parts), whole_layer)

    def placed(its_format: LayerFormat, tensors: Tensors) -> LayerCache:
        arriving = ArrivingLayout(sequence_layout((its_format,)))
        layer = arriving.next(header_of(tensors))
        buffer = torch.full((arriving.layout.size_bytes,), 255, dtype=torch.uint8)  # NaN
        return place_layer(layer.format, layer.views(buffer), tensors)

    (part_format,) = of_parts(resolved, num_parts, group_size=group_size)
    caches = [placed(part_format, part) for part in parts]
    whole = [placed(fmt, whole_layer)]
    for step in range(3):
        torch.testing.assert_close(attend(caches, step, group_size), attend(whole, step, group_size))
    assert sum(cache.used_bytes(2) for cache in caches) == whole[0].used_bytes(2)


@given(
    num_tokens=st.integers(2, 60),
    share=st.floats(0, 1),
    window_share=st.floats(0, 1),
    floor=st.sampled_from([0.0, 0.2, 0.29, 0.5, 1.0]),
    num_parts=st.sampled_from([2, 4]),
    seed=st.integers(0, 99),
)
def test_no_selection_gives_a_part_more_rows_than_there_is_room_for(
    num_tokens: int, share: float, window_share: float, floor: float, num_parts: int, seed: int
) -> None:
    rows = 1 + int(share * (num_tokens - 2))
    window = int(window_share * rows)
    generator = torch.Generator().manual_seed(seed)
    # one head has nearly all high scores
    scores = torch.rand(HEADS, num_tokens, generator=generator)
    scores[seed % HEADS] += 1.0
    scores[:, num_tokens - window :] = torch.inf
    budgets = head_budgets(scores, rows=rows, window=window, floor=floor)
    heads, positions = select_ragged_rows(scores, budgets)
    resolved = resolve(num_tokens, rows, floor=floor)
    (fmt,), (part_format,) = of_parts(resolved, 1), of_parts(resolved, num_parts)
    assert isinstance(part_format, Ragged)
    assert part_format.num_rows <= (HEADS // num_parts) * num_tokens
    keys = torch.zeros(len(heads), DIM)
    tensors = {
        "head_rows": budgets.to(torch.int32),
        "index": positions.to(torch.int32),
        "keys": keys,
        "values": keys,
    }
    for part in fmt.parts(tensors, num_parts):
        sized = part_format.sized(header_of(part))
        assert sized.tensors() == header_of(part)
        sized.check_content(part)


def test_the_room_of_a_part_is_what_the_floor_of_the_others_leaves() -> None:
    resolved = resolve(100, 30)
    (whole,), (half,), (quarter,) = (of_parts(resolved, number) for number in (1, 2, 4))
    assert isinstance(whole, Ragged)
    assert isinstance(half, Ragged)
    assert isinstance(quarter, Ragged)
    assert whole.num_rows == 4 * 30
    assert half.num_rows == 4 * 30 - 2 * 6  # 0.2 of 30
    assert quarter.num_rows == 100  # no head has more than every token


def test_more_rows_than_there_is_room_for_are_refused_with_the_numbers() -> None:
    (half,) = of_parts(resolve(100, 30), 2)
    with pytest.raises(
        InvalidTensors, match=r"its 2 heads have 109 rows; they can have 108 at most"
    ) as caught:
        half.sized(header_of(layer_of([60, 49], 100)))
    assert caught.value.reason == "layer_header"


def test_counts_that_are_not_those_of_the_rows_are_not_divided() -> None:
    (fmt,) = of_parts(resolve(100, 30), 1)
    tensors = layer_of([60, 40, 10, 10], 100)
    tensors["head_rows"][0] = 61
    with pytest.raises(InvalidTensors, match=r"parts of its heads have \[101, 20\] rows; it has 120"):
        fmt.parts(tensors, 2)


def test_layers_of_a_part_follow_one_another_without_the_room_that_they_do_not_need() -> None:
    ragged_plan = resolve(50, 12)
    (its_layer,) = ragged_plan.layers
    resolved = replace(ragged_plan, layers=(its_layer, LayerPlan(rows=50), its_layer))
    formats = of_parts(resolved, 2)
    planned = sequence_layout(formats)
    arriving = ArrivingLayout(planned)
    ragged, plain, _ = of_parts(resolved, 1)
    first, last = layer_of([3, 20, 5, 20], 50), layer_of([2, 4, 36, 6], 50)
    rows = torch.zeros(HEADS, 50, DIM)
    layers = [
        ragged.parts(first, 2)[1],
        plain.parts({"keys": rows, "values": rows}, 2)[1],
        ragged.parts(last, 2)[1],
    ]
    for tensors in layers:
        arriving.next(header_of(tensors))
    layout = arriving.layout
    assert layout.size_bytes < planned.size_bytes
    assert layout == sequence_layout([its.format for its in layout.layers])
    room = replace(resolved, max_new_tokens=40)
    grown = layout_like(of_parts(room, 2), [its.format for its in layout.layers])
    for its, before, tensors in zip(grown.layers, layout.layers, layers, strict=True):
        assert its.format.shape.max_new_tokens == 40
        assert its.format.tensors() == before.format.tensors() == header_of(tensors)


def test_a_layout_whose_sizes_follow_from_the_plan_stays_as_it_is() -> None:
    planned = sequence_layout(of_parts(resolve(50, 12), 1) * 2)
    arriving = ArrivingLayout(planned)
    for layer in planned.layers:
        assert arriving.next(header_of(layer_of([3, 20, 5, 20], 50))) is layer
    assert arriving.layout is planned
