"""For decoder layers that do not pass the model's arguments to their attention (StableLM, Nemotron)."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from torch import nn

from kvferry.shared.model.adapters.decoder import decoder_of


def pass_arguments(model: Any) -> None:
    """Give every attention module the argument `kvferry` of its layer's call."""
    for layer in decoder_of(model).layers:
        passes = _Passes()
        layer.forward = partial(_run_layer, layer.forward, passes)
        layer.self_attn.register_forward_pre_hook(partial(_add_argument, passes), with_kwargs=True)


class _Passes(threading.local):
    """The passes that are in one layer; the last one runs. Another prompt's pass may run within one, between
    two operations, and another thread's beside it."""

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
