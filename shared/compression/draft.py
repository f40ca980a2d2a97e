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

from kvferry.shared.compression.draft_steps import Draft, DraftSteps
from kvferry.shared.compression.interface import Ahead, LayerInputs
from kvferry.shared.compression.plan import MOST_DRAFT_TOKENS
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
    steps: DraftSteps | None = None,
) -> Drafted:
    """Run the tokens of a draft after a prompt. It ends at the end of the model's window, or after
    MOST_DRAFT_TOKENS, at the latest.

    Args:
        layers: of the whole prompt, one for each layer that attends; on any device, where they stay.
        logits: float32 `[V]` after the prompt.
        draw: called with these logits, then with those after each token of the draft.
        states: after the prompt, by layer, without a batch's dimension.
        before_token: called before each token is run; may raise to end the draft, or run another one.
        steps: of the model; serve the next draft, whatever this one raises. None: made for this one.
    """
    num_tokens, tokens = layers[0].keys.shape[1], list[DraftToken]()
    num_left = model.spec.max_model_len - num_tokens
    draft: Draft | _PromptPasses | None = None
    try:
        for _ in range(num_left):
            if (token_id := draw(logits)) is None or len(tokens) == MOST_DRAFT_TOKENS:
                break
            before_token()
            if draft is None and model.num_ranks > 1:
                draft = _PromptPasses(model, layers)
            elif draft is None:
                room = min(num_left, MOST_DRAFT_TOKENS)
                draft = (steps or DraftSteps(model)).begin(layers, states or {}, room=room)
            logits = draft.run(token_id)
            tokens.append(DraftToken(token_id=token_id, logits=logits, states=dict(draft.states)))
        ahead = None if draft is None else draft.ahead
        layers = [replace(inputs, ahead=None if ahead is None else ahead(inputs.layer)) for inputs in layers]
        return Drafted(layers=tuple(layers), tokens=tuple(tokens))
    finally:
        if draft is not None:
            draft.end()


def greedy(spec: ModelSpec, num_tokens: int) -> Draw:
    """Draw the most likely tokens, at most so many, and stop before an end-of-sequence token."""
    left = iter(range(num_tokens))

    def draw(logits: Tensor) -> int | None:
        token = int(logits.argmax())
        return None if token in spec.eos_token_ids or next(left, None) is None else token

    return draw


class _PromptPasses:
    """Runs each token as a prompt's pass, in a model of several ranks: a step's attention is in the ranks,
    which do not have the prompt. Implements `PrefillObserver`.

    Attributes: states: none; no such model has them.
    """

    states: Mapping[int, Tensors] = {}

    def __init__(self, model: LanguageModel, layers: Sequence[LayerInputs]) -> None:
        self._model = model
        self._rows = {inputs.layer: (inputs.keys, inputs.values) for inputs in layers}
        self._ahead: dict[int, Ahead] = {}
        self._position = layers[0].keys.shape[1]

    def run(self, token_id: int) -> Tensor:
        token = torch.tensor([token_id], device=self._model.device)
        logits = self._model.prefill(token, start=self._position, observer=self, num_queries=1)
        self._position += 1
        return logits

    def ahead(self, layer: int) -> Ahead | None:
        return self._ahead.get(layer)

    def end(self) -> None:
        """See `Draft.end`."""

    def history(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = [rows.to(self._model.device) for rows in self._rows[layer]]
        if (ahead := self.ahead(layer)) is None:
            return keys, values
        return torch.cat([keys, ahead.keys], 1), torch.cat([values, ahead.values], 1)

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        ahead = Ahead(queries=queries.clone(), keys=keys[:, -1:].clone(), values=values[:, -1:].clone())
        former = self.ahead(layer)
        self._ahead[layer] = ahead if former is None else former.followed_by(ahead)
