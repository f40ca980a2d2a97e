"""Decode's warm-up: steps of every batch size, greedy and drawn, over prompts of every kind of cache.

A kind whose rows are attended without batched kernels takes one step: it has no graphs, and the other kernels
of its steps are those of the other kinds.

Runs on the engine's thread before it takes sequences. What is compiled and captured here, no request waits
for. See `shared/device/warm_up.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import structlog
import torch
from prometheus_client import Gauge

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import in_buckets
from kvferry.kernels.hsa.batch import EMPTY_HEAD, HsaScratch, SparseRows, SparseSize
from kvferry.kernels.quarantine import attempt, is_lost
from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.slots import StepRunner, lane_of
from kvferry.services.decode.step import StepInput
from kvferry.shared.cache.arena import ByteArena, sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.device.self_test import model_shapes
from kvferry.shared.device.warm_up import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    Progress,
    WarmPrompt,
    needs_warm_up,
    shown_progress,
    warm_prompts,
)
from kvferry.shared.errors import CapacityExceeded, InvalidRequest
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler

_log = structlog.get_logger(__name__)

_STEP_TIMEOUT_S = 300.0
SAMPLING = (
    SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0),
    SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0),
    SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, top_p=0.9),
    SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, top_p=0.9, top_k=20),
)
"""Greedy; drawn; drawn from a part of the vocabulary, by its share and by how many tokens it has."""


def decode_warm_up(
    config: DecodeConfig, model: LanguageModel, arena: ByteArena, shown: Gauge
) -> Callable[[Sequence[StepRunner]], None] | None:
    """Return what to run before the worker takes sequences, given its lanes; None if there is nothing.

    Args: shown: how much of it is done.
    """
    needed = config.warm_up and model.num_ranks == 1 and needs_warm_up("decode", model)
    shown.set(not needed)
    if not needed:
        return None
    return partial(
        warm_up_steps,
        model,
        arena=arena,
        max_batch_size=config.max_batch_size,
        progress=shown_progress(shown),
    )


def batch_sizes(max_batch_size: int) -> list[int]:
    """Return the sizes 1, 2, 4 ... and the largest."""
    sizes = [1 << i for i in range(in_buckets(max_batch_size).bit_length())]
    return sorted({min(size, max_batch_size) for size in sizes})


def warm_up_steps(
    model: LanguageModel,
    lanes: Sequence[StepRunner],
    arena: ByteArena,
    *,
    max_batch_size: int,
    progress: Progress,
) -> None:
    """Launch the steps. Args: lanes: of a `Batch`, in which no sequence is placed; none is afterwards."""
    seen: set[Hashable] = set()
    begin_s, sizes = time.monotonic(), batch_sizes(max_batch_size)
    for prompt in warm_prompts(model, PROMPT_TOKENS[0], progress):
        try:
            with _placed(model, arena, prompt) as caches:
                kinds = tuple(map(_kind, caches))
                if kinds in seen:
                    continue
                runner = lanes[lane_of(caches, 0) % len(lanes)]
                in_torch = not seen  # the first kind has every step, for the kernels beside attention
                seen.add(kinds)
                for params in SAMPLING:
                    given = StepInput(
                        caches=caches,
                        num_appended=0,
                        token_id=0,
                        position=prompt.resolved.num_prompt_tokens,
                        num_left=NEW_TOKENS - 1,
                        stop_ids=frozenset(model.spec.eos_token_ids),
                        sampler=SequenceSampler(params, (0,), model.spec.vocab_size),
                    )
                    if not _warm_up_sizes(runner, given, sizes, in_torch=in_torch):
                        break
                if any(isinstance(cache.batched(0), SparseRows) for cache in caches):
                    _warm_up_selection(model)
        except (CapacityExceeded, InvalidRequest):
            _log.warning("the arena has no room to warm up a method", method=prompt.method)
        except Exception as error:
            for runner in lanes:
                runner.reset()
            if is_lost(error):
                raise
            _log.warning(
                "steps of a method are not warmed up",
                method=prompt.method,
                error=f"{type(error).__name__}: {error}",
            )
    progress(1.0, "")
    _log.info(
        "warmed up",
        kinds=len(seen),
        captures=lanes[0].captures.number,
        seconds=round(time.monotonic() - begin_s, 2),
        captures_s=round(lanes[0].captures.seconds, 2),
    )


@contextmanager
def _placed(model: LanguageModel, arena: ByteArena, prompt: WarmPrompt) -> Iterator[tuple[LayerCache, ...]]:
    """Place a prompt's layers in the arena while the context lasts."""
    layout = sequence_layout(make_formats(model.spec, prompt.resolved))
    allocation = arena.reserve(layout.size_bytes, owner="warm-up", state="running")
    try:
        buffer = arena.buffer(allocation)
        layers = zip(layout.layers, prompt.tensors, strict=True)
        yield tuple(layer.place(buffer, tensors) for layer, tensors in layers)
    finally:
        arena.free(allocation)


def _kind(cache: LayerCache) -> Hashable:
    """Return a cache's kind. Caches of equal kinds have the same launches."""
    rows = cache.batched(0)
    if rows is None:
        return cache.name
    return type(rows), SparseSize.of(rows) if isinstance(rows, SparseRows) else None


def _warm_up_sizes(runner: StepRunner, given: StepInput, sizes: list[int], *, in_torch: bool) -> bool:
    """Take a step at each size. All sequences have the same memory; what they write there does not matter.

    Args: in_torch: False: end with the first step in which batched kernels do not attend to all rows.
    Returns: False if it has ended so.
    """
    slots: list[int] = []
    try:
        for size in sizes:
            while len(slots) < size:
                slots.append(runner.join(given))
            runner.launch().wait(_STEP_TIMEOUT_S)
            if not in_torch and not runner.rows_are_launched:
                return False
        return True
    finally:
        for slot in reversed(slots):
            with suppress(KeyError):
                runner.leave(slot)


def _warm_up_selection(model: LanguageModel) -> None:
    """Run all kernels of hybrid sparse attention, which has others for other budgets and lengths, over a head
    without rows."""
    if dispatch.planned_path("hsa", model.device) == "torch":
        return
    # a CPU install has no Triton
    from kvferry.kernels.hsa.triton_kernel import append_and_attend_batch

    heads = torch.tensor([EMPTY_HEAD], device=model.device)
    for shape in model_shapes(model.spec, model.device):
        zeros = partial(torch.zeros, dtype=shape.dtype, device=shape.device)
        queries, row = zeros(1, 1, shape.group_size, shape.head_dim), zeros(1, 1, shape.head_dim)
        output = torch.zeros_like(queries)
        for size in SparseSize.every_kernel(shape.head_dim, model.spec.max_model_len):
            launch = partial(
                append_and_attend_batch,
                queries,
                row.view(-1),
                heads,
                HsaScratch.of(size, output),
                scaling=shape.head_dim**-0.5,
                output=output,
                new_keys=row,
                new_values=row,
            )
            attempt("hsa", launch, lambda: None)
