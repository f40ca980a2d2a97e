"""A decode step of Llama-like models with few launches: their own weights, and our small operations.

    embedding ──► per layer: norm ──► q, k, v ──► rotate ──► attention ──► o ──► add, norm ──► gate, up
                  ──► silu product ──► down ──► add ──► ... ──► norm ──► head

Eight launches a layer beside attention, where transformers' modules take 39, or 55 with norms of heads; on a
CPU two calls of C code, if the weights are plain. Only for model types whose modules are known; all else goes
through transformers' modules (`bridge.py`). On a CPU the results in torch are the modules', bit by bit. On a
GPU the weights of q, k and v, and those of gate and up, are moved side by side in memory, where the modules
use them too, and multiplied at once. Other linear layers, such as quantised ones, are called as modules:
eleven launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvferry.kernels.decoder_ops import add_norm, rotate, silu_product
from kvferry.kernels.decoder_ops.native import NativeDecoder, Weights
from kvferry.kernels.dispatch import count, uses_native
from kvferry.shared.model.interface import DecodeAttention
from kvferry.shared.model.narrow import NarrowLinear
from kvferry.shared.model.spec import ModelSpec

_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ATTENTION = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
_NORMS = frozenset(("q_norm", "k_norm"))
_LAYER = frozenset(("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
_MLP = frozenset(("gate_proj", "up_proj", "down_proj", "act_fn"))
_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary positions that do not depend on the longest sequence, so that a table of them can be made."""
_MAX_TABLE_BYTES = 64 << 20


class FusedDecode:
    """The decode step of one model. Use `fused_decode` to make one."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._head_dim = spec.head_dim
        self._max_model_len = spec.max_model_len
        self._native: NativeDecoder | None = None
        self._weights = _weights_of(self._decoder, self._head)
        self._table: Tensor | None = None
        self._products = [_products(layer, join=False) for layer in self._decoder.layers]
        if self._decoder.norm.weight.device.type == "cuda":
            self.join_products()

    def join_products(self) -> None:
        """Compute products of the same rows as one from now on; their weights are then contiguous."""
        self._products = [_products(layer, join=True) for layer in self._decoder.layers]

    def run(self, token_ids: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """Run one token for each of B sequences. Args: int64 `[B]`. Returns: float32 logits `[B, V]`."""
        decoder = self._decoder
        hidden: Tensor = decoder.embed_tokens(token_ids)
        cos, sin = self._rotate_at(hidden, positions)
        residual: Tensor | None = None
        for number, layer in enumerate(decoder.layers):
            residual, hidden = _norm(layer.input_layernorm, hidden, residual)
            project, gate_and_up = self._products[number]
            rows = project(hidden)
            hidden = self._attend(number, layer.self_attn, rows, cos, sin, attention)
            residual, hidden = _norm(layer.post_attention_layernorm, hidden, residual)
            hidden = layer.mlp.down_proj(silu_product(*gate_and_up(hidden)))
        _, hidden = _norm(decoder.norm, hidden, residual)
        logits: Tensor = self._head(hidden)
        return logits.float()

    def runs_natively(self) -> bool:
        """Return whether `run_natively` can run a step now."""
        if self._weights is None or not uses_native("decoder_ops", self._weights[1].weight.device):
            return False
        if self._native is None:
            self._native = NativeDecoder(*self._weights, self._head_dim)
        return True

    def run_natively(self, token_ids: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """Do the same as `run`, by C code on a CPU."""
        assert self._native is not None, "`runs_natively` says so, and makes it"
        count({("decoder_ops", "native"): 1})
        hidden: Tensor = self._decoder.embed_tokens(token_ids)
        step = self._native.begin(hidden, *self._rotation(hidden, positions))
        for number, layer in enumerate(self._decoder.layers):
            scaling = layer.self_attn.scaling
            step.finish(number, attention(number, *step.project(number), scaling))
        return step.logits()

    def _rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, `[B, D]` each, from a table of all positions if that is not too large."""
        size = 2 * self._max_model_len * self._head_dim * hidden.element_size()
        if size > _MAX_TABLE_BYTES or self._decoder.rotary_emb.rope_type not in _ROTATIONS:
            return self._rotate_at(hidden, positions)
        if self._table is None:
            self._table = torch.stack(self._rotate_at(hidden, torch.arange(self._max_model_len)))
        cos, sin = self._table.index_select(1, positions).unbind(0)
        return cos, sin

    def _rotate_at(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._decoder.rotary_emb(hidden[None], position_ids=positions[None])
        return cos[0], sin[0]

    def _attend(
        self,
        number: int,
        module: Any,
        rows: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        attention: DecodeAttention,
    ) -> Tensor:
        norms = None
        if hasattr(module, "q_norm"):
            norms = module.q_norm.weight, module.k_norm.weight, module.q_norm.variance_epsilon
        queries, keys, values = rows
        queries, keys, values = rotate(queries, keys, values, cos, sin, norms)
        queries = queries.view(len(queries), keys.shape[1], -1, self._head_dim)
        attended: Tensor = module.o_proj(attention(number, queries, keys, values, module.scaling).flatten(1))
        return attended


class Products:
    """Rows `[B, N]` times several weights, each by its module."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules

    def __call__(self, rows: Tensor) -> Sequence[Tensor]:
        return [module(rows) for module in self._modules]


class JoinedProducts(Products):
    """The same in one product of weights that are contiguous in memory."""

    def __init__(self, modules: Sequence[Any]) -> None:
        super().__init__(modules)
        self._sizes = [module.out_features for module in modules]
        self._weight = side_by_side([module.weight for module in modules])
        has_bias = modules[0].bias is not None
        self._bias = side_by_side([module.bias for module in modules]) if has_bias else None

    @staticmethod
    def can_join(modules: Sequence[Any]) -> bool:
        """Return whether these are plain linear layers of one dtype, all with a bias or none."""
        if not all(_is_plain(module, nn.Linear) for module in modules):
            return False
        return (
            len({(module.weight.dtype, module.weight.device, module.bias is None) for module in modules}) == 1
        )

    def __call__(self, rows: Tensor) -> Sequence[Tensor]:
        return torch.split(nn.functional.linear(rows, self._weight, self._bias), self._sizes, dim=1)


def _products(layer: Any, *, join: bool) -> tuple[Products, Products]:
    """Make the products of a layer's rows: q, k and v; gate and up."""
    attention, mlp = layer.self_attn, layer.mlp

    def of(*modules: Any) -> Products:
        return JoinedProducts(modules) if join and JoinedProducts.can_join(modules) else Products(modules)

    return of(attention.q_proj, attention.k_proj, attention.v_proj), of(mlp.gate_proj, mlp.up_proj)


def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """Join several tensors' rows in one, of which they become parts; without a copy if they already are.

    Args: parameters: contiguous, equal but for their first dimension.
    """
    first, size, end = parameters[0], parameters[0].element_size(), parameters[0].data_ptr()
    are_joined = True
    for each in parameters:
        are_joined &= each.data_ptr() == end and each.is_contiguous()
        end += each.numel() * size
    num_rows = sum(map(len, parameters))
    storage = first.untyped_storage()
    if are_joined and end <= storage.data_ptr() + storage.nbytes():
        return first.data.as_strided((num_rows, *first.shape[1:]), first.stride())
    joined = torch.cat([each.data for each in parameters])
    parts = torch.split(joined, [len(each) for each in parameters])
    for each, part in zip(parameters, parts, strict=True):
        each.data = part
    return joined


def _norm(module: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return add_norm(hidden, residual, module.weight, module.variance_epsilon)


_PRODUCTS = {
    "queries": "self_attn.q_proj", "keys": "self_attn.k_proj", "values": "self_attn.v_proj",
    "output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_LAYER_NORMS = {
    "input": "input_layernorm", "inner": "post_attention_layernorm",
    "queries_norm": "self_attn.q_norm", "keys_norm": "self_attn.k_norm",
}  # fmt: skip
"""Modules by the names of `NativeDecoder`."""


def _weights_of(decoder: Any, head: Any) -> tuple[list[dict[str, Weights]], Weights, Weights] | None:
    """Return a model's plain weights; None if C code cannot use them."""
    layers = []
    for layer in decoder.layers:
        names = dict(layer.named_modules())
        products = {name: names[path] for name, path in _PRODUCTS.items()}
        if not all(_is_plain(module, nn.Linear, NarrowLinear) for module in (*products.values(), head)):
            return None
        weights = {name: Weights(module.weight, module.bias) for name, module in products.items()}
        norms = {name: names[path] for name, path in _LAYER_NORMS.items() if path in names}
        layers.append(weights | {name: _norm_weights(module) for name, module in norms.items()})
    last, of_head = _norm_weights(decoder.norm), Weights(head.weight, head.bias)
    if NativeDecoder.problem([last, of_head, *(entry for weights in layers for entry in weights.values())]):
        return None
    return layers, last, of_head


def _is_plain(module: Any, *classes: type[nn.Linear]) -> bool:
    """Return whether a module is a linear layer whose weight is a plain torch tensor: quantised ones have
    weights of other classes, or under other names."""
    weight = getattr(module, "weight", None)
    return type(module) in classes and isinstance(weight, Tensor) and type(weight.data) is Tensor


def _norm_weights(module: Any) -> Weights:
    return Weights(module.weight, eps=module.variance_epsilon)


def has_known_modules(model: Any) -> bool:
    """Return whether all modules of a transformers model are known.

    Their names are checked, so that a module added by a new version of transformers is not ignored.
    """
    if model.config.model_type not in _TYPES or model.config.hidden_act != "silu":
        return False
    decoder = model.get_decoder()
    for layer in decoder.layers:
        names = [
            {name for name, _ in module.named_children()} for module in (layer, layer.self_attn, layer.mlp)
        ]
        if names[0] != _LAYER or names[1] not in (_ATTENTION, _ATTENTION | _NORMS) or names[2] != _MLP:
            return False
    return {name for name, _ in decoder.named_children()} == {"embed_tokens", "layers", "norm", "rotary_emb"}


def fused_decode(model: Any, spec: ModelSpec) -> FusedDecode | None:
    """Make the step of a transformers model whose modules are known; None for others."""
    if spec.layers or not spec.head_dim or not has_known_modules(model):
        return None
    decoder = model.get_decoder()
    with torch.no_grad():
        cos, _ = decoder.rotary_emb(
            decoder.norm.weight[None, None],
            position_ids=torch.zeros_like(decoder.norm.weight[None, :1], dtype=torch.int64),
        )
    return FusedDecode(model, spec) if cos.shape[-1] == spec.head_dim else None
