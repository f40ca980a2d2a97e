"""Probes a model when it is loaded: what its layers call attention with, and which states they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.adapters.latent import Latent
from kvferry.shared.model.bridge import AttentionPass, TransformersModel
from kvferry.shared.model.rotary import find_key_rotation
from kvferry.shared.model.spec import Heads, LayerSpec, ModelSpec, StateSpec, dtype_name

_MAX_PROBE_TOKENS = 8


def probed_model(model: Any, spec: ModelSpec) -> TransformersModel:
    """Return a transformers model that uses our attention, with its spec as measured by a few tokens.

    Args: spec: its head counts and sizes, the vocabulary's size, and layers' calls of attention are measured.

    Raises: UnsupportedModel if not every layer that attends calls our attention once, in order, or another
        one has its state elsewhere than in transformers' cache.
    """
    measured, keys = _measured(TransformersModel(model, spec))
    return TransformersModel(
        model, measured, find_key_rotation(model, keys, first_channel=measured.latent_dim)
    )


class _ProbePass(AttentionPass):
    """Records the arguments of each layer's attention, and the states; also implements `LayerStates`.

    Attention returns zeros, so that a token's key depends on the token and its position alone, in every
    layer; for a model with states, if each token is a sequence by itself.

    Attributes:
        calls: the layer, its heads, its other properties shown by the call, and the keys `[H_kv, T, D]`.
        stored: the states after the pass.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.calls: list[tuple[int, Heads, dict[str, Any], Tensor]] = []
        self.stored: dict[int, Mapping[str, Tensor]] = {}

    def load(self, layer: int) -> None:
        """See `LayerStates.load`; there are none before."""

    def store(self, layer: int, state: Mapping[str, Tensor]) -> None:
        self.stored[layer] = state

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


def _measured(model: TransformersModel) -> tuple[ModelSpec, dict[int, Tensor]]:
    """Measure the spec, and each layer's keys `[H_kv, 2n, D]` of n tokens, each at two positions."""
    spec = model.spec
    num_tokens = min(_MAX_PROBE_TOKENS, spec.max_model_len // 2)
    step = spec.vocab_size // (num_tokens + 1)
    # Token 0 is not used: padding has a key of zeros.
    token_ids = torch.arange(1, num_tokens + 1, device=model.device).mul(step).repeat(2)
    positions = torch.arange(len(token_ids), device=model.device)
    current = _ProbePass(spec)
    shape = (len(token_ids), 1) if model.state_layers else (1, len(token_ids))
    try:
        logits = model.run(token_ids.view(shape), positions.view(shape), current, current)
    except TypeError as error:
        raise UnsupportedModel(f"the model's forward lacks an argument that we need: {error}") from error
    called = [layer for layer, *_ in current.calls]
    if called != list(spec.row_layers):
        raise UnsupportedModel(
            f"attention was called for layers {called}, and the layers that attend are "
            f"{list(spec.row_layers)}; it must be called through transformers' attention interface once in "
            "every such layer, in order"
        )
    # without layers that attend: one head of one channel, for which nothing is stored
    own = current.calls[0][1] if called else Heads(num_kv_heads=1, group_size=1, head_dim=1)
    layers = [spec.layer(layer) for layer in range(spec.num_layers)]
    for layer, heads, said, _ in current.calls:
        layers[layer] = replace(layers[layer], **said, heads=None if heads == own else heads)
    for layer, state in current.stored.items():
        tensors = (
            StateSpec(name=name, shape=tuple(tensor.shape[1:]), dtype=dtype_name(tensor.dtype))
            for name, tensor in state.items()
        )
        layers[layer] = replace(layers[layer], state=tuple(tensors))
    measured = replace(
        spec,
        num_heads=own.num_kv_heads * own.group_size,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        vocab_size=logits.shape[1],
        layers=tuple(layers) if any(layer != LayerSpec() for layer in layers) else (),
    )
    return measured, {layer: keys for layer, _, _, keys in current.calls}
