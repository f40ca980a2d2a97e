"""The messages of the block wire as typed values, and the one order in which they may arrive.

`proto/BLOCKS.md` documents the bytes; `frames.py` encodes and decodes them, and checks the annotations'
bounds at both ends. The same messages carry the compressed prompt from prefill to decode and the generated
tokens' KV back (`Manifest.purpose`).
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta
from torch import Tensor

from kvferry.shared.errors import TransferFailed
from kvferry.shared.model.spec import DTYPE_BYTES
from kvferry.shared.sampling.params import SampledToken

PROTOCOL_VERSION = 2
MAX_PAYLOAD_BYTES = 4 << 20
"""The most tensor bytes in one message."""
MAX_MANIFEST_BYTES = 1 << 20
MAX_LAYERS = 1024
MAX_LAYER_TENSORS = 16
MAX_TOKENS = 2**31 - 1
MAX_TOTAL_BYTES = 2**48
MAX_RETAINED_SELECTIONS = 8
"""How many transfers of one session a delta may refer to. With eight, most rows of a conversation about one
text are found; each transfer occupies the bytes of its selection at decode."""

TENSOR_DTYPE_BYTES: dict[str, int] = {**DTYPE_BYTES, "int32": 4, "int16": 2, "uint8": 1}
"""The dtypes of tensors on the wire, and their element sizes in bytes."""

TENSOR_KINDS = ("rows", "index", "codes", "scales", "state", "manifest")
"""The values of `NamedTensor.kind`; "manifest" is for tensors that describe other tensors."""

_NumTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_NumBytes = Annotated[int, Meta(ge=0, le=MAX_TOTAL_BYTES)]
_Size = Annotated[int, Meta(ge=1, le=4096)]
_Text = Annotated[str, Meta(max_length=1024)]


@dataclass(frozen=True, kw_only=True)
class TransferKey:
    """Names one attempt at one transfer: a random u64 and a u32 generation."""

    transfer_id: Annotated[int, Meta(ge=0)]
    generation: Annotated[int, Meta(ge=0, le=2**32 - 1)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """First message of a transfer: its purpose, request, model and shapes.

    Attributes:
        purpose: "cache": prefill to decode; "history": decode to prefill.
        dtype: compute dtype of the model.
        start: first token position covered ("history": the prompt's length).
        num_tokens: "cache": the prompt's length T; "history": tokens returned.
        plan_digest: hex digest of the resolved plan that the sender followed; "" for "history".
        layer_rows: rows per KV head of each layer if prefill measured the layers' budgets; else empty.
        history_endpoint: where decode returns generated KV, or "" if it is not wanted.
        history_credit_bytes: the credit for that return.
        traceparent: the W3C trace context that the transfer belongs to, or "".
        retained_transfer_id: the transfer whose rows the receiver retains and this one leaves out; 0 if no
            rows are left out.
        retained_tokens: only rows of tokens below it are left out.
        retained_depth: how many transfers' rows are left out: that one's and those before it.
    """

    purpose: Literal["cache", "history"]
    key: TransferKey
    request_id: _Text
    model_fingerprint: _Text
    dtype: Annotated[str, Meta(pattern=rf"^({'|'.join(DTYPE_BYTES)})\Z")]
    num_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    num_kv_heads: _Size
    head_dim: _Size
    start: _NumTokens
    num_tokens: _NumTokens
    plan_digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{0,128}\Z")] = ""
    layer_rows: tuple[_NumTokens, ...] = ()
    history_endpoint: _Text = ""
    history_credit_bytes: _NumBytes = 0
    traceparent: _Text = ""
    retained_transfer_id: Annotated[int, Meta(ge=0)] = 0
    retained_tokens: _NumTokens = 0
    retained_depth: Annotated[int, Meta(ge=0, le=MAX_RETAINED_SELECTIONS)] = 0

    @property
    def is_delta(self) -> bool:
        """Whether rows that the receiver retains are left out."""
        return self.retained_transfer_id != 0


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Name, dtype and shape of one tensor of a layer."""

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
    dtype: Annotated[str, Meta(pattern=rf"^({'|'.join(TENSOR_DTYPE_BYTES)})\Z")]
    shape: Annotated[tuple[_NumTokens, ...], Meta(max_length=4)]


@dataclass(frozen=True, kw_only=True)
class LayerHeader:
    """First message of a layer: its tensors in the order in which their bytes follow."""

    layer: Annotated[int, Meta(ge=0, le=MAX_LAYERS - 1)]
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=MAX_LAYER_TENSORS)]

    @cached_property
    def starts(self) -> list[int]:
        """Where each tensor starts in the layer's bytes, and where the last one ends."""
        starts = [0]
        for tensor in self.tensors:
            starts.append(starts[-1] + math.prod(tensor.shape) * TENSOR_DTYPE_BYTES[tensor.dtype])
        return starts


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedTensor:
    """A tensor to send.

    Attributes:
        kind: one of `TENSOR_KINDS`: the `kind` label under which its bytes are counted in
            `kv_transfer_bytes_total`. It is not sent.
    """

    name: str
    tensor: Tensor
    kind: str


@dataclass(frozen=True, kw_only=True)
class BlockHeader:
    """Tells a sink where to write bytes: up to MAX_PAYLOAD_BYTES of one tensor.

    Attributes:
        sequence: of the message that carried them; see `FrameHeader`.
        tensor: index into the layer header's tensors.
        tensor_bytes: size of the whole tensor.
        offset: where this payload starts in it, in bytes.
    """

    key: TransferKey
    sequence: int
    layer: int
    tensor: int
    tensor_bytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """Last message of a transfer: totals to verify, and the token that prefill sampled ("history": None).

    Attributes:
        num_blocks: BLOCK messages.
        payload_bytes: bytes of all tensors.
    """

    key: TransferKey
    num_blocks: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    payload_bytes: _NumBytes
    first_token: SampledToken | None = None


class MessageType(enum.IntEnum):
    """The type of a message. The sender sends the first six, the receiver the last three."""

    MANIFEST = 1
    LAYER = 2
    BLOCK = 3
    END = 4
    ABORT = 5
    KEEPALIVE = 6
    CREDIT = 7
    ACK = 8
    NACK = 9


@dataclass(frozen=True, kw_only=True)
class FrameHeader:
    """A message's header, checksum and payload size aside. Fields that a type does not use are zero.

    Attributes:
        sequence: LAYER, BLOCK: the message's number among them in the transfer.
        layer: BLOCK.
        total_bytes: BLOCK: size of the layer's tensors together; CREDIT: tensor bytes written so far.
        offset: BLOCK: where the payload starts in the bytes of the layer's tensors, one after another.
    """

    type: MessageType
    key: TransferKey
    sequence: int = 0
    layer: int = 0
    total_bytes: int = 0
    offset: int = 0


class TransferCursor:
    """Tracks the only message that a transfer allows next. Both ends advance one alike. Not thread-safe.

        LAYER 0 bytes  BLOCK bytes  BLOCK bytes ..  LAYER 1 bytes ..      complete
                              ▲ layer, offset

    Layers are sent in order from 0. The bytes of a layer's tensors are sent one tensor after another without
    gaps: the first bytes in the LAYER message, the rest in BLOCKs.

    Attributes:
        sequence: number of the next layer header or block.
        num_blocks, payload_bytes: the blocks and the tensor bytes that have passed.
        layer_bytes, offset: size of the current layer's tensors, and how much of it has passed.
    """

    def __init__(self, num_layers: int) -> None:
        self.sequence = 0
        self.num_blocks = 0
        self.payload_bytes = 0
        self.layer_bytes = 0
        self.offset = 0
        self._num_layers = num_layers
        self._layer = -1
        self._tensors: tuple[TensorHeader, ...] = ()
        self._starts = [0]

    def check_complete(self) -> None:
        """Raises TransferFailed ("incomplete") unless every tensor of every layer has passed."""
        if self._layer + 1 < self._num_layers or self.offset < self.layer_bytes:
            raise TransferFailed(f"transfer ends where {self._expected()} is expected", reason="incomplete")

    def pass_layer(self, sequence: int, layer: LayerHeader, num_bytes: int = 0) -> None:
        """Begin a layer, whose message carries `num_bytes` of its tensors.

        Raises:
            TransferFailed: it is not the next one ("order"), or has fewer bytes ("size").
        """
        is_next = layer.layer == self._layer + 1 < self._num_layers and self.offset == self.layer_bytes
        if sequence != self.sequence or not is_next:
            raise TransferFailed(
                f"header {sequence}, of layer {layer.layer}, came; {self._expected()}, number"
                f" {self.sequence}, is expected",
                reason="order",
            )
        layer_bytes = layer.starts[-1]
        if num_bytes > layer_bytes:
            raise TransferFailed(
                f"header of layer {layer.layer} came with {num_bytes} bytes; it implies {layer_bytes}",
                reason="size",
            )
        self._tensors, self._starts, self.layer_bytes = layer.tensors, layer.starts, layer_bytes
        self._layer += 1
        self.sequence += 1
        self.payload_bytes += num_bytes
        self.offset = num_bytes

    def pass_block(self, header: FrameHeader, num_bytes: int) -> None:
        """Pass one block of `num_bytes` payload bytes.

        Raises:
            TransferFailed: it is not the next one ("order"), or the layer is not as large as its header says,
                or the block reaches beyond it or is empty ("size").
        """
        if header.sequence != self.sequence:
            raise TransferFailed(
                f"block {header.sequence} came; number {self.sequence}, {self._expected()}, is expected",
                reason="order",
            )
        left_bytes = self.layer_bytes - self.offset
        if not left_bytes or (header.layer, header.offset) != (self._layer, self.offset):
            raise TransferFailed(
                f"layer {header.layer} offset {header.offset} came; {self._expected()} is expected",
                reason="order",
            )
        if header.total_bytes != self.layer_bytes or not 1 <= num_bytes <= left_bytes:
            raise TransferFailed(
                f"layer {header.layer} is {header.total_bytes} bytes (block: {num_bytes} at {header.offset});"
                f" the layer's header implies {self.layer_bytes}",
                reason="size",
            )
        self.sequence += 1
        self.num_blocks += 1
        self.payload_bytes += num_bytes
        self.offset += num_bytes

    def split(
        self, header: FrameHeader, frames: Sequence[memoryview | bytes]
    ) -> list[tuple[BlockHeader, memoryview]]:
        """The bytes of the LAYER or BLOCK message that has just passed, by tensor."""
        start, parts = header.offset, []
        for raw in frames:
            frame = memoryview(raw)
            while frame.nbytes:
                tensor = bisect_right(self._starts, start) - 1
                begin, end = self._starts[tensor : tensor + 2]
                part = frame[: end - start]
                block = BlockHeader(
                    key=header.key,
                    sequence=header.sequence,
                    layer=self._layer,
                    tensor=tensor,
                    tensor_bytes=end - begin,
                    offset=start - begin,
                )
                parts.append((block, part))
                start += part.nbytes
                frame = frame[part.nbytes :]
        return parts

    def _expected(self) -> str:
        """What is expected next, for messages."""
        if self.offset < self.layer_bytes:
            tensor = bisect_right(self._starts, self.offset) - 1
            offset = self.offset - self._starts[tensor]
            return (
                f"offset {self.offset} of layer {self._layer} ({self._tensors[tensor].name} offset {offset})"
            )
        if self._layer + 1 < self._num_layers:
            return f"the header of layer {self._layer + 1}"
        return "nothing more"
