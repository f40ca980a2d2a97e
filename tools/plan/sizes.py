"""Bytes of one request with one method, as the formats themselves count them."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one request.

    Attributes:
        method: in effect: "full" where nothing is compressed.
        full: K and V of the prompt, uncompressed, in the checkpoint's dtype.
        shipped: tensors on the wire, positions included, without manifest and headers; the most where it
            depends on the prompt's content.
        kept: at decode, before any token is generated.
        read: by one decode step.
        arena: reserved at decode, with room for the whole answer.
    """

    method: str
    full: int
    shipped: int
    kept: int
    read: int
    arena: int


def sizes_of(spec: ModelSpec, plan: CompressionPlan, *, num_prompt_tokens: int, max_new_tokens: int) -> Sizes:
    """Compute the sizes of a request. Raises: InvalidRequest: the plan does not go with the model."""
    resolved = resolve_plan(
        plan,
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=max_new_tokens,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
        layers=spec.layers,
    )
    formats = make_formats(spec, resolved)
    # Rows of new tokens are read, too; on average half of them are there.
    grown = spec.kv_token_bytes * max_new_tokens // 2
    return Sizes(
        method=resolved.method,
        full=spec.full_bytes(num_prompt_tokens),
        shipped=sum(fmt.shipped_bytes() for fmt in formats),
        kept=sum(fmt.kept_bytes() for fmt in formats),
        read=sum(fmt.read_bytes() for fmt in formats) + grown,
        arena=sequence_layout(formats).size_bytes,
    )
