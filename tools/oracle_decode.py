"""The oracle's decode side: each layer attends with the plain code of its format (`LayerFormat.naive`).

There is no arena, no batching and no incremental tensor; whatever can be recomputed at a step is recomputed.
Private to `oracle.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, scale_of
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.compacting import Segments
from kvferry.shared.compression.formats.interface import LayerFormat, NaiveLayer, Tensors
from kvferry.shared.compression.formats.state import NaiveState
from kvferry.shared.compression.interface import Ahead, LayerInputs
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
            _append(self._layers[inputs.layer], inputs.ahead, number)
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


class NaiveCompacting(NaiveLayer):
    """The inner format's naive layer, given all new rows again whenever a segment is compacted."""

    def __init__(self, segments: Segments, inner: NaiveLayer) -> None:
        self._segments = segments
        self._inner = inner
        self._selected: list[tuple[Tensor, Tensor]] = []
        self._current: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        if len(self._current) == self._segments.segment_tokens:
            self._compact(scale_of(scaling))
        self._current = [*self._current, (queries.clone(), key, value)]
        return self._inner.attend(queries, key, value, scaling=scaling, dense=dense)

    def append(self, queries: Tensor, key: Tensor, value: Tensor) -> None:
        """Append a row to the first segment, which has room, without attention."""
        self._current = [*self._current, (queries, key, value)]
        self._inner.new_rows += ((key, value),)

    def _compact(self, scaling: float) -> None:
        queries, keys, values = (torch.stack(tensors, -2) for tensors in zip(*self._current, strict=True))
        observed = queries[:, :, queries.shape[2] - self._segments.window :].contiguous()
        stay = self._segments.compact(self._inner, observed, keys, values, scaling=scaling)
        self._selected = [*self._selected, stay]
        self._current = []
        keys, values = (torch.cat(parts, 1) for parts in zip(*self._selected, strict=True))
        self._inner.new_rows = tuple(zip(keys.unbind(1), values.unbind(1), strict=True))

    def fork(self) -> NaiveCompacting:
        other = NaiveCompacting(self._segments, self._inner.fork())
        other._selected, other._current = self._selected, self._current
        return other


def naive_layer(fmt: LayerFormat, tensors: Tensors) -> NaiveLayer:
    """Make the layer of `LayerFormat.naive`, with its new rows compacted as the format says."""
    inner = fmt.naive(tensors)
    return inner if fmt.segments is None else NaiveCompacting(fmt.segments, inner)


def _append(layer: NaiveLayer, ahead: Ahead, number: int) -> None:
    """Append the row of a draft's next token. Args: number: that token's index."""
    row = ahead.keys[:, number], ahead.values[:, number]
    if isinstance(layer, NaiveCompacting):
        layer.append(ahead.queries[:, :, number], *row)
    else:
        layer.new_rows += (row,)
