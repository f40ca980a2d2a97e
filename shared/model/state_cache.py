"""transformers' cache of one pass: the states of its layers, while each layer runs.

A layer with a recurrent, linear-attention or convolution state reads and writes it through the model's cache
argument. The states are loaded when a layer begins and stored when the next one does, so that only one
layer's are in memory at a time. K and V are not cached here: attention gets the new tokens' only
(`bridge.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.interface import LayerStates

_CONV, _RECURRENT = "conv_", "recurrent_"


class StateCache(Cache):
    """The cache of one pass.

        nothing ──a layer asks for its state──► load: the layer runs ──another layer's turn, end──► store

    Args:
        config: the model's text configuration.
        numbers: the layers with a state, each with its number for `states`.
        states: where they come from and go to; None: there are none before, and those after are dropped.

    Attributes: attending: the layer that attends, or did so last. Zamba's layers share their attention,
        which does not know the layer.
    """

    def __init__(self, config: Any, numbers: Mapping[int, int], states: LayerStates | None) -> None:
        super().__init__(layers=DynamicCache(config=config).layers)
        self._numbers = numbers
        self._states = states
        self._current: int | None = None
        self.attending: int | None = None

    def finish(self) -> None:
        """Store the state of the layer that has run; called before another layer and after the pass."""
        layer, self._current = self._current, None
        if layer is None:
            return
        cached = self._layer(layer)
        states = {f"{_CONV}{i}": tensor for i, tensor in cached.conv_states.items() if tensor is not None}
        states |= {
            f"{_RECURRENT}{i}": tensor for i, tensor in cached.recurrent_states.items() if tensor is not None
        }
        cached.conv_states = dict.fromkeys(cached.conv_states)
        cached.recurrent_states = dict.fromkeys(cached.recurrent_states)
        if self._states is not None:
            self._states.store(self._numbers[layer], states)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """See `Cache.update`; return the arguments as they are."""
        if self._current != layer_idx:
            self.finish()
        self.attending = layer_idx
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._enter(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._enter(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._enter(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._enter(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return a layer's recurrent state, under MiniMax's name."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is None:
            raise UnsupportedModel("the model asks for the state of no layer in particular")
        self._enter(layer_idx)
        return super().has_previous_state(layer_idx, state_idx)

    def _enter(self, layer: int) -> None:
        if self._current == layer:
            return
        self.finish()
        self._current = layer
        cached = self._layer(layer)
        before = None if self._states is None else self._states.load(self._numbers[layer])
        for name, state in (before or {}).items():
            kind, _, index = name.rpartition("_")
            i = int(index)
            if f"{kind}_" == _CONV:
                cached.conv_states[i], cached.is_conv_states_initialized[i] = state, True
                cached.conv_kernel_size[i] = state.shape[-1]
                cached.dtype, cached.device = state.dtype, state.device
            else:
                cached.recurrent_states[i], cached.is_recurrent_states_initialized[i] = state, True
            cached.has_previous_state[i] = True

    def _layer(self, layer: int) -> Any:
        cached: Any = self.layers[layer]
        assert isinstance(cached, LinearAttentionCacheLayerMixin), (layer, type(cached).__name__)
        return cached
