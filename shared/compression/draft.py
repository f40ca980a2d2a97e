"""A draft of the answer's first tokens, from the full KV, before a prompt is compressed.

RDKV weighs tokens by the attention of the prompt's last queries, which know the question. The question may
not name what an answer needs after its first tokens, such as the second of two lines over which a variable is
traced. The queries of a draft do.

    prefill of the prompt ──► K and V of all layers wait ──► `add_draft`: some greedy tokens ──► compress

Tokens drafted are not shipped and not stored: decode generates the answer from the compressed prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.shared.compression.interface import Ahead, LayerInputs
from kvferry.shared.model.interface import LanguageModel

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import Tensors


def add_draft(
    model: LanguageModel,
    layers: Sequence[LayerInputs],
    *,
    logits: Tensor,
    num_draft: int,
    states: Mapping[int, Tensors] | None = None,
    before_token: Callable[[], None] = lambda: None,
) -> list[LayerInputs]:
    """The layers with the K and the queries of the draft's tokens.

    The draft ends before an end-of-sequence token and at the end of the model's window; it may be empty.

    Args:
        layers: of the whole prompt, one for each layer that attends; on any device, where they stay.
        logits: float32 `[V]` after the prompt.
        num_draft: the most tokens of the draft.
        states: after the prompt, by layer, without a batch's dimension.
        before_token: called before each token is run; may raise to end the draft.
    """
    draft = _Draft(model.device, layers, states or {})
    num_tokens = layers[0].keys.shape[1]
    for position in range(num_tokens, min(num_tokens + num_draft, model.spec.max_model_len)):
        token = int(logits.argmax())
        if token in model.spec.eos_token_ids:
            break
        before_token()
        logits = model.prefill(
            torch.tensor([token], device=model.device),
            start=position,
            observer=draft,
            states=draft,
            num_queries=1,
        )
    return [replace(its, ahead=draft.ahead(its.layer)) for its in layers]


class _Draft:
    """Implements `PrefillObserver` and `LayerStates` for passes of one token each."""

    def __init__(
        self, device: torch.device, layers: Sequence[LayerInputs], states: Mapping[int, Tensors]
    ) -> None:
        self._device = device
        self._prompt = {its.layer: its for its in layers}
        self._states = dict(states)
        self._queries: dict[int, list[Tensor]] = {its.layer: [] for its in layers}
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {its.layer: [] for its in layers}

    def history(self, layer: int) -> tuple[Tensor, Tensor]:
        prompt = self._prompt[layer]
        rows = [(prompt.keys.to(self._device), prompt.values.to(self._device)), *self._rows[layer]]
        if len(rows) == 1:
            return rows[0]
        keys, values = (torch.cat(its, 1) for its in zip(*rows, strict=True))
        return keys, values

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self._queries[layer].append(queries.clone())
        self._rows[layer].append((keys[:, -1:].clone(), values[:, -1:].clone()))

    def load(self, layer: int) -> dict[str, Tensor]:
        return {name: its[None].clone() for name, its in self._states[layer].items()}

    def store(self, layer: int, state: Tensors) -> None:
        self._states[layer] = {name: its[0].clone() for name, its in state.items()}

    def ahead(self, layer: int) -> Ahead | None:
        """See `LayerInputs.ahead`."""
        if not self._queries[layer]:
            return None
        keys = torch.cat([keys for keys, _ in self._rows[layer]], 1)
        return Ahead(queries=torch.cat(self._queries[layer], 2), keys=keys)
