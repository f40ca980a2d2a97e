"""Packed layers on the wire: sizes follow from the layout section alone, and nothing out of bounds passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kvtest.wire as kit
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvferry.kernels.packed import LAYOUT_VERSION, PackedLayer, pack_layer, packed_layout
from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.wire.layout import SectionCursor, section_bytes
from kvferry.shared.wire.messages import Manifest, Section, TransferKey
from kvferry.shared.wire.packed_sections import decode_layout, packed_sections

UNTIMED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy
HEADS, DIM, TOKENS = 2, 6, 23


def make_packed(seed: int = 0, *, widths: tuple[int, ...] = (0, 2, 4, 8, 16)) -> PackedLayer:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.tensor(widths, dtype=torch.uint8)

    def draw(*shape: int) -> Tensor:
        return bits[torch.randint(0, len(widths), shape, generator=generator)]

    rows = torch.randn(2, HEADS, TOKENS, DIM, generator=generator)
    return pack_layer(rows[0], rows[1], draw(HEADS, DIM), draw(HEADS, TOKENS))


def manifest_of(packed: list[PackedLayer | None], *, spare_bytes: int = 64) -> Manifest:
    """Layers of 3 rows where there is no packed layer."""
    return Manifest(
        purpose="cache",
        key=TransferKey(transfer_id=5, generation=1),
        request_id="r",
        model_fingerprint="f",
        dtype="float32",
        num_kv_heads=HEADS,
        head_dim=DIM,
        start=0,
        num_tokens=TOKENS,
        layer_rows=tuple(3 if layer is None else TOKENS for layer in packed),
        layer_packed_bytes=tuple(
            0 if layer is None else layer.layout.size_bytes + spare_bytes for layer in packed
        ),
    )


def sections_of(packed: list[PackedLayer | None]) -> list[tuple[int, Section, Tensor]]:
    sections: list[tuple[int, Section, Tensor]] = []
    for layer, its in enumerate(packed):
        if its is not None:
            sections += [(layer, section, tensor) for section, tensor in packed_sections(its)]
        else:
            sections += [(layer, s, torch.randn(HEADS, 3, DIM)) for s in (Section.KEYS, Section.VALUES)]
    return sections


def walk(cursor: SectionCursor, layer: int, section: Section, data: bytes, offset: int, size: int) -> None:
    cursor.advance(
        layer=layer,
        section=section,
        total_bytes=len(data),
        offset=offset,
        num_bytes=size,
        layout=data[offset : offset + size] if section is Section.LAYOUT else b"",
    )


def data_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


@UNTIMED
@given(st.lists(st.none() | st.integers(0, 99), min_size=1, max_size=4), st.data())
def test_packed_layers_and_layers_of_rows_pass_in_order_in_any_pieces(
    seeds: list[int | None], data: st.DataObject
) -> None:
    packed = [None if seed is None else make_packed(seed) for seed in seeds]
    cursor = SectionCursor(manifest_of(packed))
    for layer, section, tensor in sections_of(packed):
        content, offset = data_of(tensor), 0
        while offset < len(content):
            assert not cursor.complete
            size = data.draw(st.integers(max(1, (len(content) - offset) // 3), len(content) - offset))
            walk(cursor, layer, section, content, offset, size)
            offset += size
    assert cursor.complete


def test_sections_without_bytes_are_passed_over_and_an_empty_layer_is_its_layout_alone() -> None:
    low, none = make_packed(widths=(4,)), make_packed(widths=(0,))
    assert low.layout.kinds["rows"][1] == 0
    assert none.layout.size_bytes == 0
    cursor = SectionCursor(manifest_of([none, low, None]))
    for layer, section, tensor in sections_of([none, low, None]):
        if tensor.numel():
            walk(cursor, layer, section, data_of(tensor), 0, len(data_of(tensor)))
    assert cursor.complete


@pytest.mark.parametrize(
    ("section", "total_change", "reason"),
    [
        (Section.CODES, 16, "size"),
        (Section.CODES, -16, "size"),
        (Section.SCALES, 0, "order"),
        (Section.KEYS, 0, "order"),
        (Section.LAYOUT, 0, "order"),
    ],
)
def test_what_the_layout_does_not_imply_is_refused(section: Section, total_change: int, reason: str) -> None:
    packed = make_packed()
    cursor = SectionCursor(manifest_of([packed]))
    sections = {name: data_of(tensor) for _, name, tensor in sections_of([packed])}
    layout = sections[Section.LAYOUT]
    walk(cursor, 0, Section.LAYOUT, layout, 0, len(layout))
    total = packed.layout.kinds["codes"][1] + total_change
    with pytest.raises(TransferFailed) as refused:
        cursor.advance(layer=0, section=section, total_bytes=total, offset=0, num_bytes=16)
    assert refused.value.reason == reason


@pytest.mark.parametrize("section", [Section.CODES, Section.KEYS, Section.INDEX])
def test_a_packed_layer_begins_with_its_layout(section: Section) -> None:
    cursor = SectionCursor(manifest_of([make_packed()]))
    with pytest.raises(TransferFailed, match="layer 0 LAYOUT offset 0 is expected"):
        cursor.advance(layer=0, section=section, total_bytes=16, offset=0, num_bytes=16)


def test_a_layer_of_rows_takes_no_packed_section() -> None:
    cursor = SectionCursor(manifest_of([None]))
    for section in (Section.LAYOUT, Section.CODES):
        with pytest.raises(TransferFailed) as refused:
            cursor.advance(layer=0, section=section, total_bytes=68, offset=0, num_bytes=68)
        assert refused.value.reason == "order"


def bounds(packed: PackedLayer) -> dict[str, int]:
    limit = packed.layout.size_bytes
    return {"layer": 0, "head_dim": DIM, "max_tokens": TOKENS, "limit_bytes": limit}


def test_a_layout_survives_the_wire_and_is_held_to_its_bounds() -> None:
    packed = make_packed(3)
    _, layout = next(packed_sections(packed))
    content = data_of(layout)
    assert len(content) == section_bytes(manifest_of([packed]), 0, Section.LAYOUT)
    assert decode_layout(content, **bounds(packed)) == packed.layout
    most = max(head.num_tokens for head in packed.layout.heads)
    for tighter in ({"max_tokens": most - 1}, {"limit_bytes": packed.layout.size_bytes - 1}):
        with pytest.raises(TransferFailed) as refused:
            decode_layout(content, **(bounds(packed) | tighter))
        assert refused.value.reason == "layout"


def test_another_layout_version_is_refused_by_name() -> None:
    packed = make_packed()
    _, layout = next(packed_sections(packed))
    layout[0] = LAYOUT_VERSION + 1
    with pytest.raises(ProtocolMismatch, match=f"version {LAYOUT_VERSION + 1}") as refused:
        decode_layout(data_of(layout), **bounds(packed))
    assert refused.value.reason == "layout_version"


@UNTIMED
@given(
    st.lists(st.integers(-3, 30) | st.integers(-(2**31), 2**31 - 1), min_size=16, max_size=16),
    st.sampled_from([LAYOUT_VERSION, LAYOUT_VERSION, 0, -1, 2**31 - 1]),
)
def test_any_layout_is_within_bounds_or_refused_by_name(counts: list[int], version: int) -> None:
    content = np.array([version, *counts], "<i4").tobytes()
    try:
        layout = decode_layout(content, layer=0, head_dim=DIM, max_tokens=TOKENS, limit_bytes=900)
    except TransferFailed:
        return
    assert layout.size_bytes <= 900
    assert all(head.num_tokens <= TOKENS and head.num_channels <= DIM for head in layout.heads)
    assert layout == packed_layout(layout.heads, DIM)


@pytest.mark.parametrize("credit_bytes", [37, 1 << 20])
def test_packed_layers_arrive_whole_and_are_counted_by_kind(wire: Any, sink: Any, credit_bytes: int) -> None:
    packed = [make_packed(1), None, make_packed(2, widths=(2, 16))]
    base = kit.make_manifest()
    manifest = replace(manifest_of(packed), key=base.key)
    sections = sections_of(packed)
    server, sender = wire.server(sink), wire.sender()
    ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=credit_bytes)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    kit.ship(transfer, manifest, sections)
    kit.assert_arrived(sink, manifest, sections)
    sent = transfer.bytes_by_kind
    layers = [layer.layout for layer in packed if layer is not None]
    for kind in ("codes", "scales", "index"):
        assert sent[kind] == sum(layout.kinds[kind][1] for layout in layers)
    rows = 2 * HEADS * 3 * DIM * 4
    assert sent["rows"] == sum(layout.kinds["rows"][1] for layout in layers) + rows
    payload = sum(tensor.numel() * tensor.element_size() for _, _, tensor in sections)
    layouts = len(layers) * section_bytes(manifest, 0, Section.LAYOUT)
    assert sum(sent.values()) - sent["manifest"] == payload - layouts
    assert sent["manifest"] > layouts


def test_a_layer_beyond_its_bound_fails_at_the_sender(wire: Any, sink: Any) -> None:
    packed = make_packed()
    manifest = replace(manifest_of([packed], spare_bytes=-16), key=kit.make_manifest().key)
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    with pytest.raises(TransferFailed, match="are allowed") as failed:
        kit.ship(transfer, manifest, sections_of([packed]))
    assert failed.value.reason == "layout"
