"""The supported models: decoders with causal attention. Others are refused with the feature's name.

Dropping some tokens' K and V is only valid if a token affects later ones through attention, and through
states that are shipped whole, and if attention treats all earlier tokens alike. The configuration is checked
before weights are read. `bridge.py` checks the rest in every attention call, first in the probe at load time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.adapters.latent import Latent
from kvferry.shared.model.bridge import AttentionPass, TransformersModel
from kvferry.shared.model.families import MODEL_TYPES
from kvferry.shared.model.layers import layer_specs, state_layers
from kvferry.shared.model.spec import TORCH_DTYPES, DTypeName, Heads, LayerSpec, ModelSpec, StateSpec

_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""`longrope` is made static by `loading.py`."""
_MAX_PROBE_TOKENS = 8


def check_config(config: Any, *, max_model_len: int) -> tuple[LayerSpec, ...]:
    """Check a configuration.

    Args:
        config: a transformers configuration.
        max_model_len: the context window to be served, in tokens.

    Returns: its layers, see `layer_specs`.
    Raises: UnsupportedModel naming the feature, and the first layer that has it.
    """
    if config.is_encoder_decoder:
        feature: str | None = "an encoder-decoder"
    else:
        feature = _unsupported_feature(config.get_text_config(), max_model_len)
    if feature is not None:
        raise UnsupportedModel(
            f"model type {config.model_type!r} uses {feature}, which is not supported; supported are "
            "decoder-only models with causal attention (MHA, GQA, MQA, MLA) and rotary positions, or with a "
            "state"
        )
    text = config.get_text_config()
    layers = layer_specs(text, max_model_len=max_model_len)
    if text.model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"model type {text.model_type!r} has not been checked against transformers, and is not "
            f"supported; supported are {', '.join(sorted(MODEL_TYPES))}"
        )
    return layers


def _unsupported_feature(config: Any, max_model_len: int) -> str | None:
    def get(name: str) -> Any:
        return getattr(config, name, None)

    if get("use_bidirectional_attention") not in (None, False, "vision"):  # only between images' tokens
        return "bidirectional attention in layer 0"
    if get("alibi"):
        return "ALiBi positions in layer 0"
    return _unsupported_rope(config, max_model_len)


def _unsupported_rope(config: Any, max_model_len: int) -> str | None:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        # of models with states, some have no positions at all
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


class _ProbePass(AttentionPass):
    """Records what each layer's attention is called with. It returns zeros, so that a token's key depends on
    the token and its position alone, in every layer; of a model with states, if each token is a sequence of
    its own.

    Attributes: calls: the layer, its heads and what else a call says of it, and the keys `[H_kv, T, D]`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.calls: list[tuple[int, Heads, dict[str, Any], Tensor]] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, latent: Latent | None
    ) -> Tensor:
        batch_size, num_heads, num_tokens, width = query.shape
        heads = Heads(num_kv_heads=key.shape[1], group_size=num_heads // key.shape[1], head_dim=key.shape[3])
        said = {
            "has_plain_softmax": not isinstance(scaling, Softmax),
            "latent_dim": 0 if latent is None else value.shape[3],
        }
        self.calls.append((layer, heads, said, key.transpose(0, 1).flatten(1, 2).clone()))
        if latent is not None:
            width = latent.expand(key[0, 0, :1], slice(1))[1].shape[2]
        return query.new_zeros(batch_size, num_tokens, num_heads, width)


class _ProbedStates:
    """Implements `LayerStates`: there are none before. Attributes: stored: those after the pass."""

    def __init__(self) -> None:
        self.stored: dict[int, Mapping[str, Tensor]] = {}

    def load(self, layer: int) -> None:
        """See `LayerStates.load`."""

    def store(self, layer: int, state: Mapping[str, Tensor]) -> None:
        """See `LayerStates.store`."""
        self.stored[layer] = state


def probe_attention(model: TransformersModel) -> tuple[ModelSpec, dict[int, Tensor]]:
    """Run a few tokens and check that every layer that attends calls our attention once, in order, and
    that every other one has its state in transformers' cache.

    Args: model: of its spec, head counts and sizes are not used.

    Returns: the spec with the shapes and kinds of softmax that were measured, and the states; each layer's
        keys `[H_kv, 2n, D]` of n tokens, each at two positions, by layer.

    Raises: UnsupportedModel if not.
    """
    spec = model.spec
    num_tokens = min(_MAX_PROBE_TOKENS, spec.max_model_len // 2)
    step = spec.vocab_size // (num_tokens + 1)
    # Token 0 is not used: padding has a key of zeros.
    token_ids = torch.arange(1, num_tokens + 1, device=model.device).mul(step).repeat(2)
    positions = torch.arange(len(token_ids), device=model.device)
    current, states = _ProbePass(spec), _ProbedStates()
    shape = (len(token_ids), 1) if model.state_layers else (1, len(token_ids))
    try:
        logits = model.run(token_ids.view(shape), positions.view(shape), current, states)
    except TypeError as error:
        raise UnsupportedModel(f"the model's forward lacks an argument that we need: {error}") from error
    called = [layer for layer, *_ in current.calls]
    if called != list(spec.row_layers):
        raise UnsupportedModel(
            f"attention was called for layers {called}, and the layers that attend are "
            f"{list(spec.row_layers)}; it must be called through transformers' attention interface once in "
            "every such layer, in order"
        )
    # without layers that attend, one head of one channel, of which nothing is stored
    own = current.calls[0][1] if called else Heads(num_kv_heads=1, group_size=1, head_dim=1)
    layers = [spec.layer(layer) for layer in range(spec.num_layers)]
    for layer, heads, said, _ in current.calls:
        layers[layer] = replace(layers[layer], **said, heads=None if heads == own else heads)
    for layer, state in states.stored.items():
        layers[layer] = replace(layers[layer], state=_state_specs(state))
    measured = replace(
        spec,
        num_heads=own.num_kv_heads * own.group_size,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        vocab_size=logits.shape[1],
        layers=tuple(layers) if any(its != LayerSpec() for its in layers) else (),
    )
    return measured, {layer: keys for layer, _, _, keys in current.calls}


def _state_specs(state: Mapping[str, Tensor]) -> tuple[StateSpec, ...]:
    names = {TORCH_DTYPES[name]: name for name in get_args(DTypeName)}
    return tuple(
        StateSpec(name=name, shape=tuple(its.shape[1:]), dtype=names[its.dtype])
        for name, its in state.items()
    )
