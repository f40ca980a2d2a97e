"""What a worker runs before it is ready, so that no request waits for a compiler or a first allocation.

A prompt of its own goes through the model and through every method that the model can use. Prefill stops
there; decode takes steps over the compressed prompts (`services/decode/warm_up.py`). Only done where kernels
are compiled, which they are not on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
from kvferry.shared.compression.compress import compress_prompt
from kvferry.shared.compression.draft import Draw, run_draft
from kvferry.shared.compression.draft_steps import DraftSteps
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, ResolvedPlan, num_draft_tokens
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.compression.reconstruct import reconstruct
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.device.kernel_paths import Role
from kvferry.shared.device.self_test import model_shapes, ops_with_kernels
from kvferry.shared.model.interface import LanguageModel

_log = structlog.get_logger(__name__)

PROMPT_TOKENS = (528, 531)
"""Longer than a chunk and a window of any method. Kernels are compiled once for sizes that 16 divides, and
once for others."""
TILE_ROWS = (16, 32, 64, 128)
"""Rows of the tiles that prefill's kernels choose from, by how many rows there are."""
NEW_TOKENS = 8
Progress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and the current step."""


def shown_progress(gauge: Gauge) -> Progress:
    """Show progress in a metric and in the log. Where nothing needs warming up, it is 1 at once."""

    def show(done: float, what: str) -> None:
        gauge.set(done)
        _log.info("warm-up", done=f"{done:.0%}", method=what)

    return show


@dataclass(frozen=True, kw_only=True)
class WarmPrompt:
    """A prompt that a method has compressed."""

    method: str
    resolved: ResolvedPlan
    tensors: tuple[Tensors, ...]


def needs_warm_up(role: Role, model: LanguageModel) -> bool:
    """Return whether a worker has kernels to compile."""
    return any(ops_with_kernels(role, shape) for shape in model_shapes(model.spec, model.device))


def warm_prompts(
    model: LanguageModel, num_tokens: int, progress: Progress, drafts: DraftSteps | None = None
) -> Iterator[WarmPrompt]:
    """Run a prompt through the model once, and compress it by every method. A method that fails is left out:
    requests will get its error. Args: drafts: see `run_draft`."""
    spec = model.spec
    num_tokens = max(min(num_tokens, spec.max_model_len - 2 * NEW_TOKENS), 1)
    methods = applicable_methods(spec.layers)
    pass_ = CollectingPass(model)
    token_ids = torch.arange(num_tokens, device=model.device) % spec.vocab_size
    logits = model.prefill(token_ids, start=0, observer=pass_, states=pass_ if spec.state_layers else None)
    for number, method in enumerate(methods):
        progress(number / len(methods), method)
        try:
            resolved = resolve_plan(
                plan_for(method, budget=_budget(method, num_tokens)),
                num_prompt_tokens=num_tokens,
                max_new_tokens=NEW_TOKENS,
                num_layers=spec.num_layers,
                head_dim=spec.head_dim,
                layers=spec.layers,
            )
            layers = reconstruct(
                model, resolved, pass_.layers, token_ids=token_ids.tolist(), states=pass_.states
            )
            if num_draft := num_draft_tokens(resolved):
                draw = _any_tokens(num_draft)
                drafted = run_draft(
                    model, layers, logits=logits, draw=draw, states=pass_.states, steps=drafts
                )
                layers = list(drafted.layers)
            resolved, tensors = compress_prompt(spec, resolved, layers, pass_.states)
        except Exception as error:
            if is_lost(error):
                raise
            _log.warning("a method is not warmed up", method=method, error=f"{type(error).__name__}: {error}")
            continue
        yield WarmPrompt(method=method, resolved=resolved, tensors=tensors)


def warm_prefill(model: LanguageModel, progress: Progress, drafts: DraftSteps | None = None) -> None:
    """Do all of prefill's warm-up: prompts, and kernels for other options and lengths than theirs.

    Args: drafts: those of requests, whose step is captured.
    """
    begin_s = time.monotonic()
    for num_tokens in PROMPT_TOKENS:
        for _ in warm_prompts(model, num_tokens, progress, drafts):
            pass
    for shape in model_shapes(model.spec, model.device):
        _warm_tiles(shape, ops_with_kernels("prefill", shape))
    _log.info("warmed up", seconds=round(time.monotonic() - begin_s, 2))


def _warm_tiles(shape: BatchShape, ops: Sequence[str]) -> None:
    """Run each tile size: scoring kernels have smaller tiles for fewer queries and shorter chunks."""

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


def _any_tokens(number: int) -> Draw:
    """Draw so many tokens, whatever the logits say: a greedy draft may end at once."""
    left = iter([0] * number)
    return lambda logits: next(left, None)


def _budget(method: str, num_tokens: int) -> Budget | None:
    """Return a budget of a quarter of the prompt: with the preset's, all of it would be retained as it is."""
    return Budget(tokens=max(num_tokens // 4, 1)) if preset(method).takes_budget else None


@dataclass
class CollectingPass:
    """Implements `PrefillObserver` and `LayerStates`: collects the layers of a prompt without history."""

    model: LanguageModel
    layers: list[LayerInputs] = field(default_factory=list)
    states: dict[int, Tensors] = field(default_factory=dict)

    def history(self, layer: int) -> None:
        return None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        pre_rope_keys = self.model.pre_rope_keys
        self.layers.append(LayerInputs.of(pre_rope_keys, layer, queries, keys, values, scaling))

    def load(self, layer: int) -> None:
        return None

    def store(self, layer: int, state: Tensors) -> None:
        self.states[layer] = {name: tensor[0].contiguous() for name, tensor in state.items()}
