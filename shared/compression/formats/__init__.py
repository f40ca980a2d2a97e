"""Formats by name, for the `representation` part of a plan and of a resolved layer.

Adding one is one file and one entry of `FORMATS`, or an entry point of another package (`installed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.shared.compression.formats.interface import LayerFormat, LayerShape
from kvferry.shared.compression.formats.kivi import Kivi
from kvferry.shared.compression.formats.ragged import Ragged
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.formats.rows import Rows
from kvferry.shared.compression.formats.think import Think
from kvferry.shared.compression.installed import installed_formats
from kvferry.shared.compression.plan import LayerPlan, Part, ResolvedPlan, is_measured
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import ConfigurationError, InvalidRequest
from kvferry.shared.model.spec import TORCH_DTYPES, ModelSpec

FORMATS: Mapping[str, type[LayerFormat]] = {
    "rows": Rows,
    "rdkv": Rdkv,
    "kivi": Kivi,
    "think": Think,
    "ragged": Ragged,
}


def format_class(part: Part) -> type[LayerFormat]:
    """The class of the format that a plan or a resolved layer names.

    Raises:
        InvalidRequest: no format has this name.
        ConfigurationError: an installed method brings a format whose name is taken.
    """
    outside = installed_formats()
    if taken := sorted(set(outside) & set(FORMATS)):
        raise ConfigurationError(f"installed packages name formats {', '.join(taken)}; the package has them")
    found = FORMATS.get(part.name) or outside.get(part.name)
    if found is None:
        raise InvalidRequest(
            f"the plan's representation is {part.name!r}; it must be one of "
            f"{', '.join((*FORMATS, *outside))}",
            param="kv_compression",
        )
    return found


def make_formats(
    spec: ModelSpec, resolved: ResolvedPlan, *, returns_generated: bool = False
) -> tuple[LayerFormat, ...]:
    """The format of each layer of a resolved plan; layers with equal plans share one object.

    Args: returns_generated: whether K and V of new tokens are wanted at the end, unmerged and in order.
    Raises: InvalidRequest: an unknown format or attention, or sizes that do not belong to it.
    """
    shape = LayerShape(
        num_prompt_tokens=resolved.num_prompt_tokens,
        max_new_tokens=resolved.max_new_tokens,
        num_kv_heads=spec.num_kv_heads,
        group_size=spec.group_size,
        head_dim=spec.head_dim,
        dtype=TORCH_DTYPES[spec.dtype],
        returns_generated=returns_generated,
    )
    made: list[tuple[LayerPlan, LayerFormat]] = []
    formats = []
    for layer in resolved.layers:
        fmt = next((its for plan, its in made if plan == layer), None)
        if fmt is None:
            fmt = format_class(layer.representation).of(resolved.plan, layer, shape)
            made.append((layer, fmt))
        formats.append(fmt)
    return tuple(formats)


def num_observed_queries(resolved: ResolvedPlan, formats: tuple[LayerFormat, ...]) -> int | None:
    """How many of the prompt's last queries the compressed prompt depends on.

    Prefill needs the number before it continues a prompt from another session's KV: the queries of cached
    tokens are not computed again, so the queries that the method reads must belong to tokens that are run.

    Returns: at least 1, because the last token is always run; None if it depends on all queries.
    """
    if is_measured(resolved):
        return None
    needs = [1]
    for fmt in {id(its): its for its in formats}.values():
        observed = [fmt.observed_queries]
        if resolved.plan.scorer is not None and not (
            isinstance(fmt, Rows) and fmt.rows == resolved.num_prompt_tokens
        ):
            observed.append(make_scorer(resolved.plan.scorer, rows=fmt.rows).observed_queries)
        for count in observed:
            if count is None:
                return None
            needs.append(count)
    return max(needs)
