"""Compressing and decoding one layer without services: random inputs, and what decode does with a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.layout import LAYOUT_VERSION
from kvferry.shared.cache.arena import LayerLayout, sequence_layout
from kvferry.shared.compression import formats
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerCache, LayerFormat, Tensors
from kvferry.shared.compression.interface import LayerInputs, Sizing
from kvferry.shared.compression.plan import WINDOW_FORMAT, LayerPlan, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.spec import TORCH_DTYPES, LayerSpec, ModelSpec

NOT_WRITTEN = 0xFF
"""A byte that makes every floating-point number NaN."""


def make_spec(
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 8,
    dtype: str = "float32",
    layers: tuple[LayerSpec, ...] = (),
) -> ModelSpec:
    """A model of these sizes; nothing runs it."""
    return ModelSpec(
        name="m",
        fingerprint="f",
        num_layers=num_layers,
        num_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=10,
        max_model_len=9999,
        dtype=dtype,
        eos_token_ids=(1,),
        layers=layers,
    )


def make_resolved(
    *layers: LayerPlan, num_prompt_tokens: int, max_new_tokens: int = 4, method: str = "full"
) -> ResolvedPlan:
    """A resolved plan of these layers, whether or not a budget comes to them."""
    return ResolvedPlan(
        plan=plan_for(method),
        method=method,
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=max_new_tokens,
        layers=layers,
    )


def make_inputs(
    num_tokens: int,
    *,
    new_tokens: int | None = None,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 8,
    latent_dim: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LayerInputs:
    """Gaussian queries, K and V, and some attention that a repetition gives.

    Args: latent_dim: of latent rows, whose values are the keys' first channels.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> Tensor:
        return torch.randn(num_kv_heads, *shape, head_dim, generator=generator).to(dtype)

    queries, keys = rows(group_size, new_tokens or num_tokens), rows(num_tokens)
    values = keys[..., :latent_dim] if latent_dim else rows(num_tokens)
    return LayerInputs(
        layer=0,
        queries=queries,
        keys=keys,
        values=values,
        scaling=head_dim**-0.5,
        unrotate=lambda keys: keys.float(),
        repeated=torch.rand(num_kv_heads, num_tokens, generator=generator),
    )


def make_sizing(
    rows: int, *, num_tokens: int, head_dim: int, latent_dim: int = 0, max_new_tokens: int = 1
) -> Sizing:
    """A budget of these rows."""
    return Sizing(
        layer=0,
        rows=rows,
        budget=rows,
        num_prompt_tokens=num_tokens,
        max_new_tokens=max_new_tokens,
        head_dim=head_dim,
        latent_dim=latent_dim,
    )


def _layer_spec(layer: LayerPlan, latent_dim: int) -> LayerSpec:
    """The layer that this is a plan of."""
    part = layer.representation
    window = part.params if part.name == WINDOW_FORMAT else {}
    return LayerSpec(**window, latent_dim=latent_dim)


def formats_for(
    resolved: ResolvedPlan, inputs: LayerInputs, *, returns_generated: bool = False
) -> tuple[LayerFormat, ...]:
    """The formats of a model whose layers have inputs like these."""
    num_kv_heads, group_size, _, head_dim = inputs.queries.shape
    value_dim = inputs.values.shape[2]
    latent_dim = value_dim if value_dim < head_dim else 0
    spec = make_spec(
        num_layers=len(resolved.layers),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        dtype=next(name for name, dtype in TORCH_DTYPES.items() if dtype == inputs.keys.dtype),
        layers=tuple(_layer_spec(layer, latent_dim) for layer in resolved.layers),
    )
    return make_formats(spec, resolved, returns_generated=returns_generated)


def compress_layer(resolved: ResolvedPlan, inputs: LayerInputs, *, scores: Tensor | None = None) -> Tensors:
    """A layer's tensors."""
    fmt = formats_for(resolved, inputs)[inputs.layer]
    return formats.compress_layer(resolved, fmt, inputs, scores=scores)


def one_format(
    attention: Part | None = None,
    *,
    rows: int,
    num_prompt_tokens: int,
    max_new_tokens: int = 4,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 8,
    returns_generated: bool = False,
    method: str = "full",
    representation: Part | None = None,
) -> LayerFormat:
    """The format of one layer of these sizes."""
    layer = LayerPlan(
        rows=rows,
        attention=attention or Part(name="dense"),
        representation=representation or Part(name="rows"),
    )
    resolved = make_resolved(
        layer, num_prompt_tokens=num_prompt_tokens, max_new_tokens=max_new_tokens, method=method
    )
    spec = make_spec(num_layers=1, num_kv_heads=num_kv_heads, group_size=group_size, head_dim=head_dim)
    (made,) = make_formats(spec, resolved, returns_generated=returns_generated)
    return made


def packed_tensors(packed: PackedLayer) -> dict[str, Tensor]:
    """A packed layer's tensors as they travel, whatever packed it."""
    counts = [count for head in packed.layout.heads for count in (*head.channels, *head.tokens)]
    tensors = {"layout": torch.tensor([LAYOUT_VERSION, *counts], dtype=torch.int32)}
    for name, (start, size_bytes) in packed.layout.kinds.items():
        tensors[name] = packed.buffer[start : start + size_bytes]
    return tensors


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One layer's bytes at decode, none of them written yet.

    Attributes:
        buffer: uint8, the layer's bytes and 64 more that belong to nobody.
    """

    layout: LayerLayout
    buffer: Tensor
    regions: dict[str, Tensor]

    @classmethod
    def of(cls, fmt: LayerFormat) -> Placed:
        layout = sequence_layout((fmt,))
        buffer = torch.full((layout.size_bytes + 64,), NOT_WRITTEN, dtype=torch.uint8)
        (layer,) = layout.layers
        return cls(layout=layer, buffer=buffer, regions=layer.views(buffer))

    @property
    def layout_bytes(self) -> int:
        """Bytes that are the layer's."""
        return len(self.buffer) - 64

    @property
    def num_prompt_rows(self) -> int:
        """Rows of the regions of K and V that are the prompt's, the rest new tokens'."""
        return self.regions["keys"].shape[1] - self.layout.format.shape.num_new_rows

    def open(self, tensors: Tensors) -> LayerCache:
        """The layer once its tensors have arrived."""
        return self.layout.place(self.buffer, tensors)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the layer's bytes."""
        start = self.buffer.data_ptr()
        return start <= tensor.data_ptr() < start + len(self.buffer) or not tensor.numel()


def opened(fmt: LayerFormat, tensors: Tensors) -> LayerCache:
    """A layer that has arrived whole."""
    return Placed.of(fmt).open(tensors)
