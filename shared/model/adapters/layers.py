"""For layers that do not pass our attention all that it needs.

They leave out its arguments (StableLM, Nemotron), queries of all but the last tokens in layers that share KV
(Gemma 4), or the scale of queries, for which they count positions in transformers' cache (Llama 4).
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvferry.shared.errors import UnsupportedModel

QUERY_SCALE = "kvferry_query_scale"
"""Attribute of an attention module: a function from positions `[B, T]` to the scale of their queries."""
_SLICE = "_maybe_slice_kv_shared_inputs"


def decoder_of(model: Any) -> Any:
    """Return the module with a model's layers, not its head; `get_decoder` of Llama 4 returns the whole
    model."""
    decoder = model.get_decoder()
    return getattr(decoder, "model", decoder)


def pass_arguments(model: Any) -> None:
    """Give every attention module the argument `kvferry` of its layer's call."""
    for layer in decoder_of(model).layers:
        passes = _Passes()
        layer.forward = partial(_run_layer, layer.forward, passes)
        layer.self_attn.register_forward_pre_hook(partial(_add_argument, passes), with_kwargs=True)


class _Passes(threading.local):
    """The passes inside one layer; the last one runs. Another prompt's pass may run within a pass, between
    two operations, and other threads' passes beside it."""

    def __init__(self) -> None:
        self.stack: list[Any] = []

    def __deepcopy__(self, memo: object) -> _Passes:
        return _Passes()


def _run_layer(forward: Any, passes: _Passes, *args: Any, **kwargs: Any) -> Any:
    passes.stack.append(kwargs.get("kvferry"))
    try:
        return forward(*args, **kwargs)
    finally:
        passes.stack.pop()


def _add_argument(passes: _Passes, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "kvferry": passes.stack[-1]}


def run_every_token(model: Any) -> None:
    """Let layers that share KV have every token's queries: methods observe them.

    Raises: UnsupportedModel: the model is not made as this adapter expects.
    """
    decoders = [module for module in model.modules() if hasattr(module, _SLICE)]
    if not decoders:
        raise UnsupportedModel(
            f"{type(model).__name__} has no {_SLICE}; this version of transformers is not supported for it"
        )
    for decoder in decoders:
        setattr(decoder, _SLICE, _unsliced)


def _unsliced(*inputs: Any, **_: Any) -> tuple[Any, ...]:
    """Return all tokens. Args: hidden states, per-layer inputs, position embeddings and masks; rest
    ignored."""
    return inputs[:4]


def scale_queries_by_position(model: Any) -> None:
    """Turn the module's own scaling off; `bridge.py` scales by the pass's positions instead."""
    for attention in model.modules():
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            sizes = (attention.floor_scale, attention.attn_scale)
            setattr(attention, QUERY_SCALE, partial(_scale, *sizes))


def _scale(floor_scale: float, attn_scale: float, positions: Tensor) -> Tensor:
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
