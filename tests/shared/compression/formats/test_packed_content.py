"""Packed layers land where they are attended to; what no packer writes is refused, as are wrong sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import NOT_WRITTEN, Placed, one_format, packed_tensors
from kvtest.packed import unpack_layer
from torch import Tensor

from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.layout import LAYOUT_VERSION, HeadCounts, packed_layout
from kvferry.kernels.packed.packing import pack_layer
from kvferry.shared.cache.arena import header_of
from kvferry.shared.compression.formats.interface import InvalidTensors
from kvferry.shared.compression.formats.packed import PackedCache
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.plan import Part

HEADS, DIM, PROMPT = 2, 6, 41
PARTS = ("codes", "scales", "rows", "index")


def make_packed(seed: int = 0, *, key_bits: list[int] | None = None) -> PackedLayer:
    """Every width among channels and tokens of each head, unless all channels have the same."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, HEADS, PROMPT, DIM, generator=generator)
    of_keys = torch.tensor(key_bits or [0, 2, 4, 8, 16, 16], dtype=torch.uint8).repeat(HEADS, 1)
    of_values = torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8).repeat(HEADS, 9)[:, :PROMPT]
    return pack_layer(keys, values, of_keys, of_values)


def make_uniform(bits: int) -> PackedLayer:
    """Every channel and token at one width; 0 keeps nothing."""
    keys, values = torch.randn(2, HEADS, PROMPT, DIM, generator=torch.Generator().manual_seed(bits))
    return pack_layer(
        keys,
        values,
        torch.full((HEADS, DIM), bits, dtype=torch.uint8),
        torch.full((HEADS, PROMPT), bits, dtype=torch.uint8),
    )


def make_format(*, budget_tokens: int = PROMPT, num_tokens: int = PROMPT) -> Rdkv:
    fmt = one_format(
        rows=num_tokens,
        num_prompt_tokens=num_tokens,
        num_kv_heads=HEADS,
        head_dim=DIM,
        method="rdkv",
        representation=Part(name="rdkv", params={"budget_tokens": budget_tokens}),
    )
    assert isinstance(fmt, Rdkv)
    return fmt


def arrive(tensors: dict[str, Tensor], fmt: Rdkv | None = None) -> tuple[Placed, PackedCache]:
    placed = Placed.of(fmt or make_format())
    cache = placed.open(tensors)
    assert isinstance(cache, PackedCache)
    return placed, cache


@given(seed=st.integers(0, 99))
def test_a_layer_lies_in_the_arena_as_it_was_packed(seed: int) -> None:
    packed = make_packed(seed)
    placed, cache = arrive(packed_tensors(packed))
    assert cache.packed.layout == packed.layout
    region = placed.regions["packed"]
    assert cache.packed.buffer.data_ptr() == region.data_ptr()
    for one, other in zip(unpack_layer(cache.packed), unpack_layer(packed), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert (region[packed.layout.size_bytes :] == NOT_WRITTEN).all()
    assert len(region) > packed.layout.size_bytes


def test_parts_without_bytes_and_a_layer_that_keeps_nothing_are_taken() -> None:
    low, none = make_uniform(4), make_uniform(0)
    assert low.layout.kinds["rows"][1] == 0
    assert none.layout.size_bytes == 0
    for packed in (low, none):
        _, cache = arrive(packed_tensors(packed))
        assert cache.packed.layout == packed.layout


@pytest.mark.parametrize(
    ("name", "entry", "named"),
    [
        ("positions", PROMPT, "positions of head 1"),
        ("positions", -1, "positions of head 1"),
        ("channels", DIM, "channels of head 1"),
        ("key_scales", float("nan"), "scales of head 1"),
        ("value_scales", 0.0, "scales of head 1"),
        ("key_minima", float("inf"), "scales of head 1"),
        ("values_16", float("nan"), "head 1 keeps at 16 bits"),
        ("key_words", 0xFF, "head 1 keeps at 16 bits"),
    ],
)
def test_what_no_packer_writes_is_refused(name: str, entry: float, named: str) -> None:
    packed = make_packed()
    getattr(packed.heads[1], name)[-8 if name == "key_words" else -1 :] = entry
    with pytest.raises(InvalidTensors, match=named) as caught:
        arrive(packed_tensors(packed))
    assert caught.value.reason == "packed"


@given(data=st.data())
def test_garbage_becomes_a_layer_within_bounds_or_a_named_error(data: st.DataObject) -> None:
    tensors = {name: tensor.clone() for name, tensor in packed_tensors(make_packed()).items()}
    for _ in range(data.draw(st.integers(1, 4))):
        content = tensors[data.draw(st.sampled_from(list(tensors)))].view(torch.uint8)
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, cache = arrive(tensors)
    except InvalidTensors:
        return
    for keys, values, positions in unpack_layer(cache.packed):
        assert keys.isfinite().all()
        assert values.isfinite().all()
        assert ((positions >= 0) & (positions < PROMPT)).all()


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("change", [16, -16])
def test_sizes_that_the_layout_does_not_imply_are_refused(name: str, change: int) -> None:
    tensors = packed_tensors(make_packed())
    size_bytes = len(tensors[name]) + change
    tensors[name] = torch.zeros(max(size_bytes, 0), dtype=torch.uint8)
    with pytest.raises(InvalidTensors, match="announced") as caught:
        arrive(tensors)
    assert caught.value.reason == "layout"


def test_a_packed_layer_begins_with_its_layout_and_a_layer_of_rows_takes_no_packed_tensor() -> None:
    header = header_of(packed_tensors(make_packed()))
    placed = Placed.of(make_format())
    for name in PARTS:
        first = {name: header[name], **header}
        with pytest.raises(InvalidTensors) as caught:
            placed.layout.format.receive(first, placed.regions)
        assert caught.value.reason == "layer_header"
    rows = Placed.of(one_format(rows=3, num_prompt_tokens=PROMPT, num_kv_heads=HEADS, head_dim=DIM))
    for sent in (header, {**header_of(rows.regions), "codes": header["codes"]}):
        with pytest.raises(InvalidTensors) as caught:
            rows.layout.format.receive(sent, rows.regions)
        assert caught.value.reason == "layer_header"


def test_a_layer_larger_than_its_region_is_refused_before_its_bytes() -> None:
    packed = make_packed()
    fmt = next(
        fmt
        for fmt in (make_format(budget_tokens=tokens) for tokens in range(PROMPT, 0, -1))
        if fmt.limit_bytes < packed.layout.size_bytes
    )
    placed = Placed.of(fmt)
    with pytest.raises(InvalidTensors, match=f"of at most {fmt.limit_bytes}") as caught:
        fmt.receive(header_of(packed_tensors(packed)), placed.regions)
    assert caught.value.reason == "layer_header"
    assert (placed.buffer == NOT_WRITTEN).all()


@pytest.mark.parametrize("size_bytes", [1 << 20, 1 << 40, -16])
@pytest.mark.parametrize("name", PARTS)
def test_no_part_reaches_beyond_the_region(name: str, size_bytes: int) -> None:
    header = header_of(packed_tensors(make_packed()))
    header[name] = type(header[name])(shape=(size_bytes,), dtype=torch.uint8)
    placed = Placed.of(make_format())
    with pytest.raises(InvalidTensors) as caught:
        placed.layout.format.receive(header, placed.regions)
    assert caught.value.reason == "layer_header"


def test_a_layout_is_held_to_the_prompts_tokens() -> None:
    packed = make_uniform(4)
    assert max(head.num_tokens for head in packed.layout.heads) == PROMPT
    fmt = make_format(num_tokens=PROMPT - 1)
    with pytest.raises(InvalidTensors, match=f"at most {PROMPT - 1} tokens") as caught:
        arrive(packed_tensors(packed), fmt)
    assert caught.value.reason == "layout"


def test_a_layout_is_held_to_the_layers_bytes() -> None:
    packed, none = make_packed(), make_uniform(0)
    tensors = {**packed_tensors(none), "layout": packed_tensors(packed)["layout"]}
    with pytest.raises(InvalidTensors, match="bytes that were announced") as caught:
        arrive(tensors)
    assert caught.value.reason == "layout"


@pytest.mark.parametrize("version", [1, 2, LAYOUT_VERSION + 1])
def test_another_layout_version_is_refused_by_name(version: int) -> None:
    tensors = packed_tensors(make_packed())
    assert tensors["layout"][0] == LAYOUT_VERSION == 3
    tensors["layout"][0] = version
    with pytest.raises(InvalidTensors, match=f"version {version}; this side reads 3") as caught:
        arrive(tensors)
    assert caught.value.reason == "layout_version"


@given(
    st.lists(st.integers(-3, 30) | st.integers(-(2**31), 2**31 - 1), min_size=16, max_size=16),
    st.sampled_from([LAYOUT_VERSION, LAYOUT_VERSION, 0, -1, 2**31 - 1]),
)
def test_any_layout_is_within_bounds_or_refused_by_name(counts: list[int], version: int) -> None:
    """The other tensors are as large as the layout implies, if it implies anything that may be announced."""
    fmt = make_format()
    try:
        heads = tuple(
            HeadCounts(channels=tuple(counts[i : i + 4]), tokens=tuple(counts[i + 4 : i + 8])) for i in (0, 8)
        )
        layout = packed_layout(heads, DIM, num_tokens=PROMPT)
        sizes = {name: layout.kinds[kind][1] for name, kind in zip(PARTS, layout.kinds, strict=True)}
        if sum(sizes.values()) > fmt.limit_bytes:
            raise ValueError("beyond what may be announced")
    except ValueError:
        sizes = dict.fromkeys(PARTS, 0)
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    sent = {"layout": torch.tensor([version, *counts], dtype=torch.int32), **tensors}
    try:
        _, cache = arrive(sent, fmt)
    except InvalidTensors:
        return
    layout = cache.packed.layout
    assert layout.size_bytes <= fmt.limit_bytes
    assert all(head.num_tokens <= PROMPT and head.num_channels <= DIM for head in layout.heads)
    assert layout == packed_layout(layout.heads, DIM, num_tokens=PROMPT)
