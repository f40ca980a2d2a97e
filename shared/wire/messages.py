"""What crosses the block wire, as typed values: the manifest, block headers and the end record.

`proto/BLOCKS.md` documents the bytes; `frames.py` encodes and decodes them. The same messages carry the
compressed prompt from prefill to decode and the generated tokens' KV back (`purpose`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.sampling.params import SampledToken

PROTOCOL_VERSION = 1
MAX_PAYLOAD_BYTES = 4 << 20
MAX_MANIFEST_BYTES = 1 << 20
MAX_HELD_SELECTIONS = 8
"""Transfers of one session that a delta may leave rows out of; eight find most rows of a conversation about
one text, and each costs decode its selection's bytes while nobody else wants them."""


class Section(enum.IntEnum):
    """Which tensor of a layer a block carries part of."""

    KEYS = 1
    """rows: K of the kept tokens, post-RoPE, `[H_kv, n, D]`, compute dtype."""
    VALUES = 2
    """rows: V of the kept tokens, `[H_kv, n, D]`, compute dtype."""
    INDEX = 3
    """index: the kept tokens' positions, int32 `[H_kv, n]`, ascending; absent where all are kept."""
    LAYOUT = 4
    """packed layers: int32 `[1 + 8 H_kv]`, from which the sizes of the sections after it follow."""
    CODES = 5
    """packed layers: the kind "codes" of `kernels.packed.layout`; those below likewise."""
    SCALES = 6
    HALF_ROWS = 7
    PACKED_INDEX = 8
    STATE = 9
    """rows: float32, what the layer's decode attention begins with (`AttentionKind.load`)."""
    HEAD_ROWS = 10
    """layers of ragged heads: int32 `[H_kv]`, rows of each head."""
    CHANNELS = 11
    """layers of pruned K: int16 `[H_kv, C]`, the kept channels."""
    NEW_ROWS = 12
    """rows of a delta: int32 `[H_kv]`, rows of each head that come; the receiver holds the others."""

    @property
    def kind(self) -> str:
        """The `kind` label of `kv_transfer_bytes_total`."""
        return _KINDS[self]


_KINDS = {
    Section.KEYS: "rows",
    Section.VALUES: "rows",
    Section.INDEX: "index",
    Section.LAYOUT: "manifest",
    Section.CODES: "codes",
    Section.SCALES: "scales",
    Section.HALF_ROWS: "rows",
    Section.PACKED_INDEX: "index",
    Section.STATE: "state",
    Section.HEAD_ROWS: "index",
    Section.CHANNELS: "index",
    Section.NEW_ROWS: "index",
}


@dataclass(frozen=True, kw_only=True)
class TransferKey:
    """Names one attempt at one transfer: a random u64 and a u32 generation."""

    transfer_id: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class SectionSize:
    """A section that a manifest announces."""

    section: Section
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """First message of a transfer: identity, shapes and the sizes to expect.

    Attributes:
        purpose: "cache" prefill to decode; "history" decode to prefill.
        resolved: the sender's resolved plan; the receiver compares it with its own. None for "history".
        start: first token position covered ("history": the prompt's length).
        num_tokens: "cache": the prompt's length T; "history": tokens returned.
        layer_rows: rows per KV head to expect, one entry a layer; of a packed layer, the most tokens.
        layer_packed_bytes: the most bytes that each layer is stored in, 0 where it is rows; empty where all
            layers are.
        layer_state_bytes: bytes of each layer's STATE; empty where no layer has any.
        layer_sections: each layer's sections in their order, where its representation fixes their sizes; none
            where it does not, and empty where it does for no layer.
        history_endpoint: where decode returns generated KV, or "" if it is not wanted.
        history_credit_bytes: the credit for that return.
        traceparent: the W3C trace context that the transfer belongs to, or "".
        held_transfer_id: the transfer of which the receiver still has rows, that are left out here; 0 if
            everything comes.
        held_tokens: only rows of tokens below are left out.
        held_depth: how many transfers' rows are left out: that one's and those before it.
    """

    purpose: Literal["cache", "history"]
    key: TransferKey
    request_id: str
    model_fingerprint: str
    dtype: str
    num_kv_heads: int
    head_dim: int
    start: int
    num_tokens: int
    layer_rows: tuple[int, ...]
    resolved: ResolvedPlan | None = None
    history_endpoint: str = ""
    history_credit_bytes: int = 0
    layer_packed_bytes: tuple[int, ...] = ()
    layer_state_bytes: tuple[int, ...] = ()
    layer_sections: tuple[tuple[SectionSize, ...], ...] = ()
    traceparent: str = ""
    held_transfer_id: int = 0
    held_tokens: int = 0
    held_depth: int = 0

    @property
    def is_delta(self) -> bool:
        """Whether rows that the receiver holds are left out."""
        return self.held_transfer_id != 0

    def packed_limit_bytes(self, layer: int) -> int:
        """The most bytes that a layer is packed in; 0 where it is rows."""
        return self.layer_packed_bytes[layer] if self.layer_packed_bytes else 0

    def state_bytes(self, layer: int) -> int:
        """Bytes of a layer's STATE; 0 where it has none."""
        return self.layer_state_bytes[layer] if self.layer_state_bytes else 0

    def announced(self, layer: int) -> tuple[SectionSize, ...]:
        """The layer's sections, where the manifest says which they are."""
        return self.layer_sections[layer] if self.layer_sections else ()


@dataclass(frozen=True, kw_only=True)
class BlockHeader:
    """Header of one block: up to MAX_PAYLOAD_BYTES of one section of one layer.

    Attributes:
        sequence: 0, 1, 2, ... within the transfer, over all blocks.
        section_bytes: size of the whole section.
        offset: where this payload lies in it.
    """

    key: TransferKey
    sequence: int
    layer: int
    section: Section
    section_bytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """Last message of a transfer: totals to verify, and the token that prefill sampled ("history": None)."""

    key: TransferKey
    num_blocks: int
    payload_bytes: int
    first_token: SampledToken | None = None
