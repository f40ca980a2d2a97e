"""Formats by name, as a plan and its resolved layers name them (`representation`).

Adding one is one file and one entry of `FORMATS`, or an entry point of another package (`interface.Method`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvferry.shared.compression.formats.compacting import CompactingCache, selected_segments
from kvferry.shared.compression.formats.interface import Encoded, LayerCache, LayerFormat, Tensors
from kvferry.shared.compression.formats.kivi import Kivi
from kvferry.shared.compression.formats.ragged import Ragged
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.formats.rows import Rows
from kvferry.shared.compression.formats.state import State
from kvferry.shared.compression.formats.uniform import Uniform
from kvferry.shared.compression.formats.window import Window
from kvferry.shared.compression.interface import LayerInputs, LayerShape, installed_parts, with_installed
from kvferry.shared.compression.plan import (
    STATE_FORMAT,
    WINDOW_FORMAT,
    Part,
    ResolvedPlan,
    is_measured,
    look_up,
)
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.model.question import Question
from kvferry.shared.model.spec import TORCH_DTYPES, LayerSpec, ModelSpec

FORMATS: Mapping[str, type[LayerFormat]] = {
    "rows": Rows,
    "rdkv": Rdkv,
    "kivi": Kivi,
    "ragged": Ragged,
    "packed": Uniform,
    WINDOW_FORMAT: Window,
    STATE_FORMAT: State,
}


def format_class(part: Part) -> type[LayerFormat]:
    """Return the class of the format that a plan or a resolved layer names.

    Raises:
        InvalidRequest: no format has this name.
        ConfigurationError: an installed method brings a format whose name is taken.
    """
    known: Mapping[str, type[LayerFormat]] = with_installed(
        "formats", FORMATS, installed_parts("representation")
    )
    return look_up("representation", part.name, known)


def make_formats(
    spec: ModelSpec, resolved: ResolvedPlan, *, returns_generated: bool = False
) -> tuple[LayerFormat, ...]:
    """Make the format of each layer of a resolved plan; layers with equal plans and shapes share one object.

    Args:
        returns_generated: whether K and V of new tokens are wanted at the end, unmerged and in order.

    Raises: InvalidRequest: an unknown format or attention, sizes that do not belong to it, or a plan for
        other layers than the model's.
    """
    formats: list[LayerFormat] = []
    specs = spec.layers or (LayerSpec(),) * spec.num_layers
    kinds = list(zip(resolved.layers, specs, strict=True))
    for number, (layer, spec_of_layer) in enumerate(kinds):
        first = kinds.index(kinds[number])
        if first != number:
            formats.append(formats[first])
            continue
        _check_format(number, layer.representation.name, spec_of_layer)
        heads = spec.heads(number)
        shape = LayerShape(
            num_prompt_tokens=resolved.num_prompt_tokens,
            max_new_tokens=resolved.max_new_tokens,
            num_kv_heads=heads.num_kv_heads,
            group_size=heads.group_size,
            head_dim=heads.head_dim,
            dtype=TORCH_DTYPES[spec.dtype],
            latent_dim=spec_of_layer.latent_dim,
            returns_generated=returns_generated,
            fingerprint=spec.fingerprint,
            state=spec_of_layer.state,
        )
        fmt = format_class(layer.representation).of(resolved.plan, layer, shape)
        if layer.generated is not None:
            fmt = replace(fmt, segments=selected_segments(resolved.plan, layer.generated))
        formats.append(fmt)
    return tuple(formats)


def _check_format(number: int, name: str, layer: LayerSpec) -> None:
    """Check that the plan's format of a layer fits its window or state.

    Raises: InvalidRequest: a layer with a window or a state has another format, or one without has theirs.
    """
    if (name == WINDOW_FORMAT) != bool(layer.window):
        raise InvalidRequest(
            f"the plan's format of layer {number} is {name!r}, and its window is {layer.window} (0: none); "
            "prefill and decode need the same max_model_len",
            param="ticket.plan",
        )
    if (name == STATE_FORMAT) == layer.has_rows:
        raise InvalidRequest(
            f"the plan's format of layer {number} is {name!r}, and the layer has "
            f"{'rows' if layer.has_rows else 'a state'}",
            param="ticket.plan",
        )


def compacted(cache: LayerCache) -> LayerCache:
    """Return a layer that `LayerFormat.open` made, with its new rows compacted as its format says."""
    segments = cache.format.segments
    return cache if segments is None else CompactingCache(cache, segments)


def num_observed_queries(
    resolved: ResolvedPlan, formats: tuple[LayerFormat, ...], question: Question | None = None
) -> int | None:
    """Return how many of the prompt's last queries the compressed prompt depends on.

    Prefill needs the number before it continues a prompt from another session's KV: the queries of cached
    tokens are not computed again, so the queries that the method reads must belong to tokens that are run.

    Args: question: the prompt's; None if it is not known.
    Returns: at least 1, because the last token is always run; None if it depends on all queries.
    """
    if is_measured(resolved):
        return None
    needs, num_after = [1], question.num_after if question is not None else 0
    for fmt in {id(each): each for each in formats}.values():
        observed = [fmt.observed_queries]
        scorer = resolved.plan.scorer
        if scorer is not None and fmt.takes_scores:
            observed.append(make_scorer(scorer, rows=fmt.rows).observed_queries)
        for count in observed:
            if count is None:
                return None
            needs.append(count + num_after if count else 0)
    return max(needs)


def compresses_heads_apart(resolved: ResolvedPlan, formats: Sequence[LayerFormat]) -> bool:
    """Say whether groups of KV heads, compressed separately, make up the layer compressed as a whole."""
    scorer = resolved.plan.scorer
    return (
        not is_measured(resolved)
        and all(scorer is None or make_scorer(scorer, rows=fmt.rows).scores_heads_apart for fmt in formats)
        and all(format_class(layer.representation).heads_apart for layer in resolved.layers)
        and all(fmt.divides for fmt in formats)
    )


def compress_layer(
    resolved: ResolvedPlan, fmt: LayerFormat, inputs: LayerInputs, *, scores: Tensor | None = None
) -> Tensors:
    """Do what `encode_layer` does, and wait for the tensors. Raises: as it and its `finish`."""
    encoded = encode_layer(resolved, fmt, inputs, scores=scores)
    return encoded.finish(encoded.tensors)


def encode_layer(
    resolved: ResolvedPlan, fmt: LayerFormat, inputs: LayerInputs, *, scores: Tensor | None = None
) -> Encoded:
    """Begin to compress one layer as the resolved plan says.

    Args:
        fmt: the layer's format.
        inputs: K and V of the whole prompt (`T == resolved.num_prompt_tokens`), queries of its new tokens.
        scores: of the plan's scorer, float32 `[H_kv, T]`, if they have been computed already.

    Returns: see `LayerFormat.encode`; its `finish` raises what this raises.
    Raises: KvferryError: K or V of a layer to pack or quantise are not finite, or out of the format's range.
    """
    num_tokens = inputs.keys.shape[1]
    assert num_tokens == resolved.num_prompt_tokens, (num_tokens, resolved.num_prompt_tokens)
    scorer = resolved.plan.scorer
    if not fmt.takes_scores:
        scores = None
    elif scores is None and scorer is not None:
        scores = make_scorer(scorer, rows=fmt.rows)(inputs)
    try:
        encoded = fmt.encode(inputs, scores)
    except ValueError as error:
        raise _not_packed(inputs.layer, error) from error
    if encoded.make is None:
        return encoded
    layer = inputs.layer

    def make(tensors: Sequence[Tensor]) -> Tensors:
        try:
            return encoded.finish(tensors)
        except ValueError as error:
            raise _not_packed(layer, error) from error

    return Encoded(tensors=encoded.tensors, make=make)


def _not_packed(layer: int, error: ValueError) -> KvferryError:
    return KvferryError(f"layer {layer} cannot be packed: {error}", reason="packing")
