"""What a worker runs before it is ready, so that no request waits for a compiler or a first allocation.

A prompt of its own goes through the model and through every method that the model can use. Prefill stops
there; decode takes steps over the compressed prompts (`services/decode/warm_up.py`). Only where kernels are
compiled, which is not so on a CPU.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog
import torch
from prometheus_client import Gauge
from torch import Tensor

from kvferry.kernels.chunk_scores import chunk_scores
from kvferry.kernels.column_sums import column_sums, window_scores
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.quarantine import is_lost
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.whole_prompt import compress_prompt
from kvferry.shared.kernel_paths import Role
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.self_test import model_shapes, ops_with_kernels

_log = structlog.get_logger(__name__)

PROMPT_TOKENS = (528, 531)
"""Longer than a chunk and a window of any method. Kernels are compiled once for sizes that 16 divides, and
once for others."""
TILE_ROWS = (16, 32, 64, 128)
"""Rows of the tiles that prefill's kernels choose from, by how many rows there are."""
NEW_TOKENS = 8
Progress = Callable[[float, str], None]
"""Called with the part that is done, 0 to 1, and what is done now."""


def shown_progress(gauge: Gauge) -> Progress:
    """Shows progress in a metric and in the log. Where nothing is to be warmed up, it is 1 at once."""

    def show(done: float, what: str) -> None:
        gauge.set(done)
        _log.info("warm-up", done=f"{done:.0%}", method=what)

    return show


class PhaseSeconds:
    """Seconds of this thread by phase, for the log. What a phase leaves to the device counts in the one that
    waits for it."""

    def __init__(self) -> None:
        self._seconds = defaultdict[str, float](float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - begin_s

    def move(self, seconds: float, *, source: str, target: str) -> None:
        """Count seconds of one phase as another's."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def log_fields(self) -> dict[str, float]:
        """`<phase>_s`, rounded."""
        return {f"{phase}_s": round(seconds, 2) for phase, seconds in self._seconds.items()}


@dataclass(frozen=True, kw_only=True)
class WarmPrompt:
    """A prompt that a method has compressed."""

    method: str
    resolved: ResolvedPlan
    tensors: tuple[Tensors, ...]


def needs_warm_up(role: Role, model: LanguageModel) -> bool:
    """Whether a worker has kernels to compile."""
    return any(ops_with_kernels(role, shape) for shape in model_shapes(model.spec, model.device))


def warm_prompts(
    model: LanguageModel,
    num_tokens: int,
    progress: Progress,
    *,
    seconds: PhaseSeconds | None = None,
    every_method: bool = True,
) -> Iterator[WarmPrompt]:
    """Run a prompt through the model once, and compress it by each method. A method that fails is left out:
    requests will have its error.

    Args:
        seconds: gets the phases "prompt" and "compression".
        every_method: False: one of each kind of cache, which is all that decode knows of a method.
    """
    spec, seconds = model.spec, seconds or PhaseSeconds()
    num_tokens = max(min(num_tokens, spec.max_model_len - 2 * NEW_TOKENS), 1)
    plans = dict[str, ResolvedPlan]()
    for method in applicable_methods(spec.layers):
        with _left_out_if_it_fails(method):
            plans[method] = _resolved(model, method, num_tokens)
    if not every_method:
        plans = _one_of_each_cache(plans)
    pass_ = PromptPass(model)
    with seconds("prompt"):
        token_ids = torch.arange(num_tokens, device=model.device) % spec.vocab_size
        model.prefill(token_ids, start=0, observer=pass_, states=pass_ if spec.state_layers else None)
    for number, (method, plan) in enumerate(plans.items()):
        progress(number / len(plans), method)
        prompt: WarmPrompt | None = None
        with _left_out_if_it_fails(method), seconds("compression"):
            resolved, tensors = compress_prompt(spec, plan, pass_.layers, pass_.states)
            prompt = WarmPrompt(method=method, resolved=resolved, tensors=tensors)
        if prompt is not None:
            yield prompt


def _resolved(model: LanguageModel, method: str, num_tokens: int) -> ResolvedPlan:
    spec = model.spec
    return resolve_plan(
        plan_for(method, budget=_budget(method, num_tokens)),
        num_prompt_tokens=num_tokens,
        max_new_tokens=NEW_TOKENS,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
        layers=spec.layers,
    )


@contextmanager
def _left_out_if_it_fails(method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_lost(error):
            raise
        _log.warning("a method is not warmed up", method=method, error=f"{type(error).__name__}: {error}")


def _one_of_each_cache(plans: dict[str, ResolvedPlan]) -> dict[str, ResolvedPlan]:
    """The plans of methods that decode stores or attends differently. Of those with one kind of cache, one
    without a scorer, if there is one, takes least of prefill's time and kernels."""
    chosen = dict[Hashable, str]()
    for method in sorted(plans, key=lambda method: plans[method].plan.scorer is not None):
        chosen.setdefault(_cache_of(plans[method]), method)
    return {method: plan for method, plan in plans.items() if method in chosen.values()}


def _cache_of(plan: ResolvedPlan) -> Hashable:
    """What decode's kernels depend on: the layers' formats and attentions, not how many rows they have."""
    return tuple(
        (_hashable(its.representation), _hashable(its.attention), its.generated is None)
        for its in plan.layers
    )


def _hashable(part: Part) -> Hashable:
    return part.name, tuple(sorted(part.params.items()))


def warm_prefill(model: LanguageModel, progress: Progress) -> None:
    """All that prefill warms up: prompts, and the kernels that other options and lengths than theirs need."""
    seconds = PhaseSeconds()
    for num_tokens in PROMPT_TOKENS:
        for _ in warm_prompts(model, num_tokens, progress, seconds=seconds):
            pass
    with seconds("tiles"):
        for shape in model_shapes(model.spec, model.device):
            _warm_tiles(shape, ops_with_kernels("prefill", shape))
    _log.info("warmed up", **seconds.log_fields())


def _warm_tiles(shape: BatchShape, ops: Sequence[str]) -> None:
    """Kernels that score tokens have smaller tiles for fewer queries and shorter chunks: run each."""

    def rows_of(*size: int) -> Tensor:
        return torch.ones(shape.num_kv_heads, *size, shape.head_dim, dtype=shape.dtype, device=shape.device)

    keys = rows_of(TILE_ROWS[-1])
    for rows in TILE_ROWS:
        window = rows_of(shape.group_size, max(rows // shape.group_size, 1))
        if "window_scores" in ops:
            window_scores(window, keys, scaling=1.0)
        if "column_sums" in ops:
            column_sums(window, keys, scaling=1.0)
        if "chunk_scores" in ops:
            chunk_scores(rows_of(shape.group_size, TILE_ROWS[-1]), keys, chunk_tokens=rows, scaling=1.0)
            for chunk_tokens in TILE_ROWS:
                queries = rows_of(shape.group_size, rows)
                chunk_scores(queries, keys, chunk_tokens=chunk_tokens, scaling=1.0, shared=True)


def _budget(method: str, num_tokens: int) -> Budget | None:
    """A quarter of the prompt: with the preset's, all of it would be retained as it is."""
    return Budget(tokens=max(num_tokens // 4, 1)) if preset(method).takes_budget else None


@dataclass
class PromptPass:
    """Implements `PrefillObserver` and `LayerStates`: collects the layers of a prompt without history."""

    model: LanguageModel
    layers: list[LayerInputs] = field(default_factory=list)
    states: dict[int, Tensors] = field(default_factory=dict)

    def history(self, layer: int) -> None:
        return None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.layers.append(
            LayerInputs(
                layer=layer,
                queries=queries,
                keys=keys,
                values=values,
                scaling=scaling,
                unrotate=lambda rows: self.model.pre_rope_keys(layer, rows),
            )
        )

    def load(self, layer: int) -> None:
        return None

    def store(self, layer: int, state: Tensors) -> None:
        self.states[layer] = {name: its[0].contiguous() for name, its in state.items()}
