"""Where a transfer stands among the sections that its manifest promises; both ends walk it alike.

Place in the request's path: sender and receiver check every block against it. Sections come layer by layer.
A layer of rows is INDEX (optional), KEYS, VALUES, each exactly as large as rows, heads, head_dim and dtype
imply, then STATE where the manifest has bytes for it; in a delta, INDEX (optional), then NEW_ROWS, which say
how large KEYS and VALUES are. A packed layer is LAYOUT, then the sections that it implies
(`packed_sections.py`); any other is the sections that the manifest announces for it. All are cut in blocks
without gaps. Looks at no other payload than LAYOUT's and NEW_ROWS'.
"""

from __future__ import annotations

import numpy as np

from kvferry.shared.errors import TransferFailed
from kvferry.shared.model.spec import DTYPE_BYTES
from kvferry.shared.wire.messages import Manifest, Section
from kvferry.shared.wire.packed_sections import KIND_SECTIONS, decode_layout, layout_section_bytes

INDEX_ENTRY_BYTES = 4

_ROW_SECTIONS = (Section.INDEX, Section.KEYS, Section.VALUES, Section.STATE)
SIZING_SECTIONS = (Section.LAYOUT, Section.NEW_ROWS)
"""Sections whose payload says how large the next ones are."""


def section_bytes(manifest: Manifest, layer: int, section: Section) -> int:
    """Size in bytes of a section that the manifest alone implies: `rows * H_kv * D * dtype` for KEYS and
    VALUES, `rows * H_kv * 4` for INDEX, `H_kv * 4` for NEW_ROWS, STATE's, and LAYOUT's."""
    if section is Section.LAYOUT:
        return layout_section_bytes(manifest.num_kv_heads)
    if section is Section.NEW_ROWS:
        return manifest.num_kv_heads * INDEX_ENTRY_BYTES if manifest.layer_rows[layer] else 0
    assert section in _ROW_SECTIONS, section
    if section is Section.STATE:
        return manifest.state_bytes(layer)
    rows = manifest.layer_rows[layer] * manifest.num_kv_heads
    if section is Section.INDEX:
        return rows * INDEX_ENTRY_BYTES
    return rows * manifest.head_dim * DTYPE_BYTES[manifest.dtype]


class SectionCursor:
    """The next byte expected. Not thread-safe.

        layer 0: rows               layer 1: packed
        [INDEX?] KEYS VALUES STATE  LAYOUT  CODES  SCALES  HALF_ROWS  PACKED_INDEX      complete
                  ▲ offset          └── their sizes follow ──▲

    INDEX may be left out at the start of a layer; sections of no bytes are passed over.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._num_layers = len(manifest.layer_rows)
        self._layer = 0
        self._step = 0
        self._offset = 0
        self._layout = bytearray()
        self._sections = self._first_sections()
        self._pass_over_empty()

    @property
    def complete(self) -> bool:
        """Whether every section of every layer has passed."""
        return self._layer == self._num_layers

    def describe(self) -> str:
        """What is expected next, for messages."""
        if self.complete:
            return "nothing more"
        return f"layer {self._layer} {self._sections[self._step][0].name} offset {self._offset}"

    def advance(
        self,
        *,
        layer: int,
        section: Section,
        total_bytes: int,
        offset: int,
        num_bytes: int,
        layout: memoryview | bytes = b"",
    ) -> None:
        """Pass one block.

        Args:
            total_bytes: what the block says that its section's size is.
            offset, num_bytes: the part of the section that the block carries; num_bytes >= 1.
            layout: of a block of SIZING_SECTIONS, its `num_bytes` bytes; of others nothing.

        Raises:
            TransferFailed: it is not the next one ("order"), or not of the size implied ("size"), or
                completes a layout that cannot be ("layout").
        """
        names = [name for name, _ in self._sections]
        step = names.index(section) if section in names else -1
        optional = names[:1] == [Section.INDEX] and not self._manifest.announced(self._layer)
        index_left_out = optional and step == 1 and self._step == 0
        if layer != self._layer or offset != self._offset or not (step == self._step or index_left_out):
            raise TransferFailed(
                f"layer {layer} {section.name} offset {offset} came; {self.describe()} is expected",
                reason="order",
            )
        expected_bytes = self._sections[step][1]
        if total_bytes != expected_bytes or not 1 <= num_bytes <= expected_bytes - offset:
            raise TransferFailed(
                f"layer {layer} {section.name} is {total_bytes} bytes (block: {num_bytes} at {offset});"
                f" the manifest implies {expected_bytes}",
                reason="size",
            )
        self._step = step
        self._offset += num_bytes
        self._layout += layout
        if self._offset == expected_bytes:
            self._next_section()

    def _next_section(self) -> None:
        if self._sections[self._step][0] is Section.LAYOUT:
            kinds = decode_layout(
                self._layout,
                layer=self._layer,
                head_dim=self._manifest.head_dim,
                max_tokens=self._manifest.layer_rows[self._layer],
                limit_bytes=self._manifest.packed_limit_bytes(self._layer),
            ).kinds
            self._sections += tuple((section, kinds[kind][1]) for section, kind in KIND_SECTIONS.items())
            self._layout.clear()
        elif self._sections[self._step][0] is Section.NEW_ROWS:
            new_bytes = self._new_row_bytes()
            self._sections += ((Section.KEYS, new_bytes), (Section.VALUES, new_bytes))
            self._layout.clear()
        self._offset = 0
        self._step += 1
        self._pass_over_empty()

    def _new_row_bytes(self) -> int:
        """Bytes of K and of V that come of the layer, whose NEW_ROWS have come."""
        counts = np.frombuffer(self._layout, np.dtype("<i4"))
        limit = self._manifest.layer_rows[self._layer]
        if counts.min() < 0 or counts.max() > limit:
            raise TransferFailed(
                f"layer {self._layer} NEW_ROWS lie in {counts.min()} to {counts.max()};"
                f" 0 to {limit} is allowed",
                reason="size",
            )
        return int(counts.sum()) * self._manifest.head_dim * DTYPE_BYTES[self._manifest.dtype]

    def _pass_over_empty(self) -> None:
        """On to the next section that has bytes, in this layer or a later one."""
        while not self.complete:
            while self._step < len(self._sections):
                if self._sections[self._step][1] > 0:
                    return
                self._step += 1
            self._layer += 1
            self._step = 0
            self._sections = self._first_sections()

    def _first_sections(self) -> tuple[tuple[Section, int], ...]:
        """The layer's sections and their sizes, as far as they are known before it begins."""
        if self.complete:
            return ()
        announced = self._manifest.announced(self._layer)
        if announced:
            return tuple((its.section, its.size_bytes) for its in announced)
        packed = self._manifest.packed_limit_bytes(self._layer) > 0
        names: tuple[Section, ...] = (Section.LAYOUT,) if packed else _ROW_SECTIONS
        if self._manifest.is_delta:
            names = (Section.INDEX, Section.NEW_ROWS)
        return tuple((name, section_bytes(self._manifest, self._layer, name)) for name in names)
