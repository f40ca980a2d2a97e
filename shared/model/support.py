"""The supported models: decoders with causal attention. Others are refused with the feature's name.

Dropping some tokens' K and V is only valid if a token affects later ones through attention, and through
states that are shipped whole, and if attention treats all earlier tokens alike. The configuration is checked
here, before weights are read. `bridge.py` checks the rest in every attention call, first in the probe at load
time (`probe.py`), which compares the windows, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvferry.shared.errors import ConfigurationError, UnsupportedModel
from kvferry.shared.model.model_types import PARALLEL_TYPES, check_type
from kvferry.shared.model.spec import LayerSpec

_NO_ROWS = LayerSpec(has_rows=False)
_KINDS: Mapping[str, LayerSpec] = {
    "full_attention": LayerSpec(),
    "sliding_attention": LayerSpec(),
    "chunked_attention": LayerSpec(is_chunked=True),
    "linear_attention": _NO_ROWS,
    "conv": _NO_ROWS,
    "moe": _NO_ROWS,
    "mlp": _NO_ROWS,
    "hybrid": LayerSpec(),
}
"""Supported kinds of layers by their name in `layer_types`. A new kind is an entry here and a format."""
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The kinds that have one, with its name in the configuration."""
_REFUSED = {"indexed_attention": "attention to tokens that an indexer selects (DSA)"}
_WITH_STATE = ("linear_attention", "conv", "hybrid")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""`longrope` is made static by `loading.py`."""
_INPUTS = (("q_proj", "k_proj", "v_proj"), ("query_key_value",))
_OUTPUTS = ("o_proj", "dense")


def check_config(config: Any, *, max_model_len: int) -> tuple[LayerSpec, ...]:
    """Check a configuration.

    Args:
        config: a transformers configuration.
        max_model_len: the context window to be served, in tokens.

    Returns: its layers, see `layer_specs`.
    Raises: UnsupportedModel naming the feature, and the first layer that has it.
    """
    feature = (
        "an encoder-decoder"
        if config.is_encoder_decoder
        else _unsupported_feature(config.get_text_config(), max_model_len)
    )
    if feature is not None:
        raise UnsupportedModel(
            f"model type {config.model_type!r} uses {feature}, which is not supported; supported are "
            "decoder-only models with causal attention (MHA, GQA, MQA, MLA) and rotary positions, or with a "
            "state"
        )
    text = config.get_text_config()
    layers = layer_specs(text, max_model_len=max_model_len)
    check_type(text.model_type)
    return layers


def _unsupported_feature(config: Any, max_model_len: int) -> str | None:
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "bidirectional attention in layer 0"  # "vision": only between images' tokens
    if getattr(config, "alibi", None):
        return "ALiBi positions in layer 0"
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        # some models with states have no positions at all
        no_rope = "no rotary positions in its configuration (rope_parameters) in layer 0"
        return None if state_layers(config) else no_rope
    # one set for all layers, or one for each type of layer
    kinds = getattr(config, "layer_types", None) or []
    sets = (
        {0: rope}
        if "rope_type" in rope
        else {kinds.index(kind): rope[kind] for kind in rope if kind in kinds}
    )
    for layer, part in sorted(sets.items()):
        if not part:
            continue
        rope_type = part["rope_type"]
        if rope_type == "dynamic":
            original = part.get("original_max_position_embeddings") or config.max_position_embeddings
            if max_model_len > original:
                return (
                    f"rotary positions that change with the length in layer {layer} (rope_type {rope_type!r} "
                    f"beyond {original} tokens; with a max_model_len of {original} it is supported)"
                )
        elif rope_type not in _STATIC_ROPE:
            return f"rotary positions of type {rope_type!r} in layer {layer}"
    return None


def state_layers(config: Any) -> dict[int, int]:
    """Return the layers of the model that have a state, each with its number in `layer_specs`.

    Layers that also attend have their state in a separate layer, after the model's last layer.
    """
    kinds = getattr(config, "layer_types", None) or []
    both = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
    return {
        layer: len(kinds) + both.index(layer) if layer in both else layer
        for layer, kind in enumerate(kinds)
        if kind in _WITH_STATE
    }


def layer_specs(config: Any, *, max_model_len: int) -> tuple[LayerSpec, ...]:
    """Return one spec per layer, with states not known yet; empty if every layer attends to all tokens.

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
        spec = _KINDS[kind]
        if (field := _WINDOWS.get(kind)) is not None:
            window = getattr(config, field, None)
            if not isinstance(window, int) or window < 1:
                raise UnsupportedModel(
                    f"model type {config.model_type!r} has a window in layer {layer}, and {field} is "
                    f"{window!r}; it must be an integer of at least 1"
                )
            spec = replace(spec, window=window)
        layers.append(spec if spec.window < max_model_len else LayerSpec())
    layers += [_NO_ROWS] * list(kinds).count("hybrid")
    return tuple(layers) if any(spec != LayerSpec() for spec in layers) else ()


def check_parallel(config: Any, num_ranks: int, *, is_quantised: bool) -> None:
    """Check a configuration before weights are read.

    Raises:
        UnsupportedModel: the model is not divided by KV heads.
        ConfigurationError: its KV heads cannot be divided by the number of ranks.
    """
    text = config.get_text_config()
    if text.model_type not in PARALLEL_TYPES:
        raise UnsupportedModel(
            f"model type {text.model_type!r} has not been checked with tensor_parallel {num_ranks}, and is "
            f"not supported with it; supported are {', '.join(sorted(PARALLEL_TYPES))}"
        )
    if is_quantised:
        raise UnsupportedModel(
            f"the weights are quantised, which is not supported with tensor_parallel {num_ranks}; it "
            "must be 1"
        )
    plan = getattr(text, "base_model_tp_plan", None) or {}
    styles = {name.rsplit(".", 1)[-1]: style for name, style in plan.items()}
    by_heads = any(all(styles.get(name) == "colwise" for name in names) for names in _INPUTS)
    if not by_heads or all(styles.get(name) != "rowwise" for name in _OUTPUTS):
        raise UnsupportedModel(
            f"transformers' tp_plan of model type {text.model_type!r} does not divide attention by heads; "
            "tensor_parallel must be 1"
        )
    num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if num_kv_heads % num_ranks:
        raise ConfigurationError(
            f"tensor_parallel is {num_ranks}, and the model has {num_kv_heads} KV heads; it must divide them"
        )
