"""The messages of the block wire as typed values.

`proto/BLOCKS.md` documents the bytes; `frames.py` encodes and decodes them, and checks their order and the
annotations' bounds at both ends. The same messages carry the compressed prompt from prefill to decode and the
generated tokens' KV back (`Manifest.purpose`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta
from torch import Tensor

from kvferry.shared.model.spec import DTYPE_BYTES
from kvferry.shared.sampling.params import SampledToken

PROTOCOL_VERSION = 4
MAX_PAYLOAD_BYTES = 4 << 20
"""The most tensor bytes in one message."""
MAX_MANIFEST_BYTES = 1 << 20
MAX_LAYERS = 1024
MAX_LAYER_TENSORS = 16
MAX_DRAFT_TOKENS = 64
MAX_TOKENS = 2**31 - 1
MAX_TOTAL_BYTES = 2**48
RESUME_S = 3.0
"""How long both ends wait for a lost connection to be replaced before the transfer fails."""
RESEND_S = 5.0
"""How long the messages of a failed transfer wait in the send buffer for another receiver."""
MAX_RETAINED_SELECTIONS = 32
"""How many transfers of one session a delta may refer to. Finding a row takes time proportional to it; at
decode, each transfer occupies the bytes of the rows that no later one has."""

TENSOR_DTYPE_BYTES: dict[str, int] = {**DTYPE_BYTES, "int32": 4, "int16": 2, "uint8": 1}
"""The dtypes of tensors on the wire, and their element sizes in bytes."""

TENSOR_KINDS = ("rows", "index", "codes", "scales", "state", "manifest")
"""The values of `NamedTensor.kind`; "manifest" is for tensors that describe other tensors."""

_NumTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_NumBytes = Annotated[int, Meta(ge=0, le=MAX_TOTAL_BYTES)]
_Size = Annotated[int, Meta(ge=1, le=4096)]
_Text = Annotated[str, Meta(max_length=1024)]
REASON = r"[a-z][a-z0-9_]{0,63}"
_Reason = Annotated[str, Meta(pattern=rf"^{REASON}\Z")]


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
        tensor: index into the layer header's tensors.
        offset: where this payload starts in it, in bytes.
    """

    key: TransferKey
    layer: int
    tensor: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """Last message of a transfer: totals to verify, and the token that decode goes on from ("history": None).

    Attributes:
        num_blocks: BLOCK messages.
        payload_bytes: bytes of all tensors.
        draft: the ids of the tokens before it, whose rows the layers have.
    """

    key: TransferKey
    num_blocks: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    payload_bytes: _NumBytes
    first_token: SampledToken | None = None
    draft: Annotated[tuple[_NumTokens, ...], Meta(max_length=MAX_DRAFT_TOKENS)] = ()


@dataclass(frozen=True, kw_only=True)
class NackRecord:
    """Why a receiver refuses: the error's class, reason and message."""

    kind: str
    reason: _Reason
    message: str


@dataclass(frozen=True, kw_only=True)
class AbortRecord:
    """Why a sender gave up."""

    reason: _Reason


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


MAX_LAYER_RECORD_BYTES = 4096
MAX_PAYLOAD_BYTES_BY_TYPE = {
    MessageType.MANIFEST: MAX_MANIFEST_BYTES,
    MessageType.LAYER: MAX_LAYER_RECORD_BYTES + MAX_PAYLOAD_BYTES,
    MessageType.BLOCK: MAX_PAYLOAD_BYTES,
    MessageType.END: MAX_MANIFEST_BYTES,
    MessageType.ABORT: 4096,
    MessageType.KEEPALIVE: 0,
    MessageType.CREDIT: 0,
    MessageType.ACK: 0,
    MessageType.NACK: 8192,
}


@dataclass(frozen=True, kw_only=True)
class FrameHeader:
    """A message's header, checksum and payload size aside. Fields that a type does not use are zero.

    Attributes:
        sequence: LAYER, BLOCK: the message's number among them in the transfer; CREDIT: the next one's.
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


@dataclass(slots=True, eq=False)
class Message:
    """A message to send.

    Attributes:
        payload, kinds: its payload's frames, and the kind under which each is counted.
        tensor_bytes: how much of the payload credit and buffer count.
        frames: what is sent; made by the sender's thread, which alone uses it.
        was_sent: whether it was sent over a connection that was lost.
    """

    header: FrameHeader
    payload: list[memoryview]
    kinds: list[str]
    tensor_bytes: int = 0
    frames: tuple[memoryview | bytes, ...] = ()
    was_sent: bool = False
