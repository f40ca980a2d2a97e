"""What crosses the block wire, as typed values: manifest, layer headers, block headers and end record.

`proto/BLOCKS.md` documents the bytes; `frames.py` and `records.py` encode and decode them. The same messages
carry the compressed prompt from prefill to decode and the generated tokens' KV back (`Manifest.purpose`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvferry.shared.model.spec import DTYPE_BYTES
from kvferry.shared.sampling.params import SampledToken

PROTOCOL_VERSION = 2
MAX_PAYLOAD_BYTES = 4 << 20
MAX_MANIFEST_BYTES = 1 << 20
MAX_LAYER_TENSORS = 16
MAX_RETAINED_SELECTIONS = 8
"""How many transfers of one session a delta may refer to. Eight find most rows of a conversation about one
text; each one occupies the bytes of its selection at decode."""

TENSOR_DTYPE_BYTES: dict[str, int] = {**DTYPE_BYTES, "int32": 4, "int16": 2, "uint8": 1}
"""The dtypes that a tensor may travel in."""

TENSOR_KINDS = ("rows", "index", "codes", "scales", "state")
"""The values of `NamedTensor.kind`."""


@dataclass(frozen=True, kw_only=True)
class TransferKey:
    """Names one attempt at one transfer: a random u64 and a u32 generation."""

    transfer_id: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """First message of a transfer: what it belongs to, and for which model.

    Attributes:
        purpose: "cache": prefill to decode; "history": decode to prefill.
        dtype: compute dtype of the model.
        start: first token position covered ("history": the prompt's length).
        num_tokens: "cache": the prompt's length T; "history": tokens returned.
        plan_digest: hex digest of the resolved plan that the sender followed; "" for "history".
        layer_rows: rows per KV head of each layer, where prefill measured the layers' budgets; else empty.
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
    request_id: str
    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    start: int
    num_tokens: int
    plan_digest: str = ""
    layer_rows: tuple[int, ...] = ()
    history_endpoint: str = ""
    history_credit_bytes: int = 0
    traceparent: str = ""
    retained_transfer_id: int = 0
    retained_tokens: int = 0
    retained_depth: int = 0

    @property
    def is_delta(self) -> bool:
        """Whether rows that the receiver retains are left out."""
        return self.retained_transfer_id != 0


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Name, dtype and shape of one tensor of a layer."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * TENSOR_DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class LayerHeader:
    """First message of a layer: its tensors in the order in which their blocks follow."""

    layer: int
    tensors: tuple[TensorHeader, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedTensor:
    """A tensor to send.

    Attributes:
        kind: one of `TENSOR_KINDS`: the `kind` label under which its bytes are counted in
            `kv_transfer_bytes_total`. It does not travel.
    """

    name: str
    tensor: Tensor
    kind: str


@dataclass(frozen=True, kw_only=True)
class BlockHeader:
    """Header of one block: up to MAX_PAYLOAD_BYTES of one tensor.

    Attributes:
        sequence: number among the transfer's layer headers and blocks, from 0.
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
    """Last message of a transfer: totals to verify, and the token that prefill sampled ("history": None)."""

    key: TransferKey
    num_blocks: int
    payload_bytes: int
    first_token: SampledToken | None = None
