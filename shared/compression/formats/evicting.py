"""A fixed number of rows: each new token evicts one row. H2O drops it, D2O merges it into its nearest row.

Decode attends to all rows and then chooses the row to evict by its accumulated attention. The state for that
(scores, thresholds) starts in prefill and travels with the rows. If the new tokens' own K and V are wanted at
the end, they are stored beside the rows, because eviction may drop or change any row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.kernels.softmax import Scaling, plain
from kvferry.shared.compression.d2o.eviction import EvictingCache, half_zones, zones
from kvferry.shared.compression.d2o.merging import merge_prompt
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Specs,
    Tensors,
    check_index,
    chunked,
)
from kvferry.shared.compression.interface import LayerInputs, LayerShape, TensorSpec
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, read_params

_GENERATED = "generated_"
"""Prefix of the regions of the new tokens' own rows."""


@dataclass(frozen=True, kw_only=True)
class Evicting(LayerFormat):
    """K and V `[H_kv, n + 1, D]` (the last row is the new token's), and a score and a position for each row.

    Tensor `state`: scores float32 `[H_kv, n]`, then for "merge" the thresholds `[H_kv]`, flattened.

    Attributes:
        attention: "evict" (H2O, Zhang et al. 2023: of the rows outside the latest half, the one with the
            least accumulated attention is evicted) or "merge" (D2O section 4.2: the evicted row is merged
            into its nearest row if the two are similar enough).
    """

    name: ClassVar[str] = "evicting"
    kinds: ClassVar[Mapping[str, str]] = {**LayerFormat.kinds, "state": "state"}
    takes_latent_rows: ClassVar[bool] = True
    attention: str

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Evicting:
        read_params(f"a layer's attention {layer.attention.name!r}", layer.attention.params, {})
        return cls(shape=shape, rows=layer.rows, attention=layer.attention.name)

    @property
    def merges(self) -> bool:
        return self.attention == "merge"

    @property
    def observed_queries(self) -> None:
        """None, for all queries: eviction starts from the accumulated attention of every query."""
        return None

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        """Select rows; for "merge", merge the others into them (D2O section 4.2, prompt encoding)."""
        inputs = inputs.with_sums()
        assert inputs.sums is not None
        index, keys, values = self.selected(inputs, scores)
        every = torch.arange(inputs.keys.shape[1], device=keys.device).expand(keys.shape[0], -1)
        kept = index.get("index", every)
        state = inputs.sums.sums.gather(1, kept.long()).flatten()
        if self.merges:
            merged = merge_prompt(inputs.keys, inputs.values, kept)
            keys, values, state = merged.keys, merged.values, torch.cat([state, merged.thresholds])
        return {**index, **self.shape.row_tensors(keys, values), "state": state}

    def tensors(self) -> Specs:
        num_numbers = self.shape.num_kv_heads * (self.rows + self.merges)
        state = TensorSpec(shape=(num_numbers,), dtype=torch.float32)
        return {**self.shape.index_spec(self.rows), **self.shape.row_specs(self.rows), "state": state}

    def placed(self, num_new: int) -> Specs:
        own = self.shape.row_specs(num_new) if self.shape.returns_generated else {}
        return {
            **self._working(self.rows + min(num_new, 1)),
            **{_GENERATED + name: spec for name, spec in own.items()},
        }

    def _working(self, num_rows: int) -> dict[str, TensorSpec]:
        """Return what attention and eviction work on; the last row's score and position are unused."""
        per_row = (self.shape.num_kv_heads, num_rows)
        specs = {
            **self.shape.row_specs(num_rows),
            "scores": TensorSpec(shape=per_row, dtype=torch.float32),
            "positions": TensorSpec(shape=per_row, dtype=torch.int32),
        }
        if self.merges:
            specs["thresholds"] = TensorSpec(shape=(self.shape.num_kv_heads,), dtype=torch.float32)
        return specs

    def open(self, regions: Tensors, tensors: Tensors) -> EvictingLayer:
        index = check_index(tensors, self.shape.num_prompt_tokens, reason="index")
        state = tensors["state"]
        num_scores = self.shape.num_kv_heads * self.rows
        if not (state[:num_scores] >= 0).all() or not state[:num_scores].isfinite().all():
            raise InvalidTensors("accumulated attention must be finite and at least 0", reason="state")
        if state[num_scores:].isinf().any():
            raise InvalidTensors("merging thresholds must not be infinite", reason="state")
        self._load(regions, index, state)
        return EvictingLayer(self, regions)

    def _load(self, regions: Tensors, index: Tensor | None, state: Tensor) -> None:
        """Fill scores, positions and thresholds from what prefill computed."""
        scores, positions = regions["scores"][:, : self.rows], regions["positions"][:, : self.rows]
        scores.copy_(state[: scores.numel()].view_as(scores))
        positions.copy_(index if index is not None else torch.arange(self.rows).expand_as(positions))
        if self.merges:
            regions["thresholds"].copy_(state[scores.numel() :])

    def step(
        self, regions: Tensors, queries: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        """Append a token, attend to every row, evict one. Shapes as `LayerCache.append_and_attend`."""
        keys, values = self.shape.rows_of(regions)
        rows = keys.shape[1] - 1
        cache = EvictingCache(
            keys=keys,
            values=values,
            is_latent=bool(self.shape.latent_dim),
            scores=regions["scores"][:, :rows],
            positions=regions["positions"][:, :rows],
            layer_zones=zones(rows) if self.merges else half_zones(rows),
            thresholds=regions["thresholds"] if self.merges else None,
        )
        cache.append(key, value)
        output, attention_row = cache.attend(queries, scaling=scaling)
        cache.evict(attention_row)
        return output

    def parts(self, tensors: Tensors, num_parts: int) -> Sequence[Tensors]:
        by_head = {name: tensor for name, tensor in tensors.items() if name != "state"}
        parts = chunked(by_head, self.shape.num_kv_heads, num_parts)
        numbers = tensors["state"].tensor_split([self.shape.num_kv_heads * self.rows])
        scores, thresholds = (flat.tensor_split(num_parts) for flat in numbers)
        return [
            {**part, "state": torch.cat(state)}
            for part, *state in zip(parts, scores, thresholds, strict=True)
        ]

    def kept_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.used_bytes(0)

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        """Count rows, scores and positions; for "merge", also K a second time, to find the nearest row."""
        row_bytes = self.shape.head_dim * self.shape.dtype.itemsize
        state_bytes = torch.float32.itemsize + torch.int32.itemsize
        num_read = len(self.shape.row_names) + self.merges
        return self.shape.num_kv_heads * self.rows * (num_read * row_bytes + state_bytes)

    def naive(self, tensors: Tensors) -> NaiveEvicting:
        device = tensors["keys"].device
        regions = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for name, spec in self._working(self.rows + 1).items()
        }
        for name in self.shape.row_names:
            regions[name] = F.pad(tensors[name], (0, 0, 0, 1))
        self._load(regions, tensors.get("index"), tensors["state"])
        return NaiveEvicting(self, regions)


class EvictingLayer(LayerCache):
    """An evicting layer in the arena."""

    format: Evicting

    @property
    def name(self) -> str:
        return self.format.attention

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        if self.format.shape.returns_generated:
            own_keys, own_values = self.new_rows()
            own_keys[:, num_appended], own_values[:, num_appended] = key, value
        return self.format.step(self.regions, queries, key, value, scaling=plain(scaling))

    def new_rows(self) -> tuple[Tensor, Tensor]:
        return self.format.shape.rows_of(self.regions, _GENERATED)


class NaiveEvicting(NaiveLayer):
    """The same steps on its own tensors: the retained rows and one for the new token."""

    def __init__(self, fmt: Evicting, regions: dict[str, Tensor]) -> None:
        self._format = fmt
        self._regions = regions

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        return self._format.step(self._regions, queries, key, value, scaling=plain(scaling))

    def fork(self) -> NaiveEvicting:
        return NaiveEvicting(self._format, {name: tensor.clone() for name, tensor in self._regions.items()})
