"""Puts one transfer's blocks into a sequence's arena bytes, and completes them when the transfer ends.

Called by `receiver.py` under the sequence's lock. A section of rows is `[H_kv, n, D]` without gaps; its place
in the arena is the first n rows of each head of `[H_kv, cap, D]`. Packed layers are `packed_writer.py`'s,
layers of announced sections `stored_writer.py`'s; rows that only the wire quantises are restored here. Blocks
cut sections at any byte. Positions and state are small: they are gathered on the host.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvferry.services.decode.arena_copier import ArenaCopier
from kvferry.services.decode.delta_writer import DeltaLayerWriter
from kvferry.services.decode.packed_writer import PackedLayerWriter
from kvferry.services.decode.stored_writer import StoredLayerWriter
from kvferry.shared.cache.layout import LayerCache, SequenceLayout, view_layers
from kvferry.shared.compression.attention import packed_attention
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.representations import stored_representation, wire_representation
from kvferry.shared.compression.representations.interface import zone_bytes
from kvferry.shared.compression.representations.kivi import KiviPrompt
from kvferry.shared.errors import TransferFailed
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.held_rows import HeldSelections, Positions, all_positions
from kvferry.shared.wire.messages import BlockHeader, Section
from kvferry.shared.wire.stored_sections import layer_specs


class CacheWriter:
    """Writes one sequence's blocks.

    Args:
        buffer: the sequence's arena bytes, uint8 `[layout.size_bytes or more]`.
        copier: how bytes get there; shared with the other transfers of the receiver's thread.
        resolved: of T prompt tokens; kept positions lie in [0, T).
        held: rows of the session's last turns that do not come again; None where all come.
        held_layers: K and V of each layer that each of these selections lies in.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: SequenceLayout,
        buffer: Tensor,
        copier: ArenaCopier,
        *,
        resolved: ResolvedPlan,
        held: HeldSelections | None = None,
        held_layers: tuple[tuple[tuple[Tensor, Tensor], ...], ...] = (),
    ) -> None:
        self._held = held
        self._held_layers = held_layers
        self._delta: dict[int, DeltaLayerWriter] = {}
        self._spec = spec
        self._layout = layout
        self._buffer = buffer
        self._copier = copier
        self._num_prompt_tokens = resolved.num_prompt_tokens
        self._plans = resolved.layers
        self._specs = layer_specs(spec, resolved)
        self._index: dict[int, bytearray] = {}
        self._state: dict[int, bytearray] = {}
        self._index_checked: set[int] = set()
        num_rows = sum(layer.rows for layer in layout.layers)
        self._packed = {
            i: self._layer_writer(i, layer.packed.view(buffer))
            for i, layer in enumerate(layout.layers)
            if layer.packed is not None
        }
        self._quantised: dict[int, StoredLayerWriter] = {}
        self._missing_bytes = 2 * num_rows * spec.num_kv_heads * spec.row_bytes

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Place one block.

        Raises:
            TransferFailed: the block lies outside its section, or completes an index or a packed layer that
                is not valid.
        """
        if header.layer in self._packed:
            self._packed[header.layer].write(header, payload)
            return
        if self._specs[header.layer]:
            self._write_quantised(header, payload)
            return
        if header.section is Section.STATE:
            self._state.setdefault(header.layer, bytearray()).extend(payload)
            return
        if self._held is not None and header.section is not Section.INDEX:
            self._write_delta(self._held, header, payload)
            return
        layer = self._layout.layers[header.layer]
        row_bytes = 4 if header.section is Section.INDEX else self._spec.row_bytes
        section_bytes = layer.rows * self._spec.num_kv_heads * row_bytes
        if header.offset + payload.nbytes > section_bytes:
            raise TransferFailed(
                f"layer {header.layer} {header.section.name}: bytes {header.offset} to "
                f"{header.offset + payload.nbytes} came; the section has {section_bytes}",
                reason="size",
            )
        if header.section is Section.INDEX:
            self._write_index(header, payload, section_bytes)
            return
        region = layer.keys if header.section is Section.KEYS else layer.values
        head_bytes, stride_bytes = layer.rows * row_bytes, layer.capacity * row_bytes
        self._copier.load(payload)
        done = 0
        while done < payload.nbytes:
            head, within = divmod(header.offset + done, head_bytes)
            count = min(payload.nbytes - done, head_bytes - within)
            start = region.offset + head * stride_bytes + within
            self._copier.copy(self._buffer[start : start + count], done)
            done += count
        self._missing_bytes -= done

    @property
    def positions(self) -> tuple[Positions | None, ...]:
        """Each layer's kept positions, int32 `[H_kv, n]`; None where every token is kept."""
        return tuple(
            np.frombuffer(self._index[i], np.dtype("<i4")).reshape(self._spec.num_kv_heads, -1)
            if i in self._index
            else None
            for i in range(len(self._layout.layers))
        )

    def finish(self) -> tuple[LayerCache, ...]:
        """Build what decode needs beside the rows; returns the layers' views.

        Raises:
            TransferFailed: bytes are missing.
        """
        if self._missing_bytes != 0:
            raise TransferFailed(f"{self._missing_bytes} bytes of rows did not come", reason="incomplete")
        for i, layer in enumerate(self._layout.layers):
            dropped = layer.packed is None and layer.rows < self._num_prompt_tokens
            if (dropped or i in self._index) and i not in self._index_checked:
                raise TransferFailed(
                    f"layer {i} keeps {layer.rows} of {self._num_prompt_tokens} tokens; its index is missing",
                    reason="incomplete",
                )
        caches = tuple(
            self._with_prompt(i, cache) if i in self._packed else cache
            for i, cache in enumerate(view_layers(self._layout, self._buffer))
        )
        for i, cache in enumerate(caches):
            if cache.packed is not None:
                packed_attention(cache.layout.attention).build_packed(cache.packed, cache.auxiliary)
            elif cache.layout.attention.evicts:
                self._load(i, cache)
            else:
                cache.layout.attention.build(
                    cache.keys, cache.values, cache.auxiliary, length=cache.layout.rows
                )
        return caches

    def _with_prompt(self, i: int, cache: LayerCache) -> LayerCache:
        writer = self._packed[i]
        if isinstance(writer, StoredLayerWriter):
            return replace(cache, stored=writer.finish())
        return replace(cache, packed=writer.finish())

    def _load(self, i: int, cache: LayerCache) -> None:
        """Give a layer that evicts its positions and what prefill has accumulated."""
        rows, num_kv_heads = cache.layout.rows, self._spec.num_kv_heads
        state = torch.frombuffer(self._state.get(i, bytearray(4)), dtype=torch.float32)
        wanted = cache.layout.attention.state_size(num_kv_heads=num_kv_heads, num_rows=rows)
        if state.numel() != wanted:
            raise TransferFailed(f"layer {i} STATE did not come whole", reason="incomplete")
        positions = None
        if i in self._index:
            positions = torch.frombuffer(self._index[i], dtype=torch.int32).view(num_kv_heads, rows)
        try:
            cache.layout.attention.load(cache.auxiliary, positions=positions, state=state, length=rows)
        except ValueError as error:
            raise TransferFailed(f"layer {i} STATE: {error}", reason="state") from error

    def _layer_writer(self, layer: int, zone: Tensor) -> PackedLayerWriter | StoredLayerWriter:
        """The writer of a layer that is attended as it came."""
        representation = stored_representation(self._plans[layer].representation)
        num_tokens = self._num_prompt_tokens
        if representation is None:
            return PackedLayerWriter(self._spec, layer, zone, self._copier, num_prompt_tokens=num_tokens)
        specs = self._specs[layer]
        return StoredLayerWriter(
            layer, representation, specs, zone, self._copier, num_prompt_tokens=num_tokens
        )

    def _write_quantised(self, header: BlockHeader, payload: memoryview) -> None:
        """Gather a layer's codes beside the arena; with the last one, restore its rows and let go of them."""
        layer, specs = header.layer, self._specs[header.layer]
        quantiser = wire_representation(self._plans[layer])
        assert quantiser is not None
        if layer not in self._quantised:
            zone = torch.empty(zone_bytes(specs), dtype=torch.uint8, device=self._buffer.device)
            self._quantised[layer] = StoredLayerWriter(
                layer, quantiser, specs, zone, self._copier, num_prompt_tokens=self._num_prompt_tokens
            )
        self._quantised[layer].write(header, payload)
        prompt = self._quantised[layer].prompt
        if isinstance(prompt, KiviPrompt):
            placed = self._layout.layers[layer]
            for region, rows in zip((placed.keys, placed.values), prompt.dequantised(), strict=True):
                region.view(self._buffer)[:, : placed.rows] = rows
                self._missing_bytes -= rows.numel() * rows.itemsize
            self._index_checked.add(layer)
            del self._quantised[layer]

    def _write_delta(self, held: HeldSelections, header: BlockHeader, payload: memoryview) -> None:
        """A block of a layer of which rows are held; with the first one, these are copied."""
        i, layer = header.layer, self._layout.layers[header.layer]
        if i not in self._delta:
            if i not in self._index_checked and layer.rows < self._num_prompt_tokens:
                raise TransferFailed(f"layer {i}: NEW_ROWS came before INDEX", reason="order")
            positions = self.positions[i]
            if positions is None:
                positions = all_positions(self._spec.num_kv_heads, layer.rows)
            row_bytes = 2 * positions.size * self._spec.row_bytes
            self._delta[i] = DeltaLayerWriter(
                i,
                positions,
                held=held,
                held_rows=[layers[i] for layers in self._held_layers],
                rows=(layer.keys.view(self._buffer), layer.values.view(self._buffer)),
            )
            self._missing_bytes -= row_bytes - self._delta[i].missing_bytes
        writer = self._delta[i]
        before_bytes = writer.missing_bytes
        writer.write(header, payload)
        self._missing_bytes -= before_bytes - writer.missing_bytes

    def _write_index(self, header: BlockHeader, payload: memoryview, section_bytes: int) -> None:
        index = self._index.setdefault(header.layer, bytearray())
        if header.offset != len(index):
            raise TransferFailed(
                f"layer {header.layer} INDEX: offset {header.offset} came; {len(index)} is expected",
                reason="order",
            )
        index += payload
        if len(index) == section_bytes:
            self._check_index(header.layer, np.frombuffer(index, np.dtype("<i4")))
            self._index_checked.add(header.layer)

    def _check_index(self, layer: int, positions: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        per_head = positions.reshape(self._spec.num_kv_heads, -1)
        ascending = bool((per_head[:, 1:] > per_head[:, :-1]).all())
        if not ascending or positions.min() < 0 or positions.max() >= self._num_prompt_tokens:
            raise TransferFailed(
                f"layer {layer}: kept positions must ascend within 0 to {self._num_prompt_tokens - 1} for "
                f"each KV head; they lie in {positions.min()} to {positions.max()}, ascending: {ascending}",
                reason="index",
            )
