"""The attention function that transformers calls in every layer, for prefill and for decode.

transformers passes the layer's post-RoPE queries, keys and values. The current pass is the keyword argument
`kvferry` of the model's call, so there is no global state. Prefill passes K and V on to its
`PrefillObserver`; decode calls its `DecodeAttention`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.interface import DecodeAttention, PrefillObserver
from kvferry.shared.model.support import check_attention_call

ATTENTION_NAME = "kvferry"
_CHUNK_TOKENS = 256


class AttentionPass(Protocol):
    """One forward pass of the model."""

    max_model_len: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Args: query `[B, H, T, D]`, key and value `[B, H_kv, T, D]`. Returns `[B, T, H, D]`."""
        ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention in transformers' convention.

    Args:
        query: post-RoPE `[B, H, T, D]`; key and value `[B, H_kv, T, D]`. Query head h reads KV head h // G.
        kwargs: the model's other arguments; `kvferry` is the AttentionPass.

    Returns: `[B, T, H, D]`, and None in place of weights.

    Raises: UnsupportedModel if the model needs more than plain causal attention.
    """
    current: AttentionPass | None = kwargs.get("kvferry")
    if current is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass the model's arguments to its attention"
        )
    layer = check_attention_call(
        module, attention_mask, kwargs, key_dim=key.shape[-1], value_dim=value.shape[-1], current=current
    )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return current.attend(layer, query, key, value, float(scaling)), None


class PrefillPass:
    """The new tokens of a prompt, layer by layer.

        K, V of layer l:  projection ──► attend ──► observer.layer_done ──► freed with the layer's frame

    No layer's KV is stored here. Including the history from the observer, at most one layer of full KV is
    alive, and the new tokens' KV twice while it is joined to the history.
    """

    def __init__(self, observer: PrefillObserver, *, start: int, max_model_len: int) -> None:
        self._observer = observer
        self._start = start
        self.max_model_len = max_model_len

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        num_kv_heads = key.shape[1]
        history = self._observer.history(layer)
        num_history = 0 if history is None else history[0].shape[1]
        assert num_history == self._start, (
            f"history has {num_history} tokens, the pass starts at {self._start}"
        )
        if history is not None and num_history > 0:
            key = torch.cat([history[0][None], key], 2)
            value = torch.cat([history[1][None], value], 2)
        del history
        output = causal_attention(query, key, value, scaling)
        queries = query[0].view(num_kv_heads, -1, *query.shape[2:])
        self._observer.layer_done(layer, queries, key[0], value[0], scaling)
        return output.transpose(1, 2).contiguous()


class DecodePass:
    """One token for each of B sequences; the attention has their KV."""

    def __init__(self, attention: DecodeAttention, *, max_model_len: int) -> None:
        self._attention = attention
        self.max_model_len = max_model_len

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        num_kv_heads = key.shape[1]
        queries = query[:, :, 0].view(query.shape[0], num_kv_heads, -1, query.shape[3])
        output = self._attention(layer, queries, key[:, :, 0], value[:, :, 0], scaling)
        return output.flatten(1, 2)[:, None]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """softmax(scaling * Q K^T) V, the last query attending to every key, without a T x S mask or score
    matrix.

    Args: query `[1, H, T, D]`; key and value `[1, H_kv, S, D]`, S >= T.
    Returns: `[1, H, T, D]`.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    # On CUDA only the 16-bit kernels support grouped heads without computing full score matrices.
    has_causal_kernel = not query.is_cuda or query.dtype is not torch.float32
    if num_queries == 1:
        return scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    if num_queries == num_keys and has_causal_kernel:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    if query.is_cuda and has_causal_kernel:
        bias = causal_lower_right(num_queries, num_keys)
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True)
    return _chunked_causal_attention(query, key, value, scaling)


def _chunked_causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The same result, computed for a chunk of queries at a time with a mask of that chunk."""
    num_history = key.shape[2] - query.shape[2]
    output = torch.empty_like(query)
    for begin in range(0, query.shape[2], _CHUNK_TOKENS):
        end = min(begin + _CHUNK_TOKENS, query.shape[2])
        visible = num_history + end
        mask = torch.ones(end - begin, visible, dtype=torch.bool, device=query.device)
        mask = mask.tril(diagonal=num_history + begin)
        output[:, :, begin:end] = scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, :visible],
            value[:, :, :visible],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=True,
        )
    return output
