"""Compaction of generated tokens: of every full segment of them, only the rows with the highest scores stay.

A long answer then grows by a fraction of its tokens, whatever the format of the prompt, whose rows all stay.
`rdkv` packs its segments instead (`rdkv.PackedSegments`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, scale_of
from kvferry.shared.compression.attention import EVICTIONS
from kvferry.shared.compression.formats.interface import (
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Specs,
    Tensors,
    on_host,
    select_rows,
)
from kvferry.shared.compression.interface import (
    LayerInputs,
    LayerShape,
    Scorer,
    Sizing,
    TensorSpec,
    gather_rows,
)
from kvferry.shared.compression.plan import (
    MEASURED_ALLOCATIONS,
    REBUDGET_TOKENS,
    RECONSTRUCTION,
    Between,
    CompressionPlan,
    LayerPlan,
    ParamValue,
    Part,
    read_params,
)
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest

_MOST_TOKENS = 1 << 20
_QUERIES = "segment_queries"


@dataclass(frozen=True, kw_only=True)
class Segments(ABC):
    """How a layer's generated tokens are compacted.

    rows of new tokens   | k of segment 0 | k of segment 1 | at most R rows of the current segment |
                                             full, and one more row comes ──► k of them stay

    Attributes:
        segment_tokens: R.
        kept_rows: k, the rows of a full segment that stay in each KV head.
    """

    segment_tokens: int
    kept_rows: int = 0

    @property
    @abstractmethod
    def window(self) -> int:
        """The number of a segment's last queries that its compaction depends on."""

    def regions(self, shape: LayerShape) -> Specs:
        """Return the regions beside those of the format."""
        return {_QUERIES: self._queries(shape)}

    def _queries(self, shape: LayerShape) -> TensorSpec:
        size = (shape.num_kv_heads, shape.group_size, self.window, shape.head_dim)
        return TensorSpec(shape=size, dtype=shape.dtype)

    def queries_bytes(self, shape: LayerShape, num_appended: int) -> int:
        """Count the bytes of the observed queries; from the first query on, all of them count."""
        first = self.segment_tokens - self.window
        return self._queries(shape).size_bytes if num_appended > first else 0

    @abstractmethod
    def compact(
        self, inner: LayerCache | NaiveLayer, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Compact a full segment.

        Args:
            inner: the format's layer.
            queries: `[H_kv, G, W, D]`, the segment's last.
            keys, values: `[H_kv, R, D]`.

        Returns: K and V `[H_kv, k, D]` of the rows that stay, in other memory.
        """

    def num_rows(self, num_appended: int) -> int:
        """Count the rows after `num_appended` tokens."""
        compacted = max(num_appended - 1, 0) // self.segment_tokens
        return num_appended - compacted * (self.segment_tokens - self.kept_rows)

    def most_rows(self, num_appended: int) -> int:
        """Return the most rows that there are at any time until `num_appended` tokens."""
        last_full = num_appended // self.segment_tokens * self.segment_tokens
        return max(self.num_rows(num_appended), self.num_rows(last_full))


@dataclass(frozen=True, kw_only=True)
class SelectedSegments(Segments):
    """Segments of which the rows with the highest scores stay.

    Deviation: no paper compacts generated tokens this way. A segment is scored by its own last queries, as
    SnapKV scores a prompt. Their softmax covers the segment alone, so its rows do not depend on how much
    attention the prompt takes from it. Rows that were selected once stay.

    Attributes:
        scorer: gives the tokens of a segment their scores.
    """

    scorer: Part

    @cached_property
    def made_scorer(self) -> Scorer:
        return make_scorer(self.scorer, rows=self.kept_rows)

    @property
    def window(self) -> int:
        return min(self.made_scorer.observed_queries or 0, self.segment_tokens)

    def compact(
        self, inner: LayerCache | NaiveLayer, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float
    ) -> tuple[Tensor, Tensor]:
        index = self.select(queries, keys, values, scaling=scaling)
        return gather_rows(keys, index), gather_rows(values, index)

    def select(self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """Select the rows of a full segment that stay.

        Args: queries: `[H_kv, G, W, D]`, the segment's last; keys, values: `[H_kv, R, D]`.
        Returns: int32 `[H_kv, k]`, ascending per head.
        """
        inputs = LayerInputs(layer=0, queries=queries, keys=keys, values=values, scaling=scaling)
        return select_rows(self.made_scorer(inputs), self.kept_rows)


def check_generated(generated: Part, plan: CompressionPlan, fmt: type[LayerFormat]) -> None:
    """Check that a plan's generated tokens can be compacted. Raises: InvalidRequest: they cannot."""
    allocation = plan.layer_allocation.name
    for text, refuses in (
        (f"format {plan.representation.name!r}", not fmt.compacts),
        (f"attention {plan.attention.name!r}", plan.attention.name in EVICTIONS),
        (f"layer_allocation {allocation!r}", allocation in MEASURED_ALLOCATIONS),
        ("a plan without a scorer", plan.scorer is None),
    ):
        if refuses:
            raise InvalidRequest(
                f"{REBUDGET_TOKENS} does not go with {text}", param="kv_compression.parameters"
            )
    scorer, size = _scorer_and_size(generated)
    read_params("generated tokens", {REBUDGET_TOKENS: size}, {REBUDGET_TOKENS: Between(1, _MOST_TOKENS)})
    if make_scorer(scorer, rows=1).observed_queries is None or scorer.name == RECONSTRUCTION:
        raise InvalidRequest(
            f"scorer {scorer.name!r} needs the queries of all tokens, or a prompt; generated tokens go with "
            "one that observes the last queries",
            param="kv_compression",
        )


def with_segments(layer: LayerPlan, generated: Part, sizing: Sizing) -> LayerPlan:
    """Return the layer's plan with its segments' sizes: they retain the prompt's share of rows, rounded up.

    There are no segments if the completion fills none, or if they would stay whole.
    """
    scorer, size = _scorer_and_size(generated)
    segment, num_tokens = int(size), sizing.num_prompt_tokens
    kept = -(-segment * sizing.rows // num_tokens)
    kept = max(kept, make_scorer(scorer, rows=kept).protected_rows)
    # the last token of a completion never gets a row, and a full segment stays until one more row comes
    if kept >= segment or sizing.max_new_tokens - 2 < segment or layer == LayerPlan(rows=num_tokens):
        return layer
    params: dict[str, ParamValue] = {"segment_tokens": segment, "kept_rows": kept}
    return replace(layer, generated=Part(name=scorer.name, params=params))


def _scorer_and_size(generated: Part) -> tuple[Part, ParamValue]:
    """Return the scorer of a plan's generated tokens, and R as the plan has it."""
    params = {name: value for name, value in generated.params.items() if name != REBUDGET_TOKENS}
    return Part(name=generated.name, params=params), generated.params.get(REBUDGET_TOKENS, 0)


def selected_segments(plan: CompressionPlan, generated: Part) -> SelectedSegments:
    """Return the segments of a resolved layer. Raises: InvalidRequest: sizes that no plan has."""
    assert plan.generated is not None, "the plan of a layer with segments compacts generated tokens"
    allowed = dict.fromkeys(("segment_tokens", "kept_rows"), Between(1, _MOST_TOKENS))
    sizes = read_params("a layer's generated tokens", generated.params, allowed)
    return SelectedSegments(**sizes, scorer=_scorer_and_size(plan.generated)[0])


class CompactingCache(LayerCache):
    """A format's layer in the arena, and the last queries of the current segment.

    Rows that do not stay are copied to the host first if they are wanted at the end.
    """

    def __init__(self, inner: LayerCache, segments: Segments) -> None:
        super().__init__(inner.format, inner.regions)
        self.inner = inner
        self.segments = segments
        self._segment_rows: tuple[tuple[Tensor, Tensor], ...] = ()

    def settle(self) -> None:
        self.inner.settle()

    def move(self, fmt: LayerFormat, regions: Tensors) -> None:
        self.inner.move(fmt, regions)
        self.format, self.regions = fmt, regions

    def copied(self, fmt: LayerFormat, regions: Tensors) -> CompactingCache:
        return CompactingCache(self.inner.copied(fmt, regions), self.segments)

    @property
    def name(self) -> str:
        return "segments"

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        if num_appended >= self.format.shape.num_new_rows:
            raise IndexError(f"there is room for {self.format.shape.num_new_rows} new rows")
        segments = self.segments
        full, row = divmod(num_appended, segments.segment_tokens)
        if full and not row:
            self._compact(full - 1, scale_of(scaling))
        observed = row - (segments.segment_tokens - segments.window)
        if observed >= 0:
            self.regions[_QUERIES][:, :, observed] = queries
        position = full * segments.kept_rows + row
        return self.inner.append_and_attend(queries, key, value, num_appended=position, scaling=scaling)

    def observe(self, queries: Tensor) -> None:
        """Take the queries `[H_kv, G, n, D]` of the first n tokens, at most a segment, which have rows."""
        first = self.segments.segment_tokens - self.segments.window
        observed = queries[:, :, first:]
        self.regions[_QUERIES][:, :, : observed.shape[2]] = observed

    def _compact(self, segment: int, scaling: float) -> None:
        segments, new = self.segments, self.inner.new_rows()
        first = segment * segments.kept_rows
        keys, values = (tensor[:, first : first + segments.segment_tokens] for tensor in new)
        if self.format.shape.returns_generated:
            self._segment_rows = (*self._segment_rows, (on_host(keys), on_host(values)))
        # all are gathered before any is written: latent rows have keys and values in the same memory
        stay = segments.compact(self.inner, self.regions[_QUERIES], keys, values, scaling=scaling)
        for target, rows in zip((keys, values), stay, strict=True):
            target[:, : segments.kept_rows] = rows
        self.inner.new_rows_changed(first + segments.kept_rows)

    def generated_rows(self, num_appended: int) -> tuple[Tensor, Tensor]:
        segments = self.segments
        selected = len(self._segment_rows) * segments.kept_rows
        keys, values = self.inner.generated_rows(segments.num_rows(num_appended))
        rows = [*self._segment_rows, (keys[:, selected:], values[:, selected:])]
        keys, values = (torch.cat(parts, 1) for parts in zip(*rows, strict=True))
        return keys, values

    def used_bytes(self, num_appended: int) -> int:
        return self.inner.used_bytes(num_appended)
