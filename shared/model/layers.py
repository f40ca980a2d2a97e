"""What each layer of a model attends to, or that it has a state, from its configuration; layers of other
kinds are refused by name.

Called before weights are read. The probe at load time compares the windows with those of the attention calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.spec import LayerSpec

_KINDS: Mapping[str, Callable[[Any, int], LayerSpec]] = {
    "full_attention": lambda config, layer: LayerSpec(),
    "sliding_attention": lambda config, layer: LayerSpec(window=_window(config, "sliding_window", layer)),
    "chunked_attention": lambda config, layer: LayerSpec(
        window=_window(config, "attention_chunk_size", layer), is_chunked=True
    ),
    "linear_attention": lambda config, layer: LayerSpec(has_rows=False),
    "conv": lambda config, layer: LayerSpec(has_rows=False),
    "moe": lambda config, layer: LayerSpec(has_rows=False),
    "mlp": lambda config, layer: LayerSpec(has_rows=False),
    "hybrid": lambda config, layer: LayerSpec(),
}
"""Supported kinds of layers by their name in `layer_types`. A new kind is an entry here and a format."""
_REFUSED: Mapping[str, str] = {
    "indexed_attention": "attention to tokens that an indexer selects (DSA)",
}
_WITH_STATE = ("linear_attention", "conv", "hybrid")


def state_layers(config: Any) -> dict[int, int]:
    """The layers of the model that have a state: each with its number in `layer_specs`.

    Those that attend, too, have their state in a layer of its own, after the model's last layer.
    """
    kinds = getattr(config, "layer_types", None) or []
    both = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
    return {
        layer: len(kinds) + both.index(layer) if layer in both else layer
        for layer, kind in enumerate(kinds)
        if kind in _WITH_STATE
    }


def layer_specs(config: Any, *, max_model_len: int) -> tuple[LayerSpec, ...]:
    """One per layer, the states of which are not known yet; empty if every layer attends to all tokens.

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
        spec = _KINDS[kind](config, layer)
        layers.append(spec if spec.window < max_model_len else LayerSpec())
    layers += [LayerSpec(has_rows=False)] * list(kinds).count("hybrid")
    return tuple(layers) if any(spec != LayerSpec() for spec in layers) else ()


def _window(config: Any, field: str, layer: int) -> int:
    window = getattr(config, field, None)
    if not isinstance(window, int) or window < 1:
        raise UnsupportedModel(
            f"model type {config.model_type!r} has a window in layer {layer}, and {field} is {window!r}; it "
            "must be an integer of at least 1"
        )
    return window
