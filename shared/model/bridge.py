"""`LanguageModel` over an unmodified transformers decoder: the forward passes of prefill and decode.

Called by the engines of prefill and decode; `loading.py` loads models. transformers calls `attention_forward`
in every layer with the layer's post-RoPE queries, keys and values. The current pass is the keyword argument
`kvferry` of the model's call, so there is no global state. Prefill gives K and V to its `PrefillObserver`;
decode calls its `DecodeAttention`. No KV is stored here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvferry.shared.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from kvferry.shared.model.interface import DecodeAttention, PrefillObserver
from kvferry.shared.model.rotary import KeyRotation
from kvferry.shared.model.spec import ModelSpec

ATTENTION_NAME = "kvferry"
_CHUNK_TOKENS = 256
_BLOCK_QUERIES = 2048
_CPU_PAIRS, _CUDA_PAIRS = 1 << 23, 1 << 36
"""Pairs of a query and a key, over all heads, that one operation may compute: up to about 0.05 s."""
_LOGITS = 1 << 22
"""Logits of a prompt that are in memory at a time."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What torch's attention runs on a CPU. Returns also the logarithm of the softmax's sum, `[B, H, T]`."""
_UNSUPPORTED_ARGUMENTS = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "attention logit soft-capping",
    "position_bias": "position biases",
    "alibi": "ALiBi positions",
}


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
    layer = _check_call(module, key, value, attention_mask, kwargs, current.max_model_len)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return current.attend(layer, query, key, value, float(scaling)), None


def _check_call(
    module: nn.Module,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    arguments: Mapping[str, Any],
    max_model_len: int,
) -> int:
    """Check one call of the attention; returns the layer's index. Raises: UnsupportedModel."""
    layer = getattr(module, "layer_idx", None)
    name = type(module).__name__
    if not isinstance(layer, int):
        raise UnsupportedModel(f"{name} has no layer_idx; attention modules must know their layer")
    for argument, feature in _UNSUPPORTED_ARGUMENTS.items():
        if arguments.get(argument) is not None:
            raise UnsupportedModel(f"{name} uses {feature} ({argument}), which is not supported")
    window = arguments.get("sliding_window")
    if window is not None and 0 < window < max_model_len:
        raise UnsupportedModel(
            f"{name} uses a sliding window (sliding_window {window}), which is not supported"
        )
    if attention_mask is not None:
        raise UnsupportedModel(f"{name} passes an attention mask; only plain causal attention is supported")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{name} is not causal; only plain causal attention is supported")
    if key.shape[-1] != value.shape[-1]:
        raise UnsupportedModel(
            f"{name} has keys of size {key.shape[-1]} and values of size {value.shape[-1]}; must be equal"
        )
    return layer


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
    matrix. Computed in several operations if it takes long, so that another prompt can run between them.

    Args: query `[1, H, T, D]`; key and value `[1, H_kv, S, D]`, S >= T.
    Returns: `[1, H, T, D]`.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == 1:
        return scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    if not query.is_cuda:
        return _cpu_attention(query, key, value, scaling)
    # Only the 16-bit kernels support grouped heads without computing full score matrices.
    if query.dtype is torch.float32:
        return _masked_attention(query, key, value, scaling)
    if num_queries == num_keys:
        return _attention_by_heads(query, key, value, is_causal=True, scale=scaling)
    bias = causal_lower_right(num_queries, num_keys)
    return _attention_by_heads(query, key, value, attn_mask=bias, scale=scaling)


def _attention_by_heads(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention in one call, or if that takes long, in several for some KV heads each."""
    num_kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    step = max(1, _CUDA_PAIRS // (group * query.shape[2] * key.shape[2]))
    if step >= num_kv_heads:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    output = torch.empty_like(query)
    for begin in range(0, num_kv_heads, step):
        kv, heads = slice(begin, begin + step), slice(begin * group, (begin + step) * group)
        output[:, heads] = scaled_dot_product_attention(
            query[:, heads], key[:, kv], value[:, kv], enable_gqa=True, **options
        )
    return output


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention in one call, or of a block of queries and one KV head at a time, or one head if it is long.

    A block attends to the keys before it and, causally, to its own. The two are joined by their shares of the
    softmax's sum, `e^lse`. With a mask instead, torch's kernel would take half as long again.
    """
    (num_heads, num_queries), num_keys = query.shape[1:3], key.shape[2]
    if num_queries == num_keys and num_heads * num_keys**2 <= _CPU_PAIRS:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    group, history = num_heads // key.shape[1], num_keys - num_queries
    block = min(num_queries, _BLOCK_QUERIES)
    step = group if group * block * num_keys <= _CPU_PAIRS else 1
    output = torch.empty_like(query)
    for head in range(0, num_heads, step):
        keys, values = (its[:, head // group, None].expand(-1, step, -1, -1) for its in (key, value))
        for begin in range(0, num_queries, block):
            rows, own = slice(begin, begin + block), slice(history + begin, history + begin + block)
            queries = query[:, head : head + step, rows]
            attended, lse = _flash(queries, keys[:, :, own], values[:, :, own], is_causal=True, scale=scaling)
            if own.start:
                earlier = slice(0, own.start)
                before, lse_before = _flash(
                    queries, keys[:, :, earlier], values[:, :, earlier], scale=scaling
                )
                share = torch.sigmoid(lse_before - lse)[..., None]
                attended = torch.lerp(attended, before, share.to(before.dtype))
            output[:, head : head + step, rows] = attended
    return output


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
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


class TransformersModel:
    """Implements `LanguageModel`. Nothing of a pass is stored here, so one may run within another.

    Args:
        model: a transformers causal language model in eval mode that uses our attention function.
        rotation: undoes the rotary positions of its keys; None if that is not possible.
    """

    def __init__(self, model: Any, spec: ModelSpec, rotation: KeyRotation | None = None) -> None:
        self.spec = spec
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._model = model
        self._rotation = rotation
        self._skipped = (0, 0)

    def twin(self) -> TransformersModel:
        """A model of its own over the same weights, for another thread's passes."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        modules = copy.deepcopy(self._model, {id(tensor): tensor for tensor in tensors})
        return TransformersModel(modules, self.spec, self._rotation)

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: Tensor,
        *,
        start: int,
        observer: PrefillObserver,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run new prompt tokens, layer by layer; see `LanguageModel.prefill`.

        Raises:
            ContextLengthExceeded: start + T is beyond the model's window.
            InvalidRequest: `on_logits` is given, and the model scales or caps its head's logits.
            Whatever the observer raises; this ends the pass.
        """
        end = start + token_ids.shape[0]
        if end > self.spec.max_model_len:
            raise ContextLengthExceeded(f"{end} tokens; the model's window is {self.spec.max_model_len}")
        positions = torch.arange(start, end, device=self.device)
        current = PrefillPass(observer, start=start, max_model_len=self.spec.max_model_len)
        if on_logits is None:
            return self._run(token_ids[None], positions[None], current)[0]
        hidden: list[Tensor] = []

        def keep(_: Any, __: Any, options: Any, output: Any) -> None:
            if options.get("kvferry") is current:  # not a pass within this one
                hidden.append(output.last_hidden_state[0])

        hook = self._model.get_decoder().register_forward_hook(keep, with_kwargs=True)
        try:
            logits = self._run(token_ids[None], positions[None], current)[0]
        finally:
            hook.remove()
        self._head(hidden[0], logits, start, on_logits)
        return logits

    def _head(
        self, hidden: Tensor, last: Tensor, start: int, on_logits: Callable[[int, Tensor], None]
    ) -> None:
        """The logits of all tokens, a few rows at a time.

        Args: hidden: `[T, hidden size]` after the last layer. last: logits `[V]` of the last token.
        """
        head = self._model.get_output_embeddings()
        if not torch.equal(head(hidden[None, -1:])[0, -1].float(), last):
            raise InvalidRequest(
                f"prompt_logprobs is not available for {type(self._model).__name__}, which scales or caps "
                "its head's logits",
                param="prompt_logprobs",
            )
        num_rows = max(1, _LOGITS // self.spec.vocab_size)
        for first in range(0, hidden.shape[0], num_rows):
            on_logits(start + first, head(hidden[first : first + num_rows]))

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, positions: Tensor, *, attention: DecodeAttention) -> Tensor:
        """Run one token for each of B sequences; see `LanguageModel.decode`."""
        current = DecodePass(attention, max_model_len=self.spec.max_model_len)
        return self._run(token_ids[:, None], positions[:, None], current)

    @torch.inference_mode()
    def pre_rope_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Keys without their rotary positions; see `LanguageModel.pre_rope_keys`."""
        if self._rotation is None:
            raise UnsupportedModel(
                f"the rotary positions of {type(self._model).__name__} cannot be undone; compression methods "
                "that use keys before RoPE cannot be used with it"
            )
        return self._rotation.undo(layer, keys)

    def skip_positions(self, first: int, number: int) -> None:
        """In later passes, rotate tokens from position `first` on as if they were `number` positions later.

        Used to measure what distance alone costs. `number` 0 skips nothing.
        """
        self._skipped = (first, number)

    def _run(self, token_ids: Tensor, positions: Tensor, current: AttentionPass) -> Tensor:
        first, skipped = self._skipped
        if skipped:
            positions = positions + skipped * (positions >= first)
        output = self._model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=1, kvferry=current
        )
        logits: Tensor = output.logits[:, -1]
        return logits.float()
