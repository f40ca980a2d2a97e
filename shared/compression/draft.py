"""The draft: the answer's first tokens from the full KV, before a prompt is compressed.

RDKV weighs tokens by the attention of the prompt's last queries, which know the question. The question may
not name what an answer needs after its first tokens, such as the second of two lines over which a variable is
traced. The queries of the answer's own beginning do.

    prefill of the prompt ──► K and V of all layers wait ──► `run_draft`: some tokens ──► compress

The tokens are the answer's own: prefill draws them as decode would, and ships their rows behind those of the
compressed prompt, as they are. Decode goes on after them. Where several answers share a prompt, they begin
differently, so the draft's tokens are greedy ones, which are not shipped (`greedy`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.shared.compression.interface import Ahead, LayerInputs
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import Tensors

Draw = Callable[[Tensor], int | None]
"""float32 logits `[V]` -> the next token of the draft; None: there is no further one."""


@dataclass(frozen=True, kw_only=True)
class DraftToken:
    """A token of a draft, and what comes after it: float32 logits `[V]`, and the states by layer."""

    token_id: int
    logits: Tensor
    states: Mapping[int, Tensors]


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """A prompt and its draft.

    Attributes: layers: with the draft's K, V and queries, if it has a token.
    """

    layers: tuple[LayerInputs, ...]
    tokens: tuple[DraftToken, ...]


def run_draft(
    model: LanguageModel,
    layers: Sequence[LayerInputs],
    *,
    logits: Tensor,
    draw: Draw,
    states: Mapping[int, Tensors] | None = None,
    before_token: Callable[[], None] = lambda: None,
) -> Drafted:
    """Run the tokens of a draft after a prompt. It ends at the end of the model's window at the latest.

    Args:
        layers: of the whole prompt, one for each layer that attends; on any device, where they stay.
        logits: float32 `[V]` after the prompt.
        draw: called with these logits, then with those after each token of the draft.
        states: after the prompt, by layer, without a batch's dimension.
        before_token: called before each token is run; may raise to end the draft.
    """
    draft, tokens = _Draft(model.device, layers, states or {}), list[DraftToken]()
    for position in range(layers[0].keys.shape[1], model.spec.max_model_len):
        if (token_id := draw(logits)) is None:
            break
        before_token()
        logits = model.prefill(
            torch.tensor([token_id], device=model.device),
            start=position,
            observer=draft,
            states=draft,
            num_queries=1,
        )
        tokens.append(DraftToken(token_id=token_id, logits=logits, states=dict(draft.states)))
    layers = tuple([replace(inputs, ahead=draft.ahead.get(inputs.layer)) for inputs in layers])
    return Drafted(layers=layers, tokens=tuple(tokens))


def greedy(spec: ModelSpec, num_tokens: int) -> Draw:
    """Draw the most likely tokens, at most so many, and stop before an end-of-sequence token."""
    left = iter(range(num_tokens))

    def draw(logits: Tensor) -> int | None:
        token = int(logits.argmax())
        return None if token in spec.eos_token_ids or next(left, None) is None else token

    return draw


class _Draft:
    """Implements `PrefillObserver` and `LayerStates` for passes of one token each.

    Attributes: ahead: rows of the tokens so far, by layer; states: those after them, by layer.
    """

    def __init__(
        self, device: torch.device, layers: Sequence[LayerInputs], states: Mapping[int, Tensors]
    ) -> None:
        self._device = device
        self._rows = {inputs.layer: (inputs.keys, inputs.values) for inputs in layers}
        self._on_host = {inputs.layer for inputs in layers if inputs.keys.device != device}
        self.ahead: dict[int, Ahead] = {}
        self.states = dict(states)

    def history(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._rows[layer]
        if layer not in self._on_host:
            return keys, values
        keys, values, ahead = keys.to(self._device), values.to(self._device), self.ahead.get(layer)
        if ahead is None:
            return keys, values
        return torch.cat([keys, ahead.keys], 1), torch.cat([values, ahead.values], 1)

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        if layer not in self._on_host:
            self._rows[layer] = keys, values  # the rows so far and this one: not joined again
        ahead = Ahead(queries=queries.clone(), keys=keys[:, -1:].clone(), values=values[:, -1:].clone())
        former = self.ahead.get(layer)
        self.ahead[layer] = ahead if former is None else former.followed_by(ahead)

    def load(self, layer: int) -> dict[str, Tensor]:
        return {name: tensor[None].clone() for name, tensor in self.states[layer].items()}

    def store(self, layer: int, state: Tensors) -> None:
        self.states[layer] = {name: tensor[0].clone() for name, tensor in state.items()}
