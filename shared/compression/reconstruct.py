"""The attention that a prompt's tokens get while the model repeats the prompt, before it is compressed.

KVzip (Kim et al. 2025) finds that what a model reads to write a text down again includes what later questions
need of it, whatever they are. So the scorer "reconstruction" does not use the question; it is for documents
that are compressed once and asked about often.

    prefill of the prompt ──► K and V of all layers wait ──► `reconstruct`: the prompt again ──► compress

This takes longer than the prompt's own pass: as many tokens are run, and each of them attends to the whole
prompt. Nothing of these passes is shipped or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.kernels.column_sums import column_maxima
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan, repeats_prompt, sharing_layers
from kvferry.shared.compression.scorers import ReconstructionScorer
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.interface import LanguageModel

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import Tensors

_LEAST_CHUNK = 64
"""A prompt may be repeated in pieces of this many tokens, and not in smaller ones: each is a pass."""


def reconstruct(
    model: LanguageModel,
    resolved: ResolvedPlan,
    layers: Sequence[LayerInputs],
    *,
    token_ids: Sequence[int],
    states: Mapping[int, Tensors] | None = None,
    before_chunk: Callable[[int], None] = lambda begin: None,
) -> list[LayerInputs]:
    """Return the layers, scored ones with `LayerInputs.repeated`; unchanged if the plan needs no repetition.

    The prompt's tokens are run again after it, in chunks of c, each behind the l tokens that lead to it in
    the prompt. Such a pass attends to the whole prompt and, causally, to itself. With its queries q_i and its
    keys K_own, the keys K_m of chunk m in the prompt, and K_first of the first tokens before that chunk,

    `r_t = max_{g, i} softmax([K_first; K_m; K_own] q_{g,i} * scaling)_t` for the tokens t of chunk m,

    where no query sees a later key of its pass. Other keys of the prompt are left out, as in the paper, so
    that scores take time in proportion to the prompt.

    Deviation: in the paper a pass begins with words ("Repeat the previous context exactly", or "the part of
    the previous context" that starts with the lead). Prefill has tokens and no words, so only the lead
    prompts the model, and before the first chunk nothing does.

    Deviation: the authors' K_first is the system prompt, which they do not score. Here the whole prompt is
    repeated and scored, and K_first has as many tokens as the scorer protects.

    Args:
        layers: of the whole prompt, one for each layer that attends; on any device, where they stay.
        token_ids: the prompt's.
        states: after the prompt, by layer, without a batch's dimension.
        before_chunk: called before each pass with the position of its chunk; may raise to end them.

    Raises: InvalidRequest: see `chunk_tokens`.
    """
    if not repeats_prompt(resolved):
        return list(layers)
    scorer, chunk = _scorer(resolved), chunk_tokens(resolved, model.spec.max_model_len)
    passes = _Passes(model.device, layers, states or {}, sharing_layers(resolved), scorer.sinks)
    prompt = torch.tensor(list(token_ids), dtype=torch.int64, device=model.device)
    for begin in range(0, len(prompt), chunk):
        before_chunk(begin)
        passes.chunk = begin, min(begin + chunk, len(prompt))
        led = prompt[max(begin - scorer.lead_tokens, 0) : begin + chunk]
        model.prefill(led, start=len(prompt), observer=passes, states=passes)
    return [replace(inputs, repeated=passes.attention(inputs.layer)) for inputs in layers]


def chunk_tokens(resolved: ResolvedPlan, max_model_len: int) -> int:
    """Return how many tokens of the prompt a pass repeats: the plan's number, or as many as the model's
    window has room for after the prompt.

    Raises: InvalidRequest: that is less than 64 tokens, and not all of the prompt.
    """
    scorer, num_tokens = _scorer(resolved), resolved.num_prompt_tokens
    room = max_model_len - num_tokens
    if num_tokens <= min(scorer.chunk_tokens, room):
        return num_tokens
    chunk, least = min(scorer.chunk_tokens, room - scorer.lead_tokens), min(scorer.chunk_tokens, _LEAST_CHUNK)
    if chunk < least:
        raise InvalidRequest(
            f"method {resolved.method!r} repeats the prompt behind it; after {num_tokens} tokens the model's "
            f"window of {max_model_len} has room for {room}, and it must be at least "
            f"{min(least + scorer.lead_tokens, num_tokens)}",
            param="kv_compression.method",
        )
    return chunk


def _scorer(resolved: ResolvedPlan) -> ReconstructionScorer:
    part = resolved.plan.scorer
    assert part is not None, f"method {resolved.method} has no scorer"
    return ReconstructionScorer.from_params(part.params, 1)


class _Passes:
    """Implements `PrefillObserver` and `LayerStates` for passes that each continue the prompt.

    Attributes: chunk: where the repeated chunk begins and ends in the prompt.
    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[LayerInputs],
        states: Mapping[int, Tensors],
        scored: Sequence[int],
        num_first: int,
    ) -> None:
        self.chunk = 0, 0
        self._device = device
        self._prompt = {inputs.layer: inputs for inputs in layers}
        self._states = states
        self._attention: dict[int, list[Tensor]] = {layer: [] for layer in scored}
        self._num_first = num_first

    def history(self, layer: int) -> tuple[Tensor, Tensor]:
        prompt = self._prompt[layer]
        return prompt.keys.to(self._device), prompt.values.to(self._device)

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        if layer not in self._attention:
            return
        begin, end = self.chunk
        first = min(self._num_first, begin)
        own = keys[:, self._prompt[layer].keys.shape[1] :]
        seen = torch.cat([keys[:, :first], keys[:, begin:end], own], 1)
        attention = column_maxima(queries, seen, scaling=scaling)
        self._attention[layer].append(attention[:, first : first + end - begin])

    def load(self, layer: int) -> dict[str, Tensor]:
        return {name: tensor[None].clone() for name, tensor in self._states[layer].items()}

    def store(self, layer: int, state: Tensors) -> None:
        """Drop the state: each pass begins with the prompt's."""

    def attention(self, layer: int) -> Tensor | None:
        return torch.cat(self._attention[layer], 1) if layer in self._attention else None
