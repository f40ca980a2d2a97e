"""Writes the layers of one prompt's compressed KV from the wire to the arena, in order.

Place in the request's path: between the block sinks (`receiver.py`, `part_receiver.py`) and the arena.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvferry.services.decode.sequence import PinnedRows
from kvferry.shared.cache.arena import ArrivingLayout, LayerLayout, SequenceLayout
from kvferry.shared.cache.delta import DeltaLayer
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerCache, LayerFormat, Specs
from kvferry.shared.compression.interface import TensorSpec
from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.wire.messages import BlockHeader, LayerHeader


class ArenaCopier:
    """Copies payloads from the transport's memory into the arena, on CUDA through pinned memory.

    Used only by the receiver's thread.
    """

    def __init__(self, max_payload_bytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._pinned = torch.empty(max_payload_bytes, dtype=torch.uint8, pin_memory=True) if on_cuda else None
        self._payload = np.empty(0, np.uint8)

    def load(self, payload: memoryview) -> None:
        """Set the payload that `copy` reads from until the next call."""
        self._payload = np.frombuffer(payload, np.uint8)
        if self._pinned is not None:
            self._pinned.numpy()[: payload.nbytes] = self._payload

    def copy(self, target: Tensor, offset: int) -> None:
        """Fill `target`, uint8 `[n]` in the arena, with the payload's bytes starting at `offset`."""
        end = offset + target.numel()
        if self._pinned is not None:
            target.copy_(self._pinned[offset:end])
        else:
            # Not `copy_`: torch would split the block among its threads and wait for busy cores.
            target.numpy()[:] = self._payload[offset:end]


class CacheWriter:
    """Writes one sequence's layers, in order.

        begin_layer ──► write ... write ──last byte──► the layer is checked and opened ──► begin_layer ...

    Args:
        buffer: the sequence's arena bytes, uint8 `[layout.size_bytes or more]`.
        copier: shared with the other transfers of the receiver's thread.
        pinned: rows of the session's last turns that are not sent again; None if everything is sent.
    """

    def __init__(
        self, layout: SequenceLayout, buffer: Tensor, copier: ArenaCopier, *, pinned: PinnedRows | None = None
    ) -> None:
        self._arriving = ArrivingLayout(layout)
        self._all_layers = len(layout.layers)
        self._current: LayerLayout | None = None
        self._buffer = buffer
        self._copier = copier
        self._pinned = pinned
        self._caches: list[LayerCache] = []
        self._num_layers = 0
        self._regions: Mapping[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._pieces: list[Tensor] = []
        self._missing_bytes = 0

    def begin_layer(self, header: LayerHeader) -> None:
        """Start the next layer.

        Raises:
            TransferFailed, ProtocolMismatch: it is not the next layer, or its tensors are not those of its
                format.
        """
        layer = self._num_layers
        if header.layer != layer or layer == self._all_layers or self._missing_bytes:
            raise TransferFailed(f"layer {header.layer} was sent; layer {layer} is expected", reason="order")
        specs = {
            its.name: TensorSpec(shape=its.shape, dtype=getattr(torch, its.dtype)) for its in header.tensors
        }
        try:
            self._current = self._place(specs)
            self._regions = self._current.views(self._buffer)
            self._tensors = self._format(layer).receive(specs, self._regions)
        except InvalidTensors as error:
            raise layer_failed(layer, error) from error
        self._pieces = [_as_bytes(its) for its in self._tensors.values()]
        self._missing_bytes = sum([its.size_bytes for its in specs.values()])
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

    def finish(self) -> tuple[LayerCache, ...]:
        """All layers, once what the device checks is known.

        Raises: TransferFailed: a layer is missing or incomplete, or its content is invalid.
        """
        self._check_complete()
        for layer, cache in enumerate(self._caches):
            if not cache.settles:
                continue
            try:
                cache.settle()
            except InvalidTensors as error:
                raise layer_failed(layer, error) from error
        return tuple(self._caches)

    def _check_complete(self) -> None:
        if self._num_layers != self._all_layers:
            raise TransferFailed(
                f"layer {self._num_layers} is incomplete: {self._missing_bytes} bytes are missing",
                reason="incomplete",
            )

    def _open_when_complete(self) -> None:
        if self._missing_bytes:
            return
        layer = self._num_layers
        try:
            cache = self._format(layer).open(self._regions, self._tensors)
            self._its_format.check_finite(self._tensors)
        except InvalidTensors as error:
            raise layer_failed(layer, error) from error
        self._caches.append(cache)
        self._num_layers += 1
        self._tensors, self._pieces = {}, []

    @property
    def layout(self) -> SequenceLayout:
        """What the layers take, once all have arrived."""
        return self._arriving.layout

    def _place(self, header: Specs) -> LayerLayout:
        """Where the next layer is written. Raises: InvalidTensors: it is larger than it may be."""
        return self._arriving.next(header)

    @property
    def _its_format(self) -> LayerFormat:
        """That of the layer that has begun."""
        assert self._current is not None, "no layer has begun"
        return self._current.format

    def _format(self, layer: int) -> LayerFormat | DeltaLayer:
        fmt = self._its_format
        if self._pinned is None:
            return fmt
        return DeltaLayer(fmt, layer, self._pinned.chain, [layers[layer] for layers in self._pinned.layers])


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as uint8 `[pieces, bytes]` with contiguous pieces: one, or one per KV head."""
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)[None]
    size = (tensor.shape[0], math.prod(tensor.shape[1:]))
    return tensor.as_strided(size, (tensor.stride(0), 1)).view(torch.uint8)


def layer_failed(layer: int, error: InvalidTensors) -> TransferFailed:
    """Why a transfer ends whose layer has invalid tensors."""
    kind = ProtocolMismatch if error.reason == "layout_version" else TransferFailed
    return kind(f"layer {layer}: {error}", reason=error.reason)
