"""A decode step of Llama-like models with few launches: their own weights, and our small operations.

    embedding ──► per layer: norm ──► q, k, v ──► rotate ──► attention ──► o ──► add, norm ──► gate, up
                  ──► silu product ──► down ──► add ──► ... ──► norm ──► head

Eleven launches a layer beside attention, where transformers' modules take 39, or 55 with norms of heads. Only
for model types whose modules are known, where kernels run; all else goes through transformers' modules
(`bridge.py`). Linear layers are called as modules, so weights may be quantised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.decoder_ops import add_norm, rotate, silu_product
from kvferry.shared.model.interface import DecodeAttention
from kvferry.shared.model.spec import ModelSpec

_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ATTENTION = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
_NORMS = frozenset(("q_norm", "k_norm"))
_LAYER = frozenset(("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
_MLP = frozenset(("gate_proj", "up_proj", "down_proj", "act_fn"))


class FusedDecode:
    """The decode step of one model. Use `fused_decode` to make one."""

    def __init__(self, model: Any, head_dim: int) -> None:
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._head_dim = head_dim

    def run(self, token_ids: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """One token for each of B sequences. Args: int64 `[B]`. Returns: float32 logits `[B, V]`."""
        decoder = self._decoder
        hidden: Tensor = decoder.embed_tokens(token_ids)
        cos, sin = (its[0] for its in decoder.rotary_emb(hidden[None], position_ids=positions[None]))
        residual: Tensor | None = None
        for number, layer in enumerate(decoder.layers):
            residual, hidden = _norm(layer.input_layernorm, hidden, residual)
            hidden = self._attend(number, layer.self_attn, hidden, cos, sin, attention)
            residual, hidden = _norm(layer.post_attention_layernorm, hidden, residual)
            hidden = layer.mlp.down_proj(silu_product(layer.mlp.gate_proj(hidden), layer.mlp.up_proj(hidden)))
        _, hidden = _norm(decoder.norm, hidden, residual)
        logits: Tensor = self._head(hidden)
        return logits.float()

    def _attend(
        self, number: int, module: Any, hidden: Tensor, cos: Tensor, sin: Tensor, attention: DecodeAttention
    ) -> Tensor:
        norms = None
        if hasattr(module, "q_norm"):
            norms = module.q_norm.weight, module.k_norm.weight, module.q_norm.variance_epsilon
        values = module.v_proj(hidden).view(len(hidden), -1, self._head_dim)
        queries, keys = rotate(module.q_proj(hidden), module.k_proj(hidden), cos, sin, norms)
        queries = queries.view(len(hidden), keys.shape[1], -1, self._head_dim)
        attended: Tensor = module.o_proj(attention(number, queries, keys, values, module.scaling).flatten(1))
        return attended


def _norm(module: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return add_norm(hidden, residual, module.weight, module.variance_epsilon)


def fused_decode(model: Any, spec: ModelSpec) -> FusedDecode | None:
    """The step of a transformers model whose modules are known; None for others.

    The modules' names are checked, so that one that a new version of transformers adds is not left out.
    """
    config = model.config
    plain = config.model_type in _TYPES and not spec.layers and config.hidden_act == "silu"
    if not plain or not spec.head_dim:
        return None
    decoder = model.get_decoder()
    for layer in decoder.layers:
        names = [{name for name, _ in its.named_children()} for its in (layer, layer.self_attn, layer.mlp)]
        if names[0] != _LAYER or names[1] not in (_ATTENTION, _ATTENTION | _NORMS) or names[2] != _MLP:
            return None
    if {name for name, _ in decoder.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    with torch.no_grad():
        cos, _ = decoder.rotary_emb(
            decoder.norm.weight[None, None],
            position_ids=torch.zeros_like(decoder.norm.weight[None, :1], dtype=torch.int64),
        )
    return FusedDecode(model, spec.head_dim) if cos.shape[-1] == spec.head_dim else None
