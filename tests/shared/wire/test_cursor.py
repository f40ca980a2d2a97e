"""The transfer cursor accepts exactly one order of bytes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.wire.frames import TransferCursor, tensor_starts
from kvferry.shared.wire.messages import (
    TENSOR_DTYPE_BYTES,
    BlockHeader,
    FrameHeader,
    LayerHeader,
    MessageType,
    TensorHeader,
    TransferKey,
)
from kvferry.shared.wire.receiver import split

KEY = TransferKey(transfer_id=1, generation=1)

tensors = st.builds(
    lambda dtype, shape: (dtype, tuple(shape)),
    st.sampled_from(list(TENSOR_DTYPE_BYTES)),
    st.lists(st.integers(0, 4), max_size=4),
)


def layer_of(layer: int, *shapes: tuple[str, tuple[int, ...]]) -> LayerHeader:
    """Tensors t0, t1, ... of these dtypes and shapes."""
    headers = (
        TensorHeader(name=f"t{n}", dtype=dtype, shape=shape) for n, (dtype, shape) in enumerate(shapes)
    )
    return LayerHeader(layer=layer, tensors=tuple(headers))


def begin(cursor: TransferCursor, layer: LayerHeader, size: int = 0) -> None:
    cursor.pass_layer(cursor.sequence, layer, size)


def walk(cursor: TransferCursor, layer: int, total: int, offset: int, size: int) -> FrameHeader:
    header = FrameHeader(
        type=MessageType.BLOCK,
        key=KEY,
        sequence=cursor.sequence,
        layer=layer,
        total_bytes=total,
        offset=offset,
    )
    cursor.pass_block(header, size)
    return header


def is_complete(cursor: TransferCursor) -> bool:
    try:
        cursor.check_complete()
    except TransferFailed as incomplete:
        return incomplete.reason != "incomplete"
    return True


@given(st.lists(st.lists(tensors, max_size=5), min_size=1, max_size=5), st.data())
def test_every_tensor_in_order_in_any_pieces_completes(
    shapes: list[list[tuple[str, tuple[int, ...]]]], data: st.DataObject
) -> None:
    cursor = TransferCursor(len(shapes))
    num_blocks = total_bytes = 0
    for layer, entries in enumerate(shapes):
        assert not is_complete(cursor)
        header = layer_of(layer, *entries)
        total = tensor_starts(header)[-1]
        sent = data.draw(st.binary(min_size=total, max_size=total))
        offset = data.draw(st.integers(0, total))
        message = FrameHeader(type=MessageType.LAYER, key=KEY, sequence=cursor.sequence)
        begin(cursor, header, offset)
        parts = split(cursor, message, data.draw(frames_of(sent[:offset])))
        while offset < total:
            assert not is_complete(cursor)
            size = data.draw(st.integers(1, total - offset))
            message = walk(cursor, layer, total, offset, size)
            parts += split(cursor, message, data.draw(frames_of(sent[offset : offset + size])))
            offset += size
            num_blocks += 1
        total_bytes += total
        assert_split(header, parts, sent)
    assert is_complete(cursor)
    assert cursor.sequence == len(shapes) + num_blocks
    assert (cursor.num_blocks, cursor.payload_bytes) == (num_blocks, total_bytes)


@st.composite
def frames_of(draw: st.DrawFn, payload: bytes) -> list[memoryview]:
    """The payload in frames that are cut anywhere."""
    cuts = draw(st.lists(st.integers(0, len(payload)), max_size=4).map(sorted))
    return [memoryview(payload)[a:b] for a, b in itertools.pairwise([0, *cuts, len(payload)])]


def assert_split(layer: LayerHeader, parts: list[tuple[BlockHeader, memoryview]], sent: bytes) -> None:
    """The parts are the layer's bytes in order, each within one tensor and none of them empty."""
    assert b"".join(part for _, part in parts) == sent
    passed = [0] * len(layer.tensors)
    sizes = [end - start for start, end in itertools.pairwise(tensor_starts(layer))]
    for block, part in parts:
        assert block.layer == layer.layer
        assert block.offset == passed[block.tensor]
        passed[block.tensor] += part.nbytes
        assert part.nbytes
    assert passed == sizes


@given(tensors)
def test_a_tensors_size_follows_its_shape_and_dtype(tensor: tuple[str, tuple[int, ...]]) -> None:
    dtype, shape = tensor
    width = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int16": 2, "uint8": 1}[dtype]
    assert tensor_starts(layer_of(0, tensor, tensor)) == [
        0,
        math.prod(shape) * width,
        2 * math.prod(shape) * width,
    ]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ((1, 48, 0, 24), "order"),
        ((0, 48, 24, 24), "order"),
        ((0, 48, 48, 24), "order"),
        ((0, 48, 1, 23), "order"),
        ((0, 49, 0, 24), "size"),
        ((0, 48, 0, 49), "size"),
        ((0, 48, 0, 0), "size"),
        ((0, 24, 0, 24), "size"),
    ],
)
def test_a_wrong_first_block_is_refused(step: tuple[int, int, int, int], reason: str) -> None:
    cursor = TransferCursor(2)
    begin(cursor, layer_of(0, ("float16", (3, 1, 4)), ("float16", (3, 1, 4))))
    with pytest.raises(TransferFailed) as refused:
        walk(cursor, *step)
    assert refused.value.reason == reason


def test_the_last_tensor_is_as_large_as_its_header_says() -> None:
    cursor = TransferCursor(1)
    begin(cursor, layer_of(0, ("float16", (24,)), ("float32", (3, 5))))
    walk(cursor, 0, 108, 0, 48)
    assert not is_complete(cursor)
    for wrong in (56, 64):
        with pytest.raises(TransferFailed, match="implies 108"):
            walk(cursor, 0, 48 + wrong, 48, wrong)
    walk(cursor, 0, 108, 48, 60)
    assert is_complete(cursor)


def test_a_layers_message_may_carry_its_tensors_but_no_more() -> None:
    cursor = TransferCursor(2)
    layer = layer_of(0, ("float16", (24,)), ("float32", (3, 5)))
    with pytest.raises(TransferFailed, match="109 bytes; its header implies 108") as refused:
        begin(cursor, layer, 109)
    assert refused.value.reason == "size"
    begin(cursor, layer, 107)
    with pytest.raises(TransferFailed, match="t1 offset 59"):
        begin(cursor, layer_of(1))
    walk(cursor, 0, 108, 107, 1)
    begin(cursor, replace(layer, layer=1), 108)
    assert is_complete(cursor)
    assert (cursor.sequence, cursor.num_blocks, cursor.payload_bytes) == (3, 1, 216)


@pytest.mark.parametrize("shapes", [[(1,), (1,)], [(2**24, 2**24, 2)], [(2**31 - 1, 2**31 - 1)]])
def test_a_layer_with_a_name_twice_or_too_many_bytes_is_refused(shapes: list[tuple[int, ...]]) -> None:
    tensors = tuple(TensorHeader(name="same", dtype="float32", shape=shape) for shape in shapes)
    with pytest.raises(ProtocolMismatch, match="different names and at most") as refused:
        begin(TransferCursor(1), LayerHeader(layer=0, tensors=tensors))
    assert refused.value.reason == "malformed"


def test_an_earlier_tensor_and_anything_after_the_end_are_refused() -> None:
    cursor = TransferCursor(1)
    begin(cursor, layer_of(0, ("int32", (3,)), ("float16", (12,))))
    walk(cursor, 0, 36, 0, 12)
    walk(cursor, 0, 36, 12, 23)
    with pytest.raises(TransferFailed, match=r"offset 35 of layer 0 \(t1 offset 23\) is expected"):
        walk(cursor, 0, 36, 0, 12)
    walk(cursor, 0, 36, 35, 1)
    for after in (12, 36):
        with pytest.raises(TransferFailed, match="nothing more is expected"):
            walk(cursor, 0, 36, after, 24)
    with pytest.raises(TransferFailed, match="nothing more"):
        begin(cursor, layer_of(1))


def test_a_tensor_cannot_cut_the_one_before_it_short() -> None:
    cursor = TransferCursor(1)
    begin(cursor, layer_of(0, ("int32", (6,)), ("float16", (24,))))
    walk(cursor, 0, 72, 0, 12)
    with pytest.raises(TransferFailed, match="t0 offset 12"):
        walk(cursor, 0, 72, 24, 48)


def test_tensors_without_bytes_are_passed_over_and_a_layer_may_have_nothing_else() -> None:
    cursor = TransferCursor(3)
    begin(cursor, layer_of(0, ("int32", (0,)), ("uint8", (4,)), ("float16", (3, 0)), ("uint8", (2,))))
    with pytest.raises(TransferFailed) as refused:
        walk(cursor, 0, 6, 0, 0)
    assert refused.value.reason == "size"
    parts = split(cursor, walk(cursor, 0, 6, 0, 6), [memoryview(b"abcdef")])
    assert [(block.tensor, bytes(part)) for block, part in parts] == [(1, b"abcd"), (3, b"ef")]
    begin(cursor, layer_of(1, ("int32", (0,)), ("float16", (3, 0))))
    with pytest.raises(TransferFailed, match="the header of layer 2 is expected"):
        walk(cursor, 1, 0, 0, 0)
    begin(cursor, layer_of(2))
    assert is_complete(cursor)


def test_headers_come_layer_by_layer_and_only_once_the_last_layer_is_whole() -> None:
    cursor = TransferCursor(2)
    first, second = layer_of(0, ("uint8", (4,))), layer_of(1, ("uint8", (4,)))
    with pytest.raises(TransferFailed, match="the header of layer 0"):
        begin(cursor, second)
    with pytest.raises(TransferFailed, match="the header of layer 0 is expected"):
        walk(cursor, 0, 4, 0, 4)
    begin(cursor, first)
    walk(cursor, 0, 4, 0, 3)
    for early in (first, second):
        with pytest.raises(TransferFailed, match=r"layer 0 \(t0 offset 3\)"):
            begin(cursor, early)
    walk(cursor, 0, 4, 3, 1)
    with pytest.raises(TransferFailed) as refused:
        begin(cursor, first)
    assert refused.value.reason == "order"
    begin(cursor, second)


@pytest.mark.parametrize("sequence", [0, 2])
def test_headers_and_blocks_share_one_count(sequence: int) -> None:
    cursor = TransferCursor(2)
    begin(cursor, layer_of(0, ("uint8", (4,))))
    block = FrameHeader(type=MessageType.BLOCK, key=KEY, sequence=sequence, total_bytes=4)
    with pytest.raises(TransferFailed, match=f"block {sequence}, .* was received; number 1") as refused:
        cursor.pass_block(block, 4)
    assert refused.value.reason == "order"
    walk(cursor, 0, 4, 0, 4)
    with pytest.raises(TransferFailed) as refused:
        cursor.pass_layer(sequence + 1, layer_of(1))
    assert refused.value.reason == "order"
