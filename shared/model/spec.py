"""A model's shapes, context window and identity.

Built once at load time by `loading.py`. Workers send it in their status, so the router needs no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

DTypeName = Literal["float32", "float16", "bfloat16"]
TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
DTYPE_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shapes and identity of one loaded model.

    Attributes:
        name: public model id, as `GET /v1/models` shows it.
        fingerprint: hex digest over configuration, weights and compute dtype; two workers may exchange
            KV only if theirs are equal.
        num_kv_heads: H_kv; num_heads = H_kv * G.
        head_dim: D.
        max_model_len: context window in tokens, prompt plus completion.
        dtype: compute dtype, which is also the dtype of K and V.
        eos_token_ids: ids that end a completion.
    """

    name: str
    fingerprint: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: DTypeName
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of one K (or V) row of one KV head."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's full KV over all layers and KV heads, K and V."""
        return 2 * self.num_layers * self.num_kv_heads * self.row_bytes
