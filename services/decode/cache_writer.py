"""Writes the layers of one sequence's compressed KV, as their blocks arrive, into its range of the arena."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kvferry.shared.cache.arena import ArenaCopier, SequenceLayout
from kvferry.shared.cache.delta import DeltaLayer, PinnedRows
from kvferry.shared.compression.formats import compacted
from kvferry.shared.compression.formats.drafted import begin_with_draft, drafted_tokens, split
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerCache, LayerFormat
from kvferry.shared.compression.interface import TensorSpec
from kvferry.shared.compression.plan import STATE_FORMAT
from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.wire.messages import BlockHeader, LayerHeader


class CacheWriter:
    """Writes one sequence's layers, in order.

        begin_layer ──► write ... write ──last byte──► the layer is checked and opened ──► begin_layer ...

    Args:
        buffer: the sequence's arena bytes, uint8 `[layout.size_bytes or more]`.
        copier: shared with the other transfers of the receiver's thread.
        pinned: rows of the session's last turns that are not sent again; None if everything is sent.
        most_drafted: tokens whose rows may come with the prompt's.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        buffer: Tensor,
        copier: ArenaCopier,
        *,
        pinned: PinnedRows | None = None,
        most_drafted: int = 0,
    ) -> None:
        self._layout = layout
        self._most_drafted = most_drafted
        self._num_drafted = dict[int, int]()
        self._receiving: LayerFormat | DeltaLayer
        """Of the layer that has begun."""
        self._buffer = buffer
        self._copier = copier
        self._pinned = pinned
        self._caches: list[LayerCache] = []
        self._regions: Mapping[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._drafted: dict[str, Tensor] = {}
        self._pieces: list[Tensor] = []
        self._missing_bytes = 0

    def begin_layer(self, header: LayerHeader) -> None:
        """Start the next layer.

        Raises:
            TransferFailed, ProtocolMismatch: it is not the next layer, or its tensors are not those of its
                format.
        """
        layer = len(self._caches)
        if header.layer != layer or layer == len(self._layout.layers) or self._missing_bytes:
            raise TransferFailed(f"layer {header.layer} was sent; layer {layer} is expected", reason="order")
        specs = {
            tensor.name: TensorSpec(shape=tensor.shape, dtype=getattr(torch, tensor.dtype))
            for tensor in header.tensors
        }
        try:
            place = self._layout.layers[layer]
            self._regions = place.views(self._buffer)
            self._receiving = place.format
            if (pinned := self._pinned) is not None:
                rows = [layers[layer] for layers in pinned.layers]
                self._receiving = DeltaLayer(place.format, layer, pinned.chain, rows)
            own, drafted = split(specs)
            has_rows = place.format.name != STATE_FORMAT
            count = drafted_tokens(place.format, drafted, most=self._most_drafted if has_rows else 0)
            if has_rows:
                self._num_drafted[layer] = count
            self._tensors = self._receiving.receive(own, self._regions)
            self._drafted = {
                name: torch.empty(spec.shape, dtype=spec.dtype, device=self._buffer.device)
                for name, spec in drafted.items()
            }
        except InvalidTensors as error:
            raise layer_failed(layer, error) from error
        self._pieces = [_as_bytes(tensor) for tensor in (*self._tensors.values(), *self._drafted.values())]
        self._missing_bytes = sum([spec.size_bytes for spec in specs.values()])
        self._open_when_complete()

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Write one block of the current layer.

        Raises: TransferFailed, ProtocolMismatch: the layer is now complete, and its content is invalid.
        """
        pieces, done = self._pieces[header.tensor], 0
        self._copier.load(payload)
        while done < payload.nbytes:
            piece, within = divmod(header.offset + done, pieces.shape[1])
            count = min(payload.nbytes - done, pieces.shape[1] - within)
            self._copier.copy(pieces[piece, within : within + count], done)
            done += count
        self._missing_bytes -= done
        self._open_when_complete()

    def finish(self, num_drafted: int) -> tuple[LayerCache, ...]:
        """Return all layers, once the results of the device's checks are known.

        Args: num_drafted: tokens of which each layer with rows must have come with a draft's.
        Raises: TransferFailed: a layer is missing or incomplete, or its content is invalid.
        """
        if len(self._caches) != len(self._layout.layers):
            raise TransferFailed(
                f"layer {len(self._caches)} is incomplete: {self._missing_bytes} bytes are missing",
                reason="incomplete",
            )
        if counts := {*self._num_drafted.values()} - {num_drafted}:
            raise TransferFailed(
                f"layers came with the rows of {sorted(counts)} tokens of a draft that has {num_drafted}",
                reason="draft",
            )
        for layer, cache in enumerate(self._caches):
            try:
                cache.settle()
            except InvalidTensors as error:
                raise layer_failed(layer, error) from error
        return tuple(self._caches)

    def _open_when_complete(self) -> None:
        if self._missing_bytes:
            return
        layer = len(self._caches)
        try:
            cache = self._receiving.open(self._regions, self._tensors)
            if cache.format.segments is not None:
                cache = compacted(cache)
            self._layout.layers[layer].format.check_finite(self._tensors)
            if self._drafted:
                begin_with_draft(cache, self._drafted)
        except InvalidTensors as error:
            raise layer_failed(layer, error) from error
        self._caches.append(cache)
        self._tensors, self._drafted, self._pieces = {}, {}, []


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as uint8 `[pieces, bytes]` with contiguous pieces: one, or one per KV head."""
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)[None]
    size = (tensor.shape[0], math.prod(tensor.shape[1:]))
    return tensor.as_strided(size, (tensor.stride(0), 1)).view(torch.uint8)


def layer_failed(layer: int, error: InvalidTensors) -> TransferFailed:
    """Return the error with which a transfer ends if a layer has invalid tensors."""
    kind = ProtocolMismatch if error.reason == "layout_version" else TransferFailed
    return kind(f"layer {layer}: {error}", reason=error.reason)
