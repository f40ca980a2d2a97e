"""Rows in the arena: prompt rows, room for new ones, page extremes; and positions that no selection makes."""

from __future__ import annotations

import pytest
import torch
from kvtest.compression import Placed, one_format
from kvtest.reference.sparse import page_extremes
from torch import Tensor

from kvferry.shared.compression.attention import Hsa
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerFormat
from kvferry.shared.compression.formats.rows import RowsCache
from kvferry.shared.compression.plan import Part

HEADS, DIM, PROMPT = 2, 3, 9
HSA = Part(name="hsa", params={"page_size": 2, "num_channels": 1, "num_tokens": 2})
FORMATS: dict[str, tuple[str, Part, Part]] = {
    "dense": ("full", Part(name="dense"), Part(name="rows")),
    "hsa": ("full", HSA, Part(name="rows")),
    "evict": ("h2o", Part(name="evict"), Part(name="rows")),
    "merge": ("d2o", Part(name="merge"), Part(name="rows")),
    "wire": ("full", Part(name="dense"), Part(name="rows", params={"wire_bits": 4})),
    "kivi": ("kivi", Part(name="dense"), Part(name="kivi", params={"bits": 4})),
    "think": (
        "think",
        Part(name="dense"),
        Part(name="think", params={"channel_retention": 0.5, "window": 2}),
    ),
}


def make_format(name: str, *, rows: int = 5) -> LayerFormat:
    method, attention, representation = FORMATS[name]
    return one_format(
        attention,
        rows=rows,
        num_prompt_tokens=PROMPT,
        num_kv_heads=HEADS,
        head_dim=DIM,
        method=method,
        representation=representation,
    )


def make_tensors(fmt: LayerFormat, index: list[list[int]]) -> dict[str, Tensor]:
    """What arrives, of random content but for the positions."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, spec in fmt.tensors().items():
        content = torch.rand(spec.shape, generator=generator)
        tensors[name] = (
            content.to(spec.dtype)
            if spec.dtype.is_floating_point
            else torch.zeros_like(content).to(spec.dtype)
        )
    if "channels" in tensors:
        tensors["channels"][:] = torch.arange(2, dtype=torch.int16)
    return {**tensors, "index": torch.tensor(index, dtype=torch.int32)}


def test_rows_and_page_extremes_are_there_and_nothing_else_is_written() -> None:
    for name, rows in (("dense", PROMPT), ("hsa", 5)):
        fmt = make_format(name, rows=rows)
        tensors = make_tensors(fmt, [[0, 2, 3, 7, 8], [1, 2, 3, 4, 5]])
        if rows == PROMPT:
            del tensors["index"]
        cache = Placed.of(fmt).open({n: tensors[n] for n in fmt.tensors()})
        assert isinstance(cache, RowsCache)
        assert torch.equal(cache.keys[:, :rows], tensors["keys"])
        assert torch.equal(cache.values[:, :rows], tensors["values"])
        assert cache.keys.shape == cache.values.shape == (HEADS, rows + 3, DIM)
        assert cache.keys[:, rows:].isnan().all()
        assert cache.values[:, rows:].isnan().all()
        assert (cache.positions is None) == (rows == PROMPT)
    expected_max, expected_min = page_extremes(tensors["keys"], page_size=2)
    attention = cache.format.attention
    assert isinstance(attention, Hsa)
    page_max, page_min = attention.extremes(cache.view)
    assert torch.equal(page_max[:, :3], expected_max)
    assert torch.equal(page_min[:, :3], expected_min)
    assert page_max[:, 3:].isnan().all()


@pytest.mark.parametrize(
    "index",
    [
        [[0, 2, 3, 7, 9], [1, 2, 3, 4, 5]],
        [[-1, 2, 3, 7, 8], [1, 2, 3, 4, 5]],
        [[0, 2, 3, 7, 8], [1, 2, 2, 4, 5]],
        [[0, 3, 2, 7, 8], [1, 2, 3, 4, 5]],
    ],
    ids=["beyond the prompt", "negative", "twice", "not ascending"],
)
@pytest.mark.parametrize("name", FORMATS)
def test_positions_that_no_selection_makes_are_refused(name: str, index: list[list[int]]) -> None:
    fmt = make_format(name)
    tensors = make_tensors(fmt, index)
    with pytest.raises(InvalidTensors, match="kept positions must ascend within 0 to 8") as caught:
        Placed.of(fmt).open({n: tensors[n] for n in fmt.tensors()})
    assert caught.value.reason == ("packed" if name in ("wire", "kivi", "think") else "index")


@pytest.mark.parametrize("name", FORMATS)
def test_positions_may_fall_from_one_head_to_the_next(name: str) -> None:
    fmt = make_format(name)
    tensors = make_tensors(fmt, [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]])
    Placed.of(fmt).open({n: tensors[n] for n in fmt.tensors()})
