"""The section cursor accepts exactly one order of bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.layout import SectionCursor, section_bytes
from kvferry.shared.wire.messages import Manifest, Section, TransferKey

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


def manifest_of(rows: tuple[int, ...]) -> Manifest:
    return Manifest(
        purpose="history",
        key=TransferKey(transfer_id=1, generation=1),
        request_id="",
        model_fingerprint="",
        dtype="float16",
        num_kv_heads=3,
        head_dim=4,
        start=0,
        num_tokens=1,
        layer_rows=rows,
    )


def walk(cursor: SectionCursor, layer: int, section: Section, total: int, offset: int, size: int) -> None:
    cursor.advance(layer=layer, section=section, total_bytes=total, offset=offset, num_bytes=size)


@UNTIMED
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.lists(st.booleans(), min_size=5), st.data())
def test_every_section_in_order_in_any_pieces_completes(
    rows: list[int], with_index: list[bool], data: st.DataObject
) -> None:
    manifest = manifest_of(tuple(rows))
    cursor = SectionCursor(manifest)
    for layer in range(len(rows)):
        sections = [Section.KEYS, Section.VALUES]
        for section in [Section.INDEX, *sections] if with_index[layer] else sections:
            total, offset = section_bytes(manifest, layer, section), 0
            while offset < total:
                assert not cursor.complete
                size = data.draw(st.integers(1, total - offset))
                walk(cursor, layer, section, total, offset, size)
                offset += size
    assert cursor.complete


def test_sizes_follow_rows_heads_dim_and_dtype() -> None:
    manifest = manifest_of((5,))
    assert section_bytes(manifest, 0, Section.KEYS) == 5 * 3 * 4 * 2
    assert section_bytes(manifest, 0, Section.VALUES) == 5 * 3 * 4 * 2
    assert section_bytes(manifest, 0, Section.INDEX) == 5 * 3 * 4


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ((1, Section.KEYS, 24, 0, 24), "order"),
        ((0, Section.VALUES, 24, 0, 24), "order"),
        ((0, Section.KEYS, 24, 1, 23), "order"),
        ((0, Section.KEYS, 25, 0, 24), "size"),
        ((0, Section.KEYS, 24, 0, 25), "size"),
        ((0, Section.KEYS, 24, 0, 0), "size"),
        ((0, Section.INDEX, 24, 0, 12), "size"),
    ],
)
def test_a_wrong_first_block_is_refused(step: tuple[int, Section, int, int, int], reason: str) -> None:
    with pytest.raises(TransferFailed) as refused:
        walk(SectionCursor(manifest_of((1, 1))), *step)
    assert refused.value.reason == reason


def test_state_comes_last_and_as_large_as_the_manifest_says() -> None:
    manifest = dataclasses.replace(manifest_of((5, 5)), layer_state_bytes=(0, 60))
    cursor = SectionCursor(manifest)
    rows = section_bytes(manifest, 0, Section.KEYS)
    for layer in range(2):
        walk(cursor, layer, Section.KEYS, rows, 0, rows)
        walk(cursor, layer, Section.VALUES, rows, 0, rows)
        assert not cursor.complete
    for wrong in (56, 64):
        with pytest.raises(TransferFailed, match="implies 60"):
            walk(cursor, 1, Section.STATE, wrong, 0, wrong)
    walk(cursor, 1, Section.STATE, 60, 0, 60)
    assert cursor.complete


def test_index_after_keys_and_anything_after_the_end_are_refused() -> None:
    cursor = SectionCursor(manifest_of((1,)))
    walk(cursor, 0, Section.KEYS, 24, 0, 23)
    with pytest.raises(TransferFailed, match="layer 0 KEYS offset 23 is expected"):
        walk(cursor, 0, Section.INDEX, 12, 0, 12)
    walk(cursor, 0, Section.KEYS, 24, 23, 1)
    walk(cursor, 0, Section.VALUES, 24, 0, 24)
    with pytest.raises(TransferFailed, match="nothing more is expected"):
        walk(cursor, 0, Section.VALUES, 24, 0, 24)


def test_keys_cannot_cut_a_started_index_short() -> None:
    cursor = SectionCursor(manifest_of((2,)))
    walk(cursor, 0, Section.INDEX, 24, 0, 12)
    with pytest.raises(TransferFailed, match="INDEX offset 12 is expected"):
        walk(cursor, 0, Section.KEYS, 48, 0, 48)


def test_of_a_delta_new_rows_say_how_large_keys_and_values_are() -> None:
    manifest = dataclasses.replace(manifest_of((4, 2)), held_transfer_id=9, held_tokens=3)
    cursor = SectionCursor(manifest)
    row_bytes = 4 * 2
    walk(cursor, 0, Section.INDEX, 48, 0, 48)
    for offset, size in ((0, 5), (5, 7)):
        counts = np.array([4, 0, 1], "<i4").tobytes()[offset : offset + size]
        cursor.advance(
            layer=0,
            section=Section.NEW_ROWS,
            total_bytes=12,
            offset=offset,
            num_bytes=size,
            layout=counts,
        )
    walk(cursor, 0, Section.KEYS, 5 * row_bytes, 0, 5 * row_bytes)
    with pytest.raises(TransferFailed, match="VALUES"):
        walk(cursor, 0, Section.VALUES, 4 * row_bytes, 0, 4 * row_bytes)
    walk(cursor, 0, Section.VALUES, 5 * row_bytes, 0, 5 * row_bytes)
    # the second layer keeps every token, and all of its rows are held
    cursor.advance(
        layer=1, section=Section.NEW_ROWS, total_bytes=12, offset=0, num_bytes=12, layout=bytes(12)
    )
    assert cursor.complete


@pytest.mark.parametrize("counts", [[5, 0, 0], [0, -1, 0]])
def test_new_rows_beyond_the_layer_are_refused(counts: list[int]) -> None:
    cursor = SectionCursor(dataclasses.replace(manifest_of((4,)), held_transfer_id=9, held_tokens=3))
    payload = np.array(counts, "<i4").tobytes()
    with pytest.raises(TransferFailed, match="NEW_ROWS"):
        cursor.advance(
            layer=0, section=Section.NEW_ROWS, total_bytes=12, offset=0, num_bytes=12, layout=payload
        )
