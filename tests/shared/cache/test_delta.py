"""A delta's layers come out as whole ones do; what the sender cannot know is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import Placed, one_format
from torch import Tensor

from kvferry.shared.cache.arena import header_of
from kvferry.shared.cache.delta import (
    NEW_ROWS,
    DeltaLayer,
    Positions,
    RetainedChain,
    RetainedRows,
    delta_tensors,
)
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerFormat
from kvferry.shared.compression.formats.rows import RowsCache
from kvferry.shared.compression.interface import TensorSpec

DIM = 3


def selection(data: st.DataObject, *, heads: int, num_tokens: int) -> Positions | None:
    """Positions `[H_kv, n]`; None where all are kept."""
    num_rows = data.draw(st.integers(1, num_tokens))
    if num_rows == num_tokens:
        return None
    draw = st.permutations(range(num_tokens)).map(lambda order: sorted(order[:num_rows]))
    return np.array([data.draw(draw) for _ in range(heads)], np.int32)


def rows_of(tokens: Tensor, positions: Positions | None) -> Tensor:
    """K or V rows of `[H_kv, T, D]` at these positions."""
    if positions is None:
        return tokens.clone()
    return torch.stack(
        [rows[torch.from_numpy(its).long()] for rows, its in zip(tokens, positions, strict=True)]
    )


def retained_rows(
    tokens: Sequence[Tensor], positions: Positions | None, *, prompt: int, generated: int
) -> tuple[Tensor, Tensor]:
    """As the arena has them: the prompt's rows, generated ones after them, the rest never written."""
    keys, values = (
        torch.cat(
            [
                rows_of(its[:, :prompt], positions),
                its[:, prompt : prompt + generated],
                torch.full((len(its), 2, DIM), torch.nan),
            ],
            1,
        )
        for its in tokens
    )
    return keys, values


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
    heads = data.draw(st.sampled_from([1, 2, 3]))
    # the prompts of earlier turns, the newest first, each a part of the one before it
    prompts = sorted(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)), reverse=True)
    generated, more = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
    total = prompts[0] + generated + more
    tokens = [torch.randn(heads, total, DIM, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    before = [selection(data, heads=heads, num_tokens=prompt) for prompt in prompts]
    after = selection(data, heads=heads, num_tokens=total)
    num_shared = data.draw(st.integers(1, prompts[0] + generated))
    depth = data.draw(st.integers(1, len(prompts)))
    retained = RetainedChain(
        selections=tuple(
            RetainedRows(transfer_id=7, num_prompt_tokens=prompt, num_tokens=total, layers=(positions,))
            for prompt, positions in zip(prompts, before, strict=True)
        )
    ).first(depth, num_shared)
    rows = [
        # nothing generated after an earlier prompt is counted on
        retained_rows(tokens, positions, prompt=prompt, generated=0 if number else generated)
        for number, (prompt, positions) in enumerate(zip(prompts, before, strict=True))
    ][:depth]
    whole = dict(zip(("keys", "values"), (rows_of(its, after) for its in tokens), strict=True))
    index = {} if after is None else {"index": torch.from_numpy(after)}
    sent = delta_tensors({**index, **whole}, 0, retained)
    wanted = after if after is not None else np.tile(np.arange(total, dtype=np.int32), (heads, 1))

    def is_retained(head: int, token: int) -> bool:
        generated_last = prompts[0] <= token
        kept_once = any(
            token < prompt and (positions is None or token in positions[head])
            for prompt, positions in zip(prompts[:depth], before[:depth], strict=True)
        )
        return token < num_shared and (generated_last or kept_once)

    num_new = sum(not is_retained(head, token) for head in range(heads) for token in wanted[head])
    assert list(sent) == [*index, NEW_ROWS, "keys", "values"]
    assert sent["keys"].shape == sent["values"].shape == (num_new, DIM)
    placed = Placed.of(plain_format(after, heads=heads, num_tokens=total))
    layer = DeltaLayer(placed.layout.format, 0, retained, rows)
    places = layer.receive(header_of(sent), placed.regions)
    assert list(places) == list(sent)
    assert places["keys"].nbytes + places["values"].nbytes == 2 * num_new * DIM * 4
    for name, place in places.items():
        place.copy_(sent[name])
    cache = layer.open(placed.regions, places)
    assert isinstance(cache, RowsCache)
    for target, expected in zip((cache.keys, cache.values), whole.values(), strict=True):
        assert torch.equal(target[:, : expected.shape[1]], expected)
        assert target[:, expected.shape[1] :].isnan().all()
    assert (cache.positions is None) == (after is None)
    assert after is None or np.array_equal(cache.positions, after)


def delta_of_five_tokens() -> tuple[Placed, DeltaLayer, dict[str, Tensor]]:
    """The layer of a prompt of five tokens, the first four of them retained, and what is sent of it."""
    retained = RetainedChain(
        selections=(RetainedRows(transfer_id=7, num_prompt_tokens=4, num_tokens=4, layers=(None,)),)
    )
    rows = torch.zeros(2, 6, DIM)
    placed = Placed.of(plain_format(None, heads=2, num_tokens=5))
    prompt = torch.randn(2, 5, DIM)
    sent = delta_tensors({"keys": prompt, "values": prompt}, 0, retained)
    return placed, DeltaLayer(placed.layout.format, 0, retained, [(rows, rows)]), sent


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
        {name: its for name, its in header.items() if name != NEW_ROWS},
        {**header, "values": TensorSpec(shape=(1, DIM), dtype=torch.float32)},
        {**header, "keys": TensorSpec(shape=(), dtype=torch.float32)},
        {"index": TensorSpec(shape=(2, 5), dtype=torch.int32), **header},
        {name: replace(its, dtype=torch.float64) for name, its in header.items()},
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
    retained = RetainedChain(
        selections=(RetainedRows(transfer_id=7, num_prompt_tokens=4, num_tokens=4, layers=(None,)),)
    )
    for index in ([[0, 5], [0, 1]], [[1, 0], [0, 1]], [[-1, 0], [0, 1]]):
        positions = torch.tensor(index, dtype=torch.int32)
        placed = Placed.of(plain_format(positions.numpy(), heads=2, num_tokens=5))
        layer = DeltaLayer(placed.layout.format, 0, retained, [(torch.zeros(2, 6, DIM),) * 2])
        sent = {
            "index": positions,
            NEW_ROWS: torch.zeros(2, dtype=torch.int32),
            "keys": torch.zeros(0, DIM),
            "values": torch.zeros(0, DIM),
        }
        with pytest.raises(InvalidTensors, match="kept positions must ascend") as caught:
            layer.open(placed.regions, sent)
        assert caught.value.reason == "index"
