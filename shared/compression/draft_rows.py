"""A prompt's K and V with room for the rows of a draft's tokens behind them.

Made by `draft_steps.py` for each prompt. K and V are copied once; no token copies them again:

    made: copy ──► every token appends a row in each layer ──► `ahead`: the rows behind the prompt's

A layer whose K and V wait on the host has no such memory: each token brings them to one that these layers
share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows, WindowRows
from kvferry.shared.compression.interface import Ahead, LayerInputs
from kvferry.shared.model.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import Tensors

_COPIED_BYTES = 8
"""Elements of this size are copied faster than smaller ones between tensors with other strides."""


class DraftRows:
    """Rows, states and queries of one prompt's draft.

    Attributes:
        base: the one-dimensional buffer that all rows are in, if that is on a CPU; else one of several.
        states: after the tokens so far, by layer, without a batch's dimension.
        on_host: the layers whose K and V wait there.
        num_tokens: of the draft so far.

    Args:
        layers, states: as of `run_draft`, which are not changed.
        device: of the rows.
        room: tokens at most.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[LayerInputs],
        states: Mapping[int, Tensors],
        device: torch.device,
        *,
        room: int,
    ) -> None:
        self._num_distinct = 1 if spec.latent_dim else 2
        """Of K and V, how many are copied: of latent rows values are a part of the keys."""
        self.states = dict(states)
        self.num_tokens = 0
        self.on_host = {inputs.layer: inputs for inputs in layers if inputs.keys.device != device}
        self._num_prompt = layers[0].keys.shape[1]
        self._of_host: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in self.on_host}
        """K and V `[H_kv, D]` of each token, in the layers that share memory."""
        self._queries: list[Mapping[int, Tensor]] = []
        sizes = {inputs.layer: _num_elements(inputs, spec.layer(inputs.layer), room) for inputs in layers}
        own = [size for layer, size in sizes.items() if layer not in self.on_host]
        shared = max([sizes[layer] for layer in self.on_host], default=0)
        self.base, parts = _memory([*own, shared], layers[0].keys.dtype, device)
        self._rows, free = dict[int, CachedRows](), iter(parts)
        for inputs in layers:
            part = parts[-1] if inputs.layer in self.on_host else next(free)
            self._rows[inputs.layer] = _rows_in(part, inputs, spec.layer(inputs.layer), room)
            if inputs.layer not in self.on_host:
                self._copy(inputs)

    @property
    def position(self) -> int:
        """The next token's."""
        return self._num_prompt + self.num_tokens

    def rows(self, layer: int) -> CachedRows:
        """Return a layer's rows, of which those of the prompt and of the draft so far are in use."""
        rows = self._rows[layer]
        return replace(rows, length=rows.length + self.num_tokens)

    def bring(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Bring a layer from the host, if it waits there, before the next token's row is appended.

        Args: keys, values: `[H_kv, D]`, that row.
        """
        if layer not in self.on_host:
            return
        self._copy(self.on_host[layer])
        rows, new = self._rows[layer], self._of_host[layer]
        for at, row in enumerate(new, rows.length):
            rows.keys[:, at], rows.values[:, at] = row
        new.append((keys.clone(), values.clone()))

    def count(self, queries: Mapping[int, Tensor]) -> None:
        """Count a token whose rows have been appended. Args: queries: `[H_kv, G, D]` by layer, to be kept."""
        self._queries.append(queries)
        self.num_tokens += 1

    def ahead(self, layer: int) -> Ahead | None:
        """Return a layer's rows and queries of the tokens so far, copied; None if there is none."""
        if not self.num_tokens:
            return None
        if layer in self.on_host:
            keys, values = [torch.stack(rows, 1) for rows in zip(*self._of_host[layer], strict=True)]
        else:
            rows = self._rows[layer]
            both = [each.narrow(1, rows.length, self.num_tokens) for each in (rows.keys, rows.values)]
            keys, values = [each.clone(memory_format=torch.contiguous_format) for each in both]
        queries = torch.stack([by_layer[layer] for by_layer in self._queries], 2)
        return Ahead(queries=queries, keys=keys, values=values)

    def _copy(self, inputs: LayerInputs) -> None:
        """Copy the last rows of a prompt's layer."""
        rows = self._rows[inputs.layer]
        pairs = ((rows.keys, inputs.keys), (rows.values, inputs.values))
        for target, source in pairs[: self._num_distinct]:
            target, source = target[:, : rows.length], source[:, -rows.length :]
            if _is_wide(target) and _is_wide(source):
                target, source = target.view(torch.int64), source.view(torch.int64)
            target.copy_(source)


def _is_wide(rows: Tensor) -> bool:
    """Return whether the elements of `[H_kv, n, D]` can be taken `_COPIED_BYTES` at a time."""
    *strides, last = rows.stride()
    count = _COPIED_BYTES // rows.element_size()
    return last == 1 and not any(
        number % count for number in (*strides, rows.shape[2], rows.storage_offset())
    )


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
    """Return a buffer that descriptors may count from, and memory of so many elements each.

    On a CPU it is all one buffer, in which C code looks for rows. On a GPU it is several, which find room
    where one of them all might not.
    """
    if device.type == "cpu":
        base = torch.empty(sum(sizes), dtype=dtype)
        return base, list(torch.split(base, list(sizes)))
    parts = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
    return parts[0], parts
