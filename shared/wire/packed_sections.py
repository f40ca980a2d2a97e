"""The sections of a packed layer: its layout first, then its bytes kind by kind.

Place in the request's path: prefill cuts a packed layer into them; sender, receiver and decode's writer
derive the sizes of the others from the layout section, each for itself, bounded by the manifest. What lies
within the bytes is `kernels/packed`'s matter.

    LAYOUT: int32 [1 + 8 H_kv]: LAYOUT_VERSION; for each KV head its channels of 2, 4, 8, 16 bits and its
            tokens of 2, 4, 8, 16 bits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from kvferry.kernels.packed import LAYOUT_VERSION, HeadCounts, PackedLayer, PackedLayout, packed_layout
from kvferry.kernels.packed.layout import Kind
from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.wire.messages import Section

KIND_SECTIONS: Mapping[Section, Kind] = {
    Section.CODES: "codes",
    Section.SCALES: "scales",
    Section.HALF_ROWS: "rows",
    Section.PACKED_INDEX: "index",
}
"""In the order in which they are sent, which is also theirs in the layer's bytes."""
_HEAD_COUNTS = 8
_ENTRY_BYTES = 4


def layout_section_bytes(num_kv_heads: int) -> int:
    """Size of LAYOUT in bytes."""
    return _ENTRY_BYTES * (1 + _HEAD_COUNTS * num_kv_heads)


def packed_sections(packed: PackedLayer) -> Iterator[tuple[Section, Tensor]]:
    """A packed layer as the sections to send, LAYOUT first; bytes are views of the layer's buffer."""
    counts = [count for head in packed.layout.heads for count in (*head.channels, *head.tokens)]
    yield Section.LAYOUT, torch.tensor([LAYOUT_VERSION, *counts], dtype=torch.int32)
    for section, kind in KIND_SECTIONS.items():
        start, size_bytes = packed.layout.kinds[kind]
        yield section, packed.buffer[start : start + size_bytes]


def decode_layout(
    payload: bytes | bytearray, *, layer: int, head_dim: int, max_tokens: int, limit_bytes: int
) -> PackedLayout:
    """A layer's layout from its whole LAYOUT section.

    Args:
        layer: for messages.
        max_tokens: the most that a head may keep.
        limit_bytes: the most that the layer may come to.

    Raises:
        ProtocolMismatch: the layer is packed by another version.
        TransferFailed: counts that no layer within these bounds has ("layout").
    """
    version, *counts = np.frombuffer(payload, np.dtype("<i4")).tolist()
    if version != LAYOUT_VERSION:
        raise ProtocolMismatch(
            f"layer {layer} is packed in layout version {version}; this side reads {LAYOUT_VERSION}",
            reason="layout_version",
        )
    try:
        heads = tuple(
            HeadCounts(channels=tuple(counts[i : i + 4]), tokens=tuple(counts[i + 4 : i + 8]))
            for i in range(0, len(counts), _HEAD_COUNTS)
        )
        layout = packed_layout(heads, head_dim)
    except ValueError as error:
        raise TransferFailed(f"layer {layer} LAYOUT: {error}", reason="layout") from error
    if max(head.num_tokens for head in heads) > max_tokens or layout.size_bytes > limit_bytes:
        raise TransferFailed(
            f"layer {layer} LAYOUT: heads keep {[head.num_tokens for head in heads]} tokens in "
            f"{layout.size_bytes} bytes; at most {max_tokens} and {limit_bytes} are allowed",
            reason="layout",
        )
    return layout
