"""The supported models: decoders with causal rotary attention. Others are refused with the feature's name.

Dropping some tokens' K and V is only valid if a token affects later ones through attention alone, and if
attention treats all earlier tokens alike. The configuration is checked before weights are read. `bridge.py`
checks the rest in every attention call, first in the probe at load time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec

_RECURRENT_KEYS = (
    "mamba_d_state",
    "layers_block_type",
    "linear_num_value_heads",
    "conv_L_cache",
    "conv1d_width",
)
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_MAX_PROBE_TOKENS = 8


def check_config(config: Any, *, max_model_len: int) -> None:
    """Check a configuration.

    Args:
        config: a transformers configuration.
        max_model_len: the context window to be served, in tokens; a sliding window must not be smaller.

    Raises: UnsupportedModel naming the feature.
    """
    if config.is_encoder_decoder:
        feature: str | None = "an encoder-decoder"
    else:
        feature = _unsupported_feature(config.get_text_config(), max_model_len)
    if feature is not None:
        raise UnsupportedModel(
            f"model type {config.model_type!r} uses {feature}, which is not supported; supported are "
            "decoder-only models with full causal attention (MHA, GQA, MQA) and rotary positions everywhere"
        )


def _unsupported_feature(config: Any, max_model_len: int) -> str | None:
    def get(name: str) -> Any:
        return getattr(config, name, None)

    if get("use_bidirectional_attention"):
        return "bidirectional attention"
    if get("kv_lora_rank"):
        return "multi-head latent attention (kv_lora_rank)"
    if config.model_type == "gpt_oss":
        return "attention sinks"
    if get("attn_logit_softcapping"):
        return "attention logit soft-capping (attn_logit_softcapping)"
    if any(get(key) for key in _RECURRENT_KEYS):
        return "recurrent layers (linear attention, state space or convolution)"
    if get("alibi"):
        return "ALiBi positions"
    if get("num_kv_shared_layers"):
        return "KV shared between layers (num_kv_shared_layers)"
    if get("no_rope_layers") is not None and not all(get("no_rope_layers")):
        return "layers without rotary positions (no_rope_layers)"
    return _unsupported_layers(config, max_model_len) or _unsupported_rope(config, max_model_len)


def _unsupported_layers(config: Any, max_model_len: int) -> str | None:
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    is_limited = window is not None and 0 < window < max_model_len
    if layer_types is None:
        uses_window = getattr(config, "use_sliding_window", True)
        return f"a sliding window (sliding_window {window})" if is_limited and uses_window else None
    for layer_type in layer_types:
        if layer_type == "sliding_attention":
            if is_limited or not window:
                return f"a sliding window (sliding_window {window} in sliding_attention layers)"
        elif layer_type == "chunked_attention":
            return "chunked attention"
        elif layer_type == "linear_attention":
            return "linear-attention layers"
        elif layer_type != "full_attention":
            return f"layers of type {layer_type!r}"
    return None


def _unsupported_rope(config: Any, max_model_len: int) -> str | None:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "no rotary positions in its configuration (rope_parameters)"
    sets = [rope] if "rope_type" in rope else [part for part in rope.values() if part]
    for part in sets:
        rope_type = part["rope_type"]
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            original = part.get("original_max_position_embeddings") or config.max_position_embeddings
            if max_model_len > original:
                return (
                    f"rotary positions that change with the length (rope_type {rope_type!r} beyond "
                    f"{original} tokens; with a max_model_len of {original} it is supported)"
                )
        elif rope_type not in _STATIC_ROPE:
            return f"rotary positions of type {rope_type!r}"
    return None


def probe_attention(model: LanguageModel) -> tuple[ModelSpec, Tensor]:
    """Run a few tokens and check that every layer calls our attention once, in order, with the same shapes.

    Args: model: of its spec, head counts and sizes are not used.

    Returns: the spec with the shapes that were measured; the first layer's keys `[H_kv, 2n, D]` of n tokens,
        each at two positions.

    Raises: UnsupportedModel if not.
    """
    spec, probe = model.spec, _Probe()
    num_tokens = min(_MAX_PROBE_TOKENS, spec.max_model_len // 2)
    step = spec.vocab_size // (num_tokens + 1)
    # Token 0 is not used: padding has a key of zeros.
    token_ids = torch.arange(1, num_tokens + 1, device=model.device).mul(step).repeat(2)
    try:
        logits = model.prefill(token_ids, start=0, observer=probe)
    except TypeError as error:
        raise UnsupportedModel(f"the model's forward lacks an argument that we need: {error}") from error
    if probe.layers != list(range(spec.num_layers)):
        raise UnsupportedModel(
            f"attention was called for layers {probe.layers} of {spec.num_layers}; it must be called "
            "through transformers' attention interface once in every layer, in order"
        )
    if len(set(probe.shapes)) != 1:
        raise UnsupportedModel(
            f"layers differ in (KV heads, group size, head size): {sorted(set(probe.shapes))}"
        )
    num_kv_heads, group_size, head_dim = probe.shapes[0]
    measured = replace(
        spec,
        num_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=logits.shape[0],
    )
    return measured, probe.keys[0]


class _Probe:
    """Records what each layer's attention is called with."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, int]] = []
        self.layers: list[int] = []
        self.keys: list[Tensor] = []

    def history(self, layer: int) -> None:
        return None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.layers.append(layer)
        self.shapes.append((queries.shape[0], queries.shape[1], queries.shape[3]))
        self.keys.append(keys.clone())
