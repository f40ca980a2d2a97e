"""The oracle's prefill: compresses each layer of a prompt, and drafts if the plan does.

Private to `oracle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvferry.shared.compression.compress import (
    WaitingLayer,
    compress_prompt,
    compress_waiting,
    in_layer_order,
    measure_layer,
)
from kvferry.shared.compression.draft import Drafted, Draw, greedy, run_draft
from kvferry.shared.compression.formats import compress_layer, make_formats
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, num_draft_tokens, repeats_prompt
from kvferry.shared.compression.reconstruct import reconstruct
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.question import Question
from kvferry.tools.oracle_decode import LayerKV

if TYPE_CHECKING:
    from kvferry.tools.oracle import CapturedPrompt

States = dict[int, Tensors]
"""Layers' states by layer, of one sequence."""


class PassStates:
    """Implements `LayerStates` for one pass. Args: earlier: the states before it."""

    def __init__(self, earlier: States) -> None:
        self._earlier = earlier
        self.after: States = {}

    def load(self, layer: int) -> dict[str, Tensor] | None:
        state = self._earlier.get(layer)
        return None if state is None else {name: tensor[None].clone() for name, tensor in state.items()}

    def store(self, layer: int, state: Tensors) -> None:
        self.after[layer] = {name: tensor[0].clone() for name, tensor in state.items()}


class Capture:
    """Records each layer's inputs, and gives the model the K and V of an earlier capture."""

    def __init__(
        self,
        model: LanguageModel,
        earlier: CapturedPrompt | None,
        num_reused: int,
        question: Question | None,
    ) -> None:
        self._model = model
        self._earlier = earlier
        self._num_reused = num_reused
        self._question = question
        self.layers: list[LayerInputs] = []

    def history(self, layer: int) -> LayerKV | None:
        if self._earlier is None or self._num_reused == 0:
            return None
        inputs = self._earlier.layers[layer]
        return inputs.keys[:, : self._num_reused], inputs.values[:, : self._num_reused]

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        pre_rope_keys = self._model.pre_rope_keys
        inputs = LayerInputs.of(pre_rope_keys, layer, queries, keys, values, scaling, self._question)
        self.layers.append(inputs)


class OraclePrefill:
    """Compresses each layer when it is done, or all at the end if they are measured; stores the full KV."""

    def __init__(
        self,
        model: LanguageModel,
        resolved: ResolvedPlan,
        history: dict[int, LayerKV],
        question: Question | None,
    ) -> None:
        self._model = model
        self._resolved = resolved
        self._history = history
        self._question = question
        self._formats = make_formats(model.spec, resolved)
        self._num_draft = num_draft_tokens(resolved)
        self._continued: list[LayerInputs] = []
        self._waiting: list[WaitingLayer] = []
        self._compressed: dict[int, Tensors] = {}
        self.full: dict[int, LayerKV] = {}

    def history(self, layer: int) -> LayerKV | None:
        return self._history[layer] if self._history else None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        full = self.full[layer] = keys.clone(), values.clone()
        inputs = LayerInputs.of(self._model.pre_rope_keys, layer, queries, *full, scaling, self._question)
        if self._num_draft or repeats_prompt(self._resolved):
            self._continued.append(replace(inputs, queries=queries.clone()))
        elif is_measured(self._resolved):
            self._waiting.append(measure_layer(self._resolved, inputs))
        else:
            self._compressed[layer] = compress_layer(self._resolved, self._formats[layer], inputs)

    def finish(
        self, prompt: Sequence[int], states: States, logits: Tensor, draw: Draw | None
    ) -> tuple[ResolvedPlan, tuple[Tensors, ...], Drafted | None]:
        """Return, after the last layer, the plan with each layer's rows, all layers' tensors and the draft.

        Args: states, logits: after the prompt; draw: the draft's tokens; None: greedy ones that nobody wants.
        """
        if self._continued:
            layers: Sequence[LayerInputs] = reconstruct(
                self._model, self._resolved, self._continued, token_ids=prompt, states=states
            )
            drafted: Drafted | None = None
            if self._num_draft:
                drafted = run_draft(
                    self._model,
                    layers,
                    logits=logits,
                    draw=draw or greedy(self._model.spec, self._num_draft),
                    states=states,
                )
                layers = drafted.layers
            compressed = compress_prompt(self._model.spec, self._resolved, layers, states)
            return *compressed, drafted if draw is not None else None
        if self._waiting:
            return *compress_waiting(self._model.spec, self._resolved, self._waiting, states), None
        return self._resolved, in_layer_order(self._model.spec, self._compressed, states), None
