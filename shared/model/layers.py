"""What each layer of a model attends to, from its configuration; layers of other kinds are refused by name.

Called before weights are read. The probe at load time compares the windows with those of the attention calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.spec import LayerSpec

_KINDS: Mapping[str, Callable[[Any], LayerSpec]] = {
    "full_attention": lambda config: LayerSpec(),
    "sliding_attention": lambda config: LayerSpec(window=_window(config, "sliding_window")),
    "chunked_attention": lambda config: LayerSpec(
        window=_window(config, "attention_chunk_size"), is_chunked=True
    ),
}
"""Supported kinds of layers by their name in `layer_types`. A new kind is an entry here and a format."""
_REFUSED: Mapping[str, str] = {
    "linear_attention": "linear attention",
    "conv": "convolution",
    "indexed_attention": "attention to tokens that an indexer selects (DSA)",
    "mamba": "a state space",
    "recurrent": "recurrent layers",
}


def layer_specs(config: Any, *, max_model_len: int) -> tuple[LayerSpec, ...]:
    """One per layer; empty if every layer attends to all tokens.

    Args:
        config: a transformers text configuration.
        max_model_len: windows that are not smaller limit nothing.

    Raises: UnsupportedModel: names the first layer whose kind is not supported.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses_window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
        kinds = ["sliding_attention" if uses_window else "full_attention"] * config.num_hidden_layers
    layers = []
    for layer, kind in enumerate(kinds):
        if kind not in _KINDS:
            raise UnsupportedModel(
                f"model type {config.model_type!r} has {_REFUSED.get(kind, f'a layer of type {kind!r}')} in "
                f"layer {layer}, which is not supported; layers may be of type {', '.join(_KINDS)}"
            )
        spec = _KINDS[kind](config)
        layers.append(spec if spec.window < max_model_len else LayerSpec())
    return tuple(layers) if any(spec != LayerSpec() for spec in layers) else ()


def _window(config: Any, field: str) -> int:
    window = getattr(config, field, None)
    if not isinstance(window, int) or window < 1:
        raise UnsupportedModel(
            f"model type {config.model_type!r} has layers with a window, and {field} is {window!r}; it must "
            "be an integer of at least 1"
        )
    return window
