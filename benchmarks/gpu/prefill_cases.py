"""Prefill end to end: what each method adds to a prompt's pass, and how much of the copies hides behind it.

The pass is the whole model over one prompt, as the prefill service runs it; after each layer the method
compresses, and what is kept goes to the host as the service brings it there. Nothing is shipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from decode_cases import Method, methods_of, refuse
from timing import Clock
from torch import Tensor

from kvferry.services.prefill.host_copies import Arrived, HostCopies
from kvferry.shared.compression.compress import WaitingLayer, compress_waiting, measure_layer
from kvferry.shared.compression.draft import greedy, run_draft
from kvferry.shared.compression.draft_steps import DraftSteps
from kvferry.shared.compression.formats import encode_layer, make_formats, num_observed_queries
from kvferry.shared.compression.formats.interface import LayerFormat
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, num_draft_tokens
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.bridge import TransformersModel


def prefill_methods(rows: int, *, widths_window: int = 32) -> tuple[Method, ...]:
    """The methods of the table, each with a budget of this many tokens."""
    known = {method.name: method for method in methods_of(rows, widths_window=widths_window)}
    return tuple(
        known.get(name) or Method(name=name, preset=name, rows=rows)
        for name in ("rocketkv", "snapkv", "compactor", "rdkv", "rdkv-draft", "d2o")
    )


class _Observer:
    """Compresses each layer and copies what is kept, one layer behind; or does less of it.

    Args: resolved: None where nothing is compressed; copies: None where nothing is copied; drafts: of all
    passes.
    """

    def __init__(
        self,
        model: TransformersModel,
        resolved: ResolvedPlan | None,
        copies: HostCopies | None,
        drafts: DraftSteps,
    ) -> None:
        self._model = model
        self._resolved = resolved
        self._copies = copies
        self._drafts = drafts
        self._leaving: list[Arrived] = []
        self._formats: tuple[LayerFormat, ...] = ()
        if resolved is not None:
            self._formats = make_formats(model.spec, resolved)
        self._num_draft = num_draft_tokens(resolved) if resolved is not None else 0
        self._waiting: list[WaitingLayer] = []
        self.num_bytes = 0

    def history(self, layer: int) -> None:
        return None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        if self._resolved is None:
            return
        inputs = LayerInputs(
            layer=layer,
            queries=queries,
            keys=keys,
            values=values,
            scaling=scaling,
            unrotate=lambda rows: self._model.pre_rope_keys(layer, rows),
        )
        if self._num_draft:
            self._waiting.append(WaitingLayer(inputs=replace(inputs, queries=queries.clone())))
        elif is_measured(self._resolved):
            self._waiting.append(measure_layer(self._resolved, inputs))
        else:
            self._copy(encode_layer(self._resolved, self._formats[layer], inputs).tensors)

    def _copy(self, tensors: Sequence[Tensor]) -> None:
        if self._copies is None:
            return
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        self._leaving.append(self._copies.start(tensors))
        while len(self._leaving) > 1:  # one layer behind, as the service
            self._leaving.pop(0)()

    @property
    def num_queries(self) -> int | None:
        """The last queries that the method looks at; None: all."""
        return None if self._resolved is None else num_observed_queries(self._resolved, self._formats, None)

    def finish(self, logits: Tensor) -> None:
        """Compress the layers that wait. Args: logits: float32 `[V]` after the prompt."""
        if self._num_draft:
            assert self._resolved is not None
            draw = greedy(self._model.spec, self._num_draft)
            inputs = [layer.inputs for layer in self._waiting]
            drafted = run_draft(self._model, inputs, logits=logits, draw=draw, steps=self._drafts)
            for layer in drafted.layers:
                self._copy(encode_layer(self._resolved, self._formats[layer.layer], layer).tensors)
        elif self._waiting:
            assert self._resolved is not None
            for tensors in compress_waiting(self._model.spec, self._resolved, self._waiting)[1]:
                self._copy(list(tensors.values()))
        while self._leaving:
            self._leaving.pop(0)()


class PrefillBench:
    """Measures methods on one model and one prompt of random tokens."""

    def __init__(self, model: TransformersModel, clock: Clock, num_tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, model.spec.vocab_size, (num_tokens,), generator=generator)
        self._model = model
        self._clock = clock
        self._ids = ids.to(clock.device)
        self._drafts = DraftSteps(model, clock.step_device(), warn=refuse)
        self._base_s: float | None = None
        self._resolved: ResolvedPlan | None = None

    @torch.inference_mode()
    def measure(self, method: Method) -> dict[str, Any]:
        """One row."""
        if self._base_s is None:
            if self._clock.warms_up:
                self._pass(None, None)  # compiles, allocates and chooses algorithms
            self._base_s, _ = self._pass(None, None)
        spec, copies = self._model.spec, self._clock.copies()
        resolved = self._resolved = resolve_plan(
            method.plan(),
            num_prompt_tokens=len(self._ids),
            max_new_tokens=2,
            num_layers=spec.num_layers,
            head_dim=spec.head_dim,
        )
        copied_s, num_bytes = self._pass(resolved, copies)  # pins memory, as later passes need not
        if not self._clock.warms_up:
            compressed_s, _ = self._pass(resolved, None)
        else:
            # There and back, so that what drifts in one direction falls on both alike.
            passes = [self._pass(resolved, way)[0] for way in (None, copies, copies, None)]
            compressed_s, copied_s = (passes[0] + passes[3]) / 2, (passes[1] + passes[2]) / 2
            self._copies_alone_s(num_bytes, copies)
        alone_s = self._copies_alone_s(num_bytes, copies)
        return {
            "model": spec.name,
            "method": method.name,
            "tokens": len(self._ids),
            "prefill_s": self._base_s,
            "with_method_s": compressed_s,
            "overhead_percent": 100 * (compressed_s / self._base_s - 1),
            "with_copies_s": copied_s,
            "copied_bytes": num_bytes,
            "copies_alone_s": alone_s,
            "copies_hidden": 1 - (copied_s - compressed_s) / alone_s,
        }

    @torch.inference_mode()
    def profile(self) -> list[dict[str, Any]]:
        """What the device runs in a pass with the method that was measured last."""
        return self._clock.profile(lambda: self._pass(self._resolved, None), 1)

    def _pass(self, resolved: ResolvedPlan | None, copies: HostCopies | None) -> tuple[float, int]:
        observer = _Observer(self._model, resolved, copies, self._drafts)

        def run() -> None:
            logits = self._model.prefill(
                self._ids, start=0, observer=observer, num_queries=observer.num_queries
            )
            observer.finish(logits)

        return self._clock.elapsed_s(run), observer.num_bytes

    def _copies_alone_s(self, num_bytes: int, copies: HostCopies) -> float:
        """The same bytes to the host in as many copies, nothing beside them."""
        layers: Sequence[Tensor] = [
            torch.zeros(max(num_bytes // self._model.spec.num_layers, 1), dtype=torch.uint8).to(
                self._clock.device
            )
        ] * self._model.spec.num_layers
        return self._clock.elapsed_s(lambda: [copies.start([layer])() for layer in layers])
