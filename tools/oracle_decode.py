"""The oracle's decode side: each layer attends with the plain code of its format (`LayerFormat.naive`).

There is no arena, no batching and no incremental tensor; whatever can be recomputed at a step is recomputed.
Private to `oracle.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.formats import make_formats, naive_layer
from kvferry.shared.compression.formats.drafted import append_naively
from kvferry.shared.compression.formats.interface import NaiveLayer, Tensors
from kvferry.shared.compression.formats.state import NaiveState
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.model.spec import ModelSpec

LayerKV = tuple[Tensor, Tensor]
"""K (post-RoPE) and V of one layer, `[H_kv, n, D]`."""


class OracleDecode:
    """Implements `DecodeAttention` and `LayerStates` for one sequence.

    Args: compressed: the compressed prompt of each layer, or its state.
    Attributes: generated: for each layer, K and V `[H_kv, 1, D]` of each new token as the model made them.
    """

    def __init__(self, spec: ModelSpec, resolved: ResolvedPlan, compressed: tuple[Tensors, ...]) -> None:
        formats = make_formats(spec, resolved)
        self._layers: list[NaiveLayer] = [
            naive_layer(fmt, tensors) for fmt, tensors in zip(formats, compressed, strict=True)
        ]
        self.generated: list[list[LayerKV]] = [[] for _ in formats]

    def fork(self) -> OracleDecode:
        """Return an independent copy: appending to one does not change the other."""
        other = OracleDecode.__new__(OracleDecode)
        other._layers = [layer.fork() for layer in self._layers]
        other.generated = [list(rows) for rows in self.generated]
        return other

    def continuing(self, other: OracleDecode) -> OracleDecode:
        """Return a copy with the new rows of another one."""
        found = self.fork()
        for layer, later in zip(found._layers, other._layers, strict=True):
            layer.new_rows = later.new_rows
        found.generated = [list(rows) for rows in other.generated]
        return found

    def append(self, layers: Sequence[LayerInputs], number: int, states: Mapping[int, Tensors]) -> None:
        """Append a token of a draft. Args: layers: with the draft; number: of the token; states: after it."""
        for inputs in layers:
            assert inputs.ahead is not None, "there is a draft"
            append_naively(self._layers[inputs.layer], inputs.ahead, number)
            row = inputs.ahead.keys[:, number : number + 1], inputs.ahead.values[:, number : number + 1]
            self.generated[inputs.layer].append(row)
        for layer, state in states.items():
            self._layers[layer] = NaiveState(state)

    @property
    def states(self) -> dict[int, Tensors]:
        """The state of each layer that has one, after the tokens so far."""
        return {i: layer.state for i, layer in enumerate(self._layers) if isinstance(layer, NaiveState)}

    def load(self, layer: int) -> dict[str, Tensor]:
        """See `LayerStates.load`."""
        return {name: tensor[None].clone() for name, tensor in self.states[layer].items()}

    def store(self, layer: int, state: Tensors) -> None:
        """See `LayerStates.store`."""
        self._layers[layer] = NaiveState({name: tensor[0] for name, tensor in state.items()})

    def densely(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
        """Append the row and attend to every retained row, as an evicting format does at every step."""
        return self._attend(layer, queries, keys, values, scaling, dense=True)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
        return self._attend(layer, queries, keys, values, scaling, dense=False)

    def _attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling, *, dense: bool
    ) -> Tensor:
        key, value = keys[0].clone(), values[0].clone()
        self.generated[layer].append((key[:, None], value[:, None]))
        naive: NaiveLayer = self._layers[layer]
        return naive.attend(queries[0], key, value, scaling=scaling, dense=dense)[None]
