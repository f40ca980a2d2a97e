"""A delta's layers come out as whole ones do; what the sender cannot know is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import Placed, one_format
from kvtest.delta import DIM, FOUR_TOKENS, draw_delta
from torch import Tensor

from kvferry.shared.cache.arena import header_of
from kvferry.shared.cache.delta import NEW_ROWS, DeltaLayer, Positions, delta_tensors
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerFormat
from kvferry.shared.compression.formats.rows import RowsCache
from kvferry.shared.compression.interface import TensorSpec


def plain_format(positions: Positions | None, *, heads: int, num_tokens: int) -> LayerFormat:
    return one_format(
        rows=num_tokens if positions is None else positions.shape[1],
        num_prompt_tokens=num_tokens,
        max_new_tokens=3,
        num_kv_heads=heads,
        head_dim=DIM,
    )


@given(st.data())
def test_retained_and_new_rows_together_are_the_whole_layer(data: st.DataObject) -> None:
    delta = draw_delta(data)
    sent, num_new = delta.sent, sum(delta.num_new)
    assert list(sent) == [*([] if delta.positions is None else ["index"]), NEW_ROWS, "keys", "values"]
    assert sent["keys"].shape == sent["values"].shape == (num_new, DIM)
    placed = Placed.of(plain_format(delta.positions, heads=delta.heads, num_tokens=delta.num_tokens))
    layer = DeltaLayer(placed.layout.format, 0, delta.retained, delta.rows)
    places = layer.receive(header_of(sent), placed.regions)
    assert list(places) == list(sent)
    assert places["keys"].nbytes + places["values"].nbytes == 2 * num_new * DIM * 4
    for name, place in places.items():
        place.copy_(sent[name])
    cache = layer.open(placed.regions, places)
    assert isinstance(cache, RowsCache)
    delta.assert_received(cache)


def delta_of_five_tokens() -> tuple[Placed, DeltaLayer, dict[str, Tensor]]:
    """The layer of a prompt of five tokens, the first four of them retained, and what is sent of it."""
    rows = torch.zeros(2, 6, DIM)
    placed = Placed.of(plain_format(None, heads=2, num_tokens=5))
    prompt = torch.randn(2, 5, DIM)
    sent = delta_tensors({"keys": prompt, "values": prompt}, 0, FOUR_TOKENS)
    return placed, DeltaLayer(placed.layout.format, 0, FOUR_TOKENS, [(rows, rows)]), sent


@pytest.mark.parametrize(
    ("counts", "num_sent"), [([1, 2], 3), ([1, 1], 3), ([2, 0], 2), ([0, 0], 0), ([-1, 3], 2)]
)
def test_another_number_of_rows_than_lacks_is_refused(counts: list[int], num_sent: int) -> None:
    placed, layer, sent = delta_of_five_tokens()
    assert sent[NEW_ROWS].tolist() == [1, 1]
    rows = torch.zeros(num_sent, DIM)
    wrong = {NEW_ROWS: torch.tensor(counts, dtype=torch.int32), "keys": rows, "values": rows}
    places = layer.receive(header_of(wrong), placed.regions)
    for name, place in places.items():
        place.copy_(wrong[name])
    with pytest.raises(InvalidTensors, match=r"this worker lacks \[1, 1\]") as caught:
        layer.open(placed.regions, places)
    assert caught.value.reason == "retained_rows"


def test_other_tensors_than_a_deltas_and_more_rows_than_the_layer_has_are_refused() -> None:
    placed, layer, sent = delta_of_five_tokens()
    header = header_of(sent)
    for wrong in (
        {name: spec for name, spec in header.items() if name != NEW_ROWS},
        {**header, "values": TensorSpec(shape=(1, DIM), dtype=torch.float32)},
        {**header, "keys": TensorSpec(shape=(), dtype=torch.float32)},
        {"index": TensorSpec(shape=(2, 5), dtype=torch.int32), **header},
        {name: replace(spec, dtype=torch.float64) for name, spec in header.items()},
        {},
    ):
        with pytest.raises(InvalidTensors) as caught:
            layer.receive(wrong, placed.regions)
        assert caught.value.reason == "layer_header"
    for num_rows in (11, 1 << 40, -1, -5):
        rows = TensorSpec(shape=(num_rows, DIM), dtype=torch.float32)
        with pytest.raises(InvalidTensors, match="the layer has 10") as caught:
            layer.receive({**header, "keys": rows, "values": rows}, placed.regions)
        assert caught.value.reason == "size"


def test_positions_that_no_selection_makes_are_refused() -> None:
    for index in ([[0, 5], [0, 1]], [[1, 0], [0, 1]], [[-1, 0], [0, 1]]):
        positions = torch.tensor(index, dtype=torch.int32)
        placed = Placed.of(plain_format(positions.numpy(), heads=2, num_tokens=5))
        layer = DeltaLayer(placed.layout.format, 0, FOUR_TOKENS, [(torch.zeros(2, 6, DIM),) * 2])
        sent = {
            "index": positions,
            NEW_ROWS: torch.zeros(2, dtype=torch.int32),
            "keys": torch.zeros(0, DIM),
            "values": torch.zeros(0, DIM),
        }
        with pytest.raises(InvalidTensors, match="kept positions must ascend") as caught:
            layer.open(placed.regions, sent)
        assert caught.value.reason == "index"
