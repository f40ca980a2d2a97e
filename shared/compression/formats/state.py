"""State: a layer's recurrent, linear-attention or convolution state; shipped whole, whatever the method.

    prefill   the state after the prompt ──► wire ──► regions of the arena
    decode    every step reads the state of the last one and overwrites it
    history   a checkpoint at the end of the prompt, and one at the end of the turn

It has the same size after any number of tokens, and can be continued from those tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.formats.interface import (
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Specs,
    Tensors,
    on_host,
)
from kvferry.shared.compression.interface import LayerInputs, TensorSpec
from kvferry.shared.compression.plan import STATE_FORMAT
from kvferry.shared.model.spec import TORCH_DTYPES

_MAX_STATES = 8
"""Convolution states, or recurrent ones, of one layer."""


@dataclass(frozen=True, kw_only=True)
class State(LayerFormat):
    """The tensors of `LayerShape.state`. A layer of the model with neither rows nor a state has none."""

    name: ClassVar[str] = STATE_FORMAT
    heads_apart: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, str]] = {
        f"{kind}_{i}": "state" for kind in ("conv", "recurrent") for i in range(_MAX_STATES)
    }
    finite: ClassVar[tuple[str, ...]] = tuple(kinds)
    scored: ClassVar[bool | None] = False

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        raise NotImplementedError("a state is shipped as it is")

    def tensors(self) -> Specs:
        return {
            spec.name: TensorSpec(shape=spec.shape, dtype=TORCH_DTYPES[spec.dtype])
            for spec in self.shape.state
        }

    def placed(self, num_new: int) -> Specs:
        return self.tensors()

    def positions_by_head(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        return ()

    def open(self, regions: Tensors, tensors: Tensors) -> StateLayer:
        return StateLayer(self, regions)

    def naive(self, tensors: Tensors) -> NaiveState:
        return NaiveState(tensors)


class StateLayer(LayerCache):
    """A state in the arena: `regions`, which each decode step overwrites."""

    format: State

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        raise NotImplementedError("a layer with a state does not attend")

    def returned(self, num_appended: int) -> Tensors:
        return {name: on_host(tensor) for name, tensor in self.regions.items()}


class NaiveState(NaiveLayer):
    """The oracle's state. Attributes: state: its tensors, of one sequence."""

    def __init__(self, state: Tensors) -> None:
        self.state = state

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        raise NotImplementedError("a layer with a state does not attend")


def stacked(states: Mapping[int, Tensors], num_slots: int) -> dict[str, Tensor]:
    """Stack the states of several sequences as one batch.

    Args: states: by slot, of one layer; at least one.
    Returns: `[num_slots, ...]`, zero in empty slots.
    """
    first = next(iter(states.values()))
    empty = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    slots = [states.get(slot, empty) for slot in range(num_slots)]
    return {name: torch.stack([state[name] for state in slots]) for name in first}


def unstack(batch: Tensors, targets: Mapping[int, Tensors]) -> None:
    """Write the states of a batch to those of its sequences. Args: targets: by slot."""
    for name, tensor in batch.items():
        for slot, target in targets.items():
            target[name].copy_(tensor[slot])
