"""Checkpoints: the states of a model's layers after some tokens of a session.

A state can not be cut at a token. A session of a model with states is therefore continued from the end of a
prompt or of a turn, where its record has a checkpoint. Checkpoints are immutable and shared as segments are;
locking and accounting are the store's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

LayerState = Mapping[str, Tensor]
"""One layer's state: the tensors of `LayerSpec.state` on the host."""
MAX_TURN_ENDS = 8
"""Turns of a session at whose end it can be continued; states may be large."""


class States:
    """The states of all layers that have one, after the same tokens. Immutable.

    Attributes:
        size_bytes: host memory in use while anything names them.
        references: how many records and turns name them. Guarded by the store's lock.
    """

    def __init__(self, layers: Mapping[int, LayerState]) -> None:
        """Hold these states. Args: layers: by layer of the model; tensors on the host that nobody changes."""
        self.layers = layers
        self.size_bytes = sum(tensor.nbytes for layer in layers.values() for tensor in layer.values())
        self.references = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The states after the first `num_tokens` tokens of a record. `ends_turn`: not only a prompt."""

    num_tokens: int
    states: States
    ends_turn: bool


class _Placed(Protocol):
    @property
    def num_tokens(self) -> int: ...

    @property
    def ends_turn(self) -> bool: ...


AnyCheckpoint = TypeVar("AnyCheckpoint", bound=_Placed)


def longest(checkpoints: Iterable[_Placed], limit: int) -> int:
    """Return the most tokens, at most `limit`, after which there is a checkpoint; 0 if there is none."""
    return max(
        (checkpoint.num_tokens for checkpoint in checkpoints if checkpoint.num_tokens <= limit), default=0
    )


def thinned(checkpoints: Iterable[AnyCheckpoint], *, num_exact: int = 0) -> tuple[AnyCheckpoint, ...]:
    """Return those that a record keeps: the ends of the last turns, of the last prompt, and the last one
    among the first `num_exact` tokens, from which other sessions may continue."""
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.num_tokens)
    turns = [checkpoint for checkpoint in ordered if checkpoint.ends_turn][-MAX_TURN_ENDS:]
    prompts = [checkpoint for checkpoint in ordered if not checkpoint.ends_turn][-1:]
    exact = longest(ordered, num_exact)
    chosen = {checkpoint.num_tokens for checkpoint in (*turns, *prompts)} | {exact}
    return tuple(checkpoint for checkpoint in ordered if checkpoint.num_tokens in chosen)


def host_copy(state: LayerState) -> dict[str, Tensor]:
    """Copy the tensors to host memory of their own."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in state.items()
    }
