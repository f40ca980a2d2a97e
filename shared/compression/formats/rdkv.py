"""RDKV: bits allocated to K channels and V tokens, packed.

New tokens stay rows, or are packed in segments as the prompt was (`PackedSegments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.packed.layout import packed_bound
from kvferry.kernels.packed.packing import Packing
from kvferry.shared.compression.attention import make_attention, size_attention
from kvferry.shared.compression.formats.compacting import Segments
from kvferry.shared.compression.formats.interface import LayerCache, NaiveLayer, Specs
from kvferry.shared.compression.formats.packed import SEGMENTS, NaivePacked, PackedCache, PackedFormat
from kvferry.shared.compression.interface import LayerInputs, LayerShape, Sizing, TensorSpec
from kvferry.shared.compression.plan import (
    DRAFT_TOKENS,
    RECONSTRUCTION,
    Allowed,
    CompressionPlan,
    LayerPlan,
    ParamValue,
    Part,
    read_params,
)
from kvferry.shared.compression.rdkv.allocation import least_budget
from kvferry.shared.compression.rdkv.compress import (
    RDKV_DEFAULTS,
    RDKV_PARAMS,
    RdkvSettings,
    begin_layer_rdkv,
    compress_layer_rdkv,
    rdkv_settings,
)
from kvferry.shared.errors import InvalidRequest, KvferryError

STANDARDISED = ("compactor", RECONSTRUCTION, "keydiff")
"""Scorers whose scores are in standard deviations from their mean, as `score_weights` needs them."""
_TOKENS_PER_BUDGET_TOKEN = 8
"""The most tokens that can share the V bits of one full-precision token: 16 bits, at least 2 each, headers
aside."""
_TOKENS_OF_4_BITS = 4
"""How many tokens of 4 bits take the bits of one of 16."""


@dataclass(frozen=True, kw_only=True)
class Rdkv(PackedFormat):
    """A packed prompt whose widths follow from weights of tokens and channels; see `rdkv/`.

    Attributes:
        is_scored: whether a scorer's scores weigh the tokens; without, the prompt's last queries alone do.
    """

    name: ClassVar[str] = "rdkv"
    heads_apart: ClassVar[bool] = True
    allowed: ClassVar[Allowed] = RDKV_PARAMS
    defaults: ClassVar[Mapping[str, ParamValue]] = RDKV_DEFAULTS
    allocations: ClassVar[tuple[str, ...] | None] = ("uniform",)
    settings: RdkvSettings
    is_scored: bool = False

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        super().check(plan)
        part = plan.representation
        settings = rdkv_settings(part, budget_tokens=1)
        if plan.scorer is not None and plan.scorer.name not in STANDARDISED:
            raise InvalidRequest(
                f"format 'rdkv' does not go with scorer {plan.scorer.name!r}; it takes "
                f"{' or '.join(map(repr, STANDARDISED))}, whose scores are standardised, or none",
                param="kv_compression",
            )
        if settings.with_attention and plan.scorer is None:
            raise InvalidRequest(
                f"with_attention of format 'rdkv' is True; it must be False for method {plan.method!r}: it "
                "has no scorer, so attention alone weighs its tokens",
                param="kv_compression.with_attention",
            )
        drafted, segment = int(part.params.get(DRAFT_TOKENS, 0)), int(part.params["rebudget_tokens"])
        if 0 < segment < drafted:
            raise InvalidRequest(
                f"rebudget_tokens of format 'rdkv' is {segment}; it must be 0, or at least the "
                f"{drafted} draft_tokens, which begin the first segment",
                param="kv_compression.rebudget_tokens",
            )
        if plan.attention.name != "dense" and segment:
            raise InvalidRequest(
                f"format 'rdkv' packs generated tokens (rebudget_tokens {segment}), which does not go with "
                f"attention {plan.attention.name!r}; rebudget_tokens must be 0",
                param="kv_compression",
            )

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        """Plan B_tok, the most tokens that a head can retain with it, and how generated tokens are packed.

        Raises: InvalidRequest: the budget does not suffice for the cheapest width for every token.
        """
        # with dense attention the whole budget is bits, spread over more tokens than rows
        budget = sizing.budget if plan.attention.name == "dense" else sizing.rows
        num_tokens, part = sizing.num_prompt_tokens, plan.representation
        widths = rdkv_settings(part, budget_tokens=budget).widths
        least = least_budget(widths, num_tokens=num_tokens, head_dim=sizing.head_dim)
        if budget < least:
            raise InvalidRequest(
                f"widths {part.params['widths']!r} of format 'rdkv' drop no token; with {num_tokens} tokens "
                f"they take a budget of {least} tokens or more, not {budget}",
                param="kv_compression",
            )
        sizes: dict[str, ParamValue] = {"budget_tokens": budget}
        segment = int(part.params["rebudget_tokens"])
        # the prompt's bits per token, rounded up so that a segment never gets fewer
        share = -(-segment * budget // num_tokens)
        num_segments = _num_segments(segment, sizing.max_new_tokens) if segment else 0
        if num_segments and _saves(segment, share, sizing.head_dim):
            sizes |= {"segment_tokens": segment, "segment_budget_tokens": share}
        rows = min(num_tokens, _TOKENS_PER_BUDGET_TOKEN * budget)
        attention = size_attention(
            plan.attention,
            sizing,
            cap=rows,
            packed_per_row=Fraction(min(rows, _TOKENS_OF_4_BITS * budget), budget),
        )
        return LayerPlan(rows=rows, attention=attention, representation=Part(name="rdkv", params=sizes))

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Rdkv:
        params, packed = layer.representation.params, None
        segments = ("segment_tokens", "segment_budget_tokens") if "segment_tokens" in params else ()
        read_params("a layer of 'rdkv'", params, dict.fromkeys(("budget_tokens", *segments), int))
        sizes = {name: int(value) for name, value in params.items()}
        budget_tokens, fingerprint = sizes["budget_tokens"], shape.fingerprint
        settings = rdkv_settings(plan.representation, budget_tokens=budget_tokens, fingerprint=fingerprint)
        if segments:
            segment, share = sizes["segment_tokens"], sizes["segment_budget_tokens"]
            packed = PackedSegments(
                segment_tokens=segment,
                max_segments=_num_segments(segment, shape.max_new_tokens),
                limit_bytes=_limit_bytes(shape, segment, share),
                settings=replace(settings, budget_tokens=share),
            )
        return cls(
            shape=shape,
            rows=layer.rows,
            attention=make_attention(layer.attention),
            settings=settings,
            segments=packed,
            is_scored=plan.scorer is not None,
        )

    @property
    def takes_scores(self) -> bool:
        return self.is_scored

    @property
    def observed_queries(self) -> int:
        return self.settings.window

    def begin(self, inputs: LayerInputs, scores: Tensor | None) -> Packing:
        return begin_layer_rdkv(self.settings, inputs, scores)

    @cached_property
    def limit_bytes(self) -> int:
        """The largest possible size of the packed prompt."""
        return _limit_bytes(self.shape, self.shape.num_prompt_tokens, self.settings.budget_tokens)


@dataclass(frozen=True, kw_only=True)
class PackedSegments(Segments):
    """Segments that are packed as the prompt was: streaming re-budgeting, the paper's future work.

    Deviation: the weights of a segment use only the segment. The softmax of its last queries (Eq. 3) covers
    the segment's own tokens, not all earlier tokens, so a segment's bits do not depend on how much attention
    the prompt takes from it. Its budget is its share of tokens, not what the prompt left over.

    Attributes:
        max_segments: the segments that a completion of the plan's length packs.
        limit_bytes: the largest possible size of a packed segment.
        settings: settings for packing a segment.
    """

    max_segments: int
    limit_bytes: int
    settings: RdkvSettings

    @property
    def window(self) -> int:
        return min(self.settings.window, self.segment_tokens)

    def regions(self, shape: LayerShape) -> Specs:
        segments = TensorSpec(shape=(self.max_segments * self.limit_bytes,), dtype=torch.uint8)
        return {SEGMENTS: segments, **super().regions(shape)}

    def compact(
        self, inner: LayerCache | NaiveLayer, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """See `Segments.compact`; no row stays.

        Raises: KvferryError: K or V are not finite, or out of range for a packed layer.
        """
        assert isinstance(inner, PackedCache | NaivePacked)
        inputs = LayerInputs(layer=0, queries=queries, keys=keys, values=values, scaling=scaling)
        try:
            inner.add_segment(compress_layer_rdkv(self.settings, inputs))
        except ValueError as error:
            raise KvferryError(f"generated tokens cannot be packed: {error}", reason="packing") from error
        return keys[:, :0], values[:, :0]


def _num_segments(segment_tokens: int, max_new_tokens: int) -> int:
    """Count the segments that a completion of this length packs.

    A segment is packed when one more row comes, and the last token of a completion never gets a row.
    """
    return max(max_new_tokens - 2, 0) // segment_tokens


def _saves(segment_tokens: int, budget_tokens: int, head_dim: int) -> bool:
    """Say whether a packed segment of the largest possible size is smaller than its rows at 16 bits."""
    limit_bytes = packed_bound(
        num_tokens=segment_tokens, budget_tokens=budget_tokens, num_kv_heads=1, head_dim=head_dim
    ).size_bytes
    return limit_bytes < 4 * segment_tokens * head_dim


def _limit_bytes(shape: LayerShape, num_tokens: int, budget_tokens: int) -> int:
    """Return the largest possible size of so many tokens packed within a budget."""
    return packed_bound(
        num_tokens=num_tokens,
        budget_tokens=budget_tokens,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    ).size_bytes
