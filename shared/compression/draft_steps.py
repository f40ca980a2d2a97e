"""A draft's tokens as decode steps of one sequence, over the prompt's K and V as prefill has left them.

Called by `draft.py`, where one process runs the model. K and V of the prompt are copied once, to memory with
room for the draft's rows behind them; no token copies them again, and nothing waits for the device:

    made: copy ──run──► every layer: append a row, attend ──run──► every layer: append a row, attend ──► ...

A layer whose K and V wait on the host has no such memory: each token brings them to one that these layers
share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import (
    BatchShape,
    CachedRows,
    Errors,
    NewToken,
    NewTokens,
    SlotBatch,
    WindowRows,
)
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.dense_decode.batch import DenseBatch, WindowBatch
from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.interface import Ahead, LayerInputs
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import Heads, LayerSpec

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import Tensors


class DraftSteps:
    """Runs a draft's tokens. Implements `DecodeAttention` and `LayerStates` for them.

    Attributes: states: after the tokens so far, by layer, without a batch's dimension.

    Args:
        layers, states: as of `run_draft`, which are not changed.
        room: tokens at most.
    """

    def __init__(
        self,
        model: LanguageModel,
        layers: Sequence[LayerInputs],
        states: Mapping[int, Tensors],
        *,
        room: int,
    ) -> None:
        self._model = model
        self._on_host = {inputs.layer: inputs for inputs in layers if inputs.keys.device != model.device}
        self._new: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {inputs.layer: [] for inputs in layers}
        """Queries `[H_kv, G, D]`, keys and values `[H_kv, D]` of each token, by layer."""
        self._errors: Errors = {}
        self._is_first = True
        self._active = torch.ones(1, dtype=torch.int64, device=model.device)
        self._position = self._active * layers[0].keys.shape[1]
        self.states = dict(states)
        base, self._rows = self._copied(layers, room)
        self._batches = [] if model.spec.latent_dim else self._made_batches(base)
        self._batch_of = {
            layer: (batch, batch.scratch(1) if batch.is_launched else None)
            for batch, members in self._batches
            for layer in members
        }

    def run(self, token_id: int) -> Tensor:
        """Run the next token. Returns: float32 logits `[V]`. Raises: whatever an attention raises."""
        if not self._is_first:
            for batch, _ in self._batches:
                batch.advance(self._active)
            self._position = self._position + 1
        self._is_first = False
        token = torch.full_like(self._position, token_id)  # made on the device: nothing is copied there
        return self._model.decode(token, self._position, attention=self, states=self)[0]

    def ahead(self, layer: int) -> Ahead | None:
        """Return a layer's rows and queries of the tokens so far; None if there is none."""
        if not self._new[layer]:
            return None
        queries, keys, values = zip(*self._new[layer], strict=True)
        return Ahead(
            queries=torch.stack(queries, 2), keys=torch.stack(keys, 1), values=torch.stack(values, 1)
        )

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
        """See `DecodeAttention.__call__`; B is 1."""
        rows, new = self._rows[layer], self._new[layer]
        if layer in self._on_host:
            self._bring(layer)
        position = rows.length + len(new)
        new.append((queries[0], keys[0], values[0]))
        if layer not in self._batch_of:  # of latent rows, which no batched kernel has
            seen = rows.append(NewToken(*new[-1], position, scaling))
            return dense_decode(queries[0], *seen, scaling=scaling)[None]
        batch, scratch = self._batch_of[layer]
        step = NewTokens(queries, keys, values, scaling)
        attended = batch.attend(layer, step, errors=self._errors, scratch=scratch)
        for error in self._errors.values():
            raise error
        return attended

    def load(self, layer: int) -> dict[str, Tensor]:
        """See `LayerStates.load`."""
        return {name: tensor[None].clone() for name, tensor in self.states[layer].items()}

    def store(self, layer: int, state: Tensors) -> None:
        """See `LayerStates.store`."""
        self.states[layer] = {name: tensor[0].clone() for name, tensor in state.items()}

    def _copied(self, layers: Sequence[LayerInputs], room: int) -> tuple[Tensor, dict[int, CachedRows]]:
        """Copy the rows that later tokens attend to. Returns: a buffer that offsets may count from, and each
        layer's rows. Those of the layers that wait on the host share memory, and are not copied yet."""
        spec = self._model.spec
        sizes = {inputs.layer: _num_elements(inputs, spec.layer(inputs.layer), room) for inputs in layers}
        own = [size for layer, size in sizes.items() if layer not in self._on_host]
        shared = max([sizes[layer] for layer in self._on_host], default=0)
        base, parts = _memory([*own, shared], layers[0].keys.dtype, self._model.device)
        rows, free = {}, iter(parts)
        for inputs in layers:
            part = parts[-1] if inputs.layer in self._on_host else next(free)
            rows[inputs.layer] = _rows_in(part, inputs, spec.layer(inputs.layer), room)
            if inputs.layer not in self._on_host:
                self._copy(inputs, rows[inputs.layer])
        return base, rows

    def _bring(self, layer: int) -> None:
        """Bring a layer from the host, and the rows of the draft's tokens so far."""
        rows, ahead = self._rows[layer], self.ahead(layer)
        self._copy(self._on_host[layer], rows)
        if ahead is not None:
            behind = slice(rows.length, rows.length + ahead.keys.shape[1])
            rows.keys[:, behind], rows.values[:, behind] = ahead.keys, ahead.values

    def _copy(self, inputs: LayerInputs, rows: CachedRows) -> None:
        """Copy the last rows of a prompt's layer. Of latent rows values are a part of the keys."""
        rows.keys[:, : rows.length].copy_(inputs.keys[:, -rows.length :])
        if not self._model.spec.latent_dim:
            rows.values[:, : rows.length].copy_(inputs.values[:, -rows.length :])

    def _made_batches(self, base: Tensor) -> list[tuple[SlotBatch[Any, Any], Mapping[int, CachedRows]]]:
        """Make a batch of one slot for the layers with equal heads and rows of one kind, and place these."""
        spec, made = self._model.spec, list[tuple[SlotBatch[Any, Any], Mapping[int, CachedRows]]]()
        by_kind: dict[tuple[Heads, bool], dict[int, CachedRows]] = {}
        for layer, rows in self._rows.items():
            by_kind.setdefault((spec.heads(layer), isinstance(rows, WindowRows)), {})[layer] = rows
        for (heads, has_windows), members in by_kind.items():
            shape = BatchShape(
                num_layers=spec.num_layers,
                num_slots=1,
                num_kv_heads=heads.num_kv_heads,
                group_size=heads.group_size,
                head_dim=heads.head_dim,
                dtype=base.dtype,
                device=base.device,
            )
            batch = WindowBatch(shape, base) if has_windows else DenseBatch(shape, base)
            batch.place(0, members)
            made.append((batch, members))
        return made


def _num_elements(inputs: LayerInputs, layer: LayerSpec, room: int) -> int:
    """Return the elements of a layer's rows with room for so many more."""
    num_kv_heads, num_tokens, head_dim = inputs.keys.shape
    return num_kv_heads * (layer.num_needed(num_tokens) + room) * head_dim * (1 if layer.latent_dim else 2)


def _rows_in(part: Tensor, inputs: LayerInputs, layer: LayerSpec, room: int) -> CachedRows:
    """Return a layer's rows as views of one-dimensional memory, nothing copied."""
    num_kv_heads, num_tokens, head_dim = inputs.keys.shape
    length = layer.num_needed(num_tokens)
    shape = (num_kv_heads, length + room, head_dim)
    keys, *others = part[: _num_elements(inputs, layer, room)].view(-1, *shape).unbind(0)
    values = keys[..., : layer.latent_dim] if layer.latent_dim else others[0]
    if not layer.window:
        return CachedRows(keys=keys, values=values, length=length)
    before = num_tokens - length if layer.is_chunked else None
    return WindowRows(keys=keys, values=values, length=length, window=layer.window, rows_before=before)


def _memory(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return a buffer that descriptors count from, and memory of so many elements each.

    On a CPU it is all one buffer, in which C code looks for rows. On a GPU it is several, which find room
    where one of them all might not.
    """
    if device.type == "cpu":
        base = torch.empty(sum(sizes), dtype=dtype)
        return base, list(torch.split(base, list(sizes)))
    parts = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
    return parts[0], parts
