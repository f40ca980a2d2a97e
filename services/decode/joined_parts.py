"""Puts a prompt's layers together that several ranks of prefill send, each some of this process's KV heads.

Place in the request's path: between the block server's thread and the writer of the heads together.

    part 0 ──layer──┐
    part 1 ──layer──┼──► once all have it: `LayerFormat.joined` ──► writer, as if it had come from one sender
    ...             ┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvferry.shared.cache.arena import SequenceLayout
from kvferry.shared.cache.delta import delta_joined
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerCache, Tensors
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.errors import MalformedMessage
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    BlockHeader,
    LayerHeader,
    Manifest,
    TensorHeader,
    TransferKey,
    part_key,
)

if TYPE_CHECKING:
    from kvferry.services.decode.receiver import CacheWriter


def whole_keys(manifest: Manifest, spec: ModelSpec) -> Iterator[tuple[int, TransferKey]]:
    """What a transfer may be: the number of a part, and the key of the transfer of all heads of `spec`."""
    size = manifest.num_kv_heads
    for number in range(max(1, spec.num_kv_heads // size)):
        yield number, part_key(manifest.key, -number * size)


def spec_of_part(manifest: Manifest, spec: ModelSpec) -> ModelSpec:
    """The spec of a transfer's heads, if those of `spec` come in several; else `spec`."""
    number, left = divmod(spec.num_kv_heads, manifest.num_kv_heads)
    if left or number < 2:
        return spec
    return replace(spec, num_heads=spec.num_heads // number, num_kv_heads=manifest.num_kv_heads)


class JoinedParts:
    """The parts of one transfer. Used by one thread.

    Args:
        manifest: of the part that began first; the others' differ from it in their keys alone.
        spec: of the heads together; plan: by which they are compressed.
        writer: of the heads together.
        num_ranks: in how many such transfers the model's heads come.
        is_delta: whether rows are left out.

    Attributes: part_formats: of a part's layers; is_delta: as given.
    """

    def __init__(
        self,
        manifest: Manifest,
        spec: ModelSpec,
        plan: ResolvedPlan,
        writer: CacheWriter,
        *,
        num_ranks: int,
        is_delta: bool,
    ) -> None:
        self._manifest = manifest
        self._writer = writer
        self.is_delta = is_delta
        # no new tokens: nothing is generated where a layer is put together
        plan = replace(plan, max_new_tokens=1)
        self._num_parts = spec.num_kv_heads // manifest.num_kv_heads
        self._formats = make_formats(spec, plan, num_parts=num_ranks)
        self.part_formats = make_formats(
            spec_of_part(manifest, spec), plan, num_parts=num_ranks * self._num_parts
        )
        self._opened: set[int] = set()
        self._ended: set[int] = set()
        self._waiting: dict[int, dict[int, Tensors]] = {}

    def open(self, number: int, manifest: Manifest) -> None:
        """A part has begun. Raises: MalformedMessage: it is not one of these, or has begun before."""
        expected = replace(self._manifest, key=manifest.key)
        if number in self._opened or manifest != expected:
            raise MalformedMessage(
                f"part {number} of transfer {manifest.key.transfer_id:#x} was sent twice, or its manifest is "
                "another one than that of the part before",
                reason="parts",
            )
        self._opened.add(number)

    def end(self, number: int) -> bool:
        """A part has all layers. Returns: whether it was the last."""
        self._ended.add(number)
        return len(self._ended) == self._num_parts

    def finish(self) -> tuple[LayerCache, ...]:
        """See `CacheWriter.finish`."""
        return self._writer.finish()

    @property
    def layout(self) -> SequenceLayout:
        """See `CacheWriter.layout`."""
        return self._writer.layout

    def add(self, number: int, layer: int, tensors: Tensors) -> None:
        """A part's layer is there. Raises: as `CacheWriter.write`."""
        parts = self._waiting.setdefault(layer, {})
        parts[number] = tensors
        if len(parts) < self._num_parts:
            return
        del self._waiting[layer]
        in_order = [parts[its] for its in range(self._num_parts)]
        join = delta_joined if self.is_delta else self._formats[layer].joined
        self._write(layer, join(in_order))

    def _write(self, layer: int, tensors: Tensors) -> None:
        headers = [
            TensorHeader(name=name, dtype=str(its.dtype).removeprefix("torch."), shape=tuple(its.shape))
            for name, its in tensors.items()
        ]
        self._writer.begin_layer(LayerHeader(layer=layer, tensors=tuple(headers)))
        for number, tensor in enumerate(tensors.values()):
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            for offset in range(0, len(flat), MAX_PAYLOAD_BYTES):
                header = BlockHeader(
                    key=self._manifest.key,
                    sequence=0,
                    layer=layer,
                    tensor=number,
                    tensor_bytes=len(flat),
                    offset=offset,
                )
                self._writer.write(header, flat[offset : offset + MAX_PAYLOAD_BYTES].numpy().data)
