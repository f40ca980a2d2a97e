"""A model's shapes, context window and identity.

Built once at load time by `loading.py`. Workers send it in their status, so the router needs no weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor

from kvferry.shared.errors import ConfigurationError

DTypeName = Literal["float32", "float16", "bfloat16"]
TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
DTYPE_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype | str | None) -> DTypeName:
    """Return the name of a dtype that models may have. Raises: ConfigurationError for any other."""
    name = str(dtype).removeprefix("torch.")
    if name in TORCH_DTYPES:
        return cast(DTypeName, name)
    raise ConfigurationError(
        f"the checkpoint's dtype is {dtype}; set dtype to one of {', '.join(TORCH_DTYPES)}"
    )


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """One tensor of a layer's state, which has the same size after any number of tokens.

    Attributes:
        name: "conv_0", "recurrent_0", ...: as transformers' cache numbers them.
        shape: of one sequence.
        dtype: its own; recurrent states may be float32 in a 16-bit model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DTypeName

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The shape of a layer's attention.

    Attributes:
        num_kv_heads: H_kv. Latent rows are one KV head.
        group_size: G, query heads per KV head.
        head_dim: D, of keys; of latent rows, latent and rotary channels.
    """

    num_kv_heads: int
    group_size: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Which tokens a layer attends to, and how; or that it has a state instead.

    Attributes:
        window: W: a token attends to the last W tokens, itself included; 0: to all.
        is_chunked: a token attends to the tokens of its own chunk of W tokens instead.
        has_plain_softmax: whether weights are a softmax of scaled products, without soft-capping and sinks.
        latent_dim: of latent rows (multi-head latent attention, MLA): how many of a key's first channels are
            the value, too. Such a row is a token's latent vector and its rotary key, which all heads share;
            it is stored and shipped once. 0: K and V are stored each.
        has_rows: whether it attends, so that every token has K and V in it.
        state: of a layer without rows: its recurrent, linear-attention or convolution state. It may be empty:
            the layer has neither.
        heads: of a layer whose heads are not the model's (`ModelSpec.heads`).
    """

    window: int = 0
    is_chunked: bool = False
    has_plain_softmax: bool = True
    latent_dim: int = 0
    has_rows: bool = True
    state: tuple[StateSpec, ...] = ()
    heads: Heads | None = None

    @property
    def state_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.state)

    def first_visible(self, position: int) -> int:
        """Return the first token that the token at `position` attends to."""
        if not self.window:
            return 0
        return position - position % self.window if self.is_chunked else max(0, position - self.window + 1)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether the tokens at positions `queries` attend to those at `keys`; bool, broadcast."""
        if not self.window:
            return keys <= queries
        if self.is_chunked:
            return (keys <= queries) & (keys // self.window == queries // self.window)
        return (keys <= queries) & (keys > queries - self.window)

    def num_needed(self, num_tokens: int) -> int:
        """Return how many of the last of `num_tokens` tokens a later one may attend to, at least 1."""
        return max(1, num_tokens - self.first_visible(num_tokens))


def row_names(latent_dim: int) -> tuple[str, ...]:
    """Name the tensors of rows: K and V, or of latent rows K alone, whose first channels are V."""
    return ("keys",) if latent_dim else ("keys", "values")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shapes and identity of one loaded model.

    Attributes:
        name: public model id, as `GET /v1/models` shows it.
        fingerprint: hex digest over configuration, weights and compute dtype; two workers may exchange
            KV only if theirs are equal.
        num_kv_heads, head_dim: as in `Heads`, of the first layer with rows and all layers like it.
        num_heads: H_kv * G of these layers.
        max_model_len: context window in tokens, prompt plus completion.
        dtype: compute dtype, which is also the dtype of K and V.
        eos_token_ids: ids that end a completion.
        weights: how the weights are stored: a dtype, or a quantisation such as "bitsandbytes nf4".
        checkpoint_dtype: the checkpoint's own, in which `full_bytes` counts; None: the compute dtype.
        layers: one per layer; empty if every layer attends to all tokens. A layer of the model that has both
            rows and a state counts as two; the layers of such states come after the model's last layer.
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
    layers: tuple[LayerSpec, ...] = ()
    weights: str = ""
    checkpoint_dtype: DTypeName | None = None

    def layer(self, layer: int) -> LayerSpec:
        return self.layers[layer] if self.layers else LayerSpec()

    def heads(self, layer: int) -> Heads:
        """Return a layer's own heads, or the model's."""
        return self._heads[layer]

    @cached_property
    def _heads(self) -> tuple[Heads, ...]:
        most = Heads(num_kv_heads=self.num_kv_heads, group_size=self.group_size, head_dim=self.head_dim)
        return tuple(self.layer(layer).heads or most for layer in range(self.num_layers))

    @cached_property
    def row_layers(self) -> tuple[int, ...]:
        """The layers with K and V of every token."""
        return tuple(layer for layer in range(self.num_layers) if self.layer(layer).has_rows)

    @cached_property
    def row_numbers(self) -> dict[int, int]:
        """Return the number of each of `row_layers` among them."""
        return {layer: number for number, layer in enumerate(self.row_layers)}

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """Return the layers with a state."""
        return tuple(layer for layer, spec in enumerate(self.layers) if spec.state)

    @cached_property
    def empty_layers(self) -> frozenset[int]:
        """The layers with neither rows nor a state: nothing is shipped of them."""
        return frozenset(
            layer for layer, spec in enumerate(self.layers) if not spec.has_rows and not spec.state
        )

    @cached_property
    def latent_dim(self) -> int:
        """The latent dimension of the layers' rows: of all layers or of none."""
        return max((spec.latent_dim for spec in self.layers), default=0)

    @cached_property
    def row_names(self) -> tuple[str, ...]:
        """The names of the tensors in which rows are stored and shipped."""
        return row_names(self.latent_dim)

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def row_bytes(self, layer: int) -> int:
        """Return the bytes of one K (or V, or latent) row of one KV head."""
        return self.heads(layer).head_dim * DTYPE_BYTES[self.dtype]

    def layer_token_bytes(self, layer: int) -> int:
        """Return one token's full KV bytes in one layer, over all KV heads: K and V, or a latent row."""
        return self._token_bytes[layer]

    @cached_property
    def _token_bytes(self) -> tuple[int, ...]:
        layers = range(self.num_layers)
        return tuple(
            len(self.row_names) * self.heads(layer).num_kv_heads * self.row_bytes(layer) for layer in layers
        )

    @cached_property
    def kv_token_bytes(self) -> int:
        """The bytes of one token's full KV over all layers."""
        return sum(map(self.layer_token_bytes, self.row_layers))

    def full_bytes(self, num_tokens: int) -> int:
        """Return the bytes that tokens after a prompt need of it without compression: KV in the checkpoint's
        dtype, whichever the model computes in, and states."""
        rows = sum(
            self.layer(layer).num_needed(num_tokens) * self.layer_token_bytes(layer)
            for layer in self.row_layers
        )
        rows = rows // DTYPE_BYTES[self.dtype] * DTYPE_BYTES[self.checkpoint_dtype or self.dtype]
        return rows + sum(self.layers[layer].state_bytes for layer in self.state_layers)
