"""The rows of a draft (`compression/draft.py`), which are shipped with a layer of a compressed prompt.

    prefill   encode_layer ──► with_draft ──► the format's tensors, then draft_keys, draft_values
    decode    split ──► the format opens its own ──► begin_with_draft: the first rows of new tokens

They are the rows that decode would have appended, so they are stored and returned as those. If a layer's
new rows are compacted, the queries are shipped, too, because they choose what stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from kvferry.shared.compression.formats.compacting import CompactingCache
from kvferry.shared.compression.formats.interface import (
    Encoded,
    InvalidTensors,
    LayerCache,
    LayerFormat,
    Specs,
    Tensors,
    chunked,
)
from kvferry.shared.compression.interface import Ahead, TensorSpec

_PREFIX = "draft_"
_QUERIES = "queries"
_Entry = TypeVar("_Entry")


def with_draft(fmt: LayerFormat, encoded: Encoded, ahead: Ahead) -> Encoded:
    """Return an encoded layer with the rows of a draft behind its tensors."""
    rows, count = fmt.shape.row_tensors(ahead.keys, ahead.values), len(encoded.tensors)
    if fmt.segments is not None:
        rows[_QUERIES] = ahead.queries.contiguous()
    names = [_PREFIX + name for name in rows]
    return Encoded(
        tensors=(*encoded.tensors, *rows.values()),
        make=lambda tensors: {
            **encoded.finish(tensors[:count]),
            **dict(zip(names, tensors[count:], strict=True)),
        },
    )


def split(named: Mapping[str, _Entry]) -> tuple[dict[str, _Entry], dict[str, _Entry]]:
    """Split entries into the format's own and a draft's, whose names lose their prefix.

    Raises: InvalidTensors: a draft's entries come before others.
    """
    own = {name: entry for name, entry in named.items() if not name.startswith(_PREFIX)}
    names = list(named)
    if names[: len(own)] != list(own):
        raise InvalidTensors(f"its tensors are {', '.join(names)}; a draft's come last", reason="draft")
    return own, {name[len(_PREFIX) :]: named[name] for name in names[len(own) :]}


def parts(fmt: LayerFormat, tensors: Tensors, num_parts: int) -> Sequence[Tensors]:
    """Divide a layer that may have a draft, as `LayerFormat.parts` does."""
    own, drafted = split(tensors)
    of_draft = chunked(drafted, fmt.shape.num_kv_heads, num_parts)
    return [
        {**part, **{_PREFIX + name: tensor for name, tensor in rows.items()}}
        for part, rows in zip(fmt.parts(own, num_parts), of_draft, strict=True)
    ]


def drafted_tokens(fmt: LayerFormat, drafted: Specs, *, most: int) -> int:
    """Return how many tokens' rows an announced draft has.

    Args: most: tokens that a draft may have.
    Raises: InvalidTensors: these are not a draft's rows of this layer.
    """
    count = drafted["keys"].shape[1] if "keys" in drafted and len(drafted["keys"].shape) == 3 else 0
    shape, expected = fmt.shape, dict[str, TensorSpec]()
    if 1 <= count <= min(most, shape.num_new_rows):
        expected = shape.row_specs(count)
        if fmt.segments is not None:
            size = (shape.num_kv_heads, shape.group_size, count, shape.head_dim)
            expected[_QUERIES] = TensorSpec(shape=size, dtype=shape.dtype)
    if drafted and dict(drafted) != expected:
        raise InvalidTensors(
            f"its draft has {', '.join(drafted)} of {count} tokens; rows of 1 to "
            f"{min(most, shape.num_new_rows)} tokens are allowed",
            reason="draft",
        )
    return count if drafted else 0


def begin_with_draft(cache: LayerCache, drafted: Tensors) -> None:
    """Give an opened layer the rows of a draft as its first new rows.

    Raises: InvalidTensors: a number is not finite.
    """
    if not all([bool(torch.isfinite(tensor).all()) for tensor in drafted.values()]):
        raise InvalidTensors("numbers of its draft are not finite", reason="not_finite")
    if isinstance(cache, CompactingCache):
        cache.observe(drafted[_QUERIES])
        cache = cache.inner
    for rows, name in zip(cache.new_rows(), cache.format.shape.row_names, strict=False):
        rows[:, : drafted[name].shape[1]] = drafted[name]
    cache.new_rows_changed(drafted["keys"].shape[1])
