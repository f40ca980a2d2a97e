"""Makes the caller's transformers model usable as a `LanguageModel`; it still works on its own, too.

The model's attention implementation becomes `kvferry_cache`: compressed caches attend by their formats' plain
code, and every other call goes to transformers' `sdpa`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from kvferry.shared.errors import InvalidRequest, UnsupportedModel
from kvferry.shared.model.adapters import ADAPTERS
from kvferry.shared.model.bridge import TransformersModel, attention_forward
from kvferry.shared.model.checkpoint import quiet_libraries
from kvferry.shared.model.probe import probed_model
from kvferry.shared.model.spec import ModelSpec, dtype_name
from kvferry.shared.model.support import check_config

ATTENTION_NAME = "kvferry_cache"
CACHE_LAYER = "_kvferry_cache_layer"
"""Attribute of the keys that a compressed cache returns from its update."""
_BRIDGE = "_kvferry_bridge"
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def bridge_of(model: Any) -> TransformersModel:
    """Return the model's forward passes with our attention; made once for each model.

    Args: model: a causal language model of transformers, in eval mode.

    Raises:
        InvalidRequest: the model is in training mode.
        UnsupportedModel: the model needs an unsupported feature; the message names it.
    """
    known: TransformersModel | None = model.__dict__.get(_BRIDGE)
    if known is None:
        if model.training:
            raise InvalidRequest("the model is in training mode; call model.eval()", param="model")
        known = model.__dict__[_BRIDGE] = _make_bridge(model)
    return known


def _make_bridge(model: Any) -> TransformersModel:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    text_config = model.config.get_text_config()
    max_model_len = int(text_config.max_position_embeddings)
    layers = check_config(model.config, max_model_len=max_model_len)
    _check_family(text_config)
    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    name = dtype_name(model.dtype)
    eos = model.generation_config.eos_token_id
    spec = ModelSpec(
        name=text_config.model_type,
        fingerprint=hashlib.sha256(f"{text_config.to_json_string()} {name}".encode()).hexdigest(),
        num_layers=len(layers) or int(text_config.num_hidden_layers),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        vocab_size=int(text_config.vocab_size),
        max_model_len=max_model_len,
        dtype=name,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        layers=layers,
        weights=name,
    )
    try:
        with quiet_libraries():
            model.set_attn_implementation(ATTENTION_NAME)
            probed = probed_model(model, spec)
        if probed.spec.state_layers or not all(layer.has_plain_softmax for layer in probed.spec.layers):
            raise UnsupportedModel(
                f"model type {spec.name!r} has states, soft-capped logits or attention sinks; it is "
                "supported by kvferry serve only"
            )
        return probed
    except BaseException:
        model.set_attn_implementation(before)
        raise


def _check_family(config: Any) -> None:
    if config.model_type in ADAPTERS:
        raise UnsupportedModel(
            f"model type {config.model_type!r} has attention of its own; it is supported by "
            "kvferry serve only"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (
        [rope] if "rope_type" in rope else [nested for nested in rope.values() if isinstance(nested, dict)]
    ):
        if part.get("rope_type") in _LENGTH_DEPENDENT:
            raise UnsupportedModel(
                f"rope_type is {part['rope_type']!r}; positions that depend on the length are supported by "
                "kvferry serve only"
            )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention in transformers' convention, see `bridge.attention_forward`."""
    if kwargs.get("kvferry") is not None:
        return attention_forward(module, query, key, value, None, scaling, **kwargs)
    layer = getattr(key, CACHE_LAYER, None)
    if layer is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return layer.attend(query, key, value, float(scaling)), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output: Tensor = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )[0]
    return output, None


def token_ids_of(input_ids: Any) -> list[int]:
    """Return the tokens of one prompt: int64 `[T]` or `[1, T]`, or a list.

    Raises: InvalidRequest.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.numel() == 0 or ids.is_floating_point():
        raise InvalidRequest(
            f"input_ids has shape {list(ids.shape)} and dtype {ids.dtype}; it must be the ids of one prompt, "
            "[T] or [1, T]",
            param="input_ids",
        )
    return [int(token_id) for token_id in ids.tolist()]
