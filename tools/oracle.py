"""One-process generation with the model, compression and decode attention of a method, and nothing else.

This is the oracle: no wire, no arena, no batching, no incremental auxiliary tensors. Every path through
router, prefill and decode must give the same greedy tokens. Tests compare with it. Accuracy evaluation uses
it too: it prefills a prompt once (`capture`) and compresses it for many plans (`compress`).

It runs one sequence at a time on plain Python lists of tensors, and recomputes whatever can be recomputed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.compress import (
    WaitingLayer,
    compress_prompt,
    compress_waiting,
    in_layer_order,
    measure_layer,
)
from kvferry.shared.compression.draft import add_draft
from kvferry.shared.compression.formats import compress_layer, make_formats
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.formats.state import stacked
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import (
    CompressionPlan,
    ResolvedPlan,
    is_measured,
    num_draft_tokens,
    repeats_prompt,
    sharing_layers,
)
from kvferry.shared.compression.reconstruct import reconstruct
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.grammar import TokenMatcher
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.tools.oracle_decode import LayerKV, OracleDecode

States = dict[int, Tensors]
"""Layers' states by layer, of one sequence."""


@dataclass(kw_only=True)
class OracleSession:
    """A conversation's full KV in plain lists: RocketKV-MT's history without a store.

    Attributes:
        token_ids: tokens that have KV.
        layers: full K and V by layer; empty before the first turn.
        states: the layers' states after the ends of prompts and turns, by the number of tokens. A model with
            states continues from one of them.
    """

    token_ids: list[int] = field(default_factory=list)
    layers: dict[int, LayerKV] = field(default_factory=dict)
    states: dict[int, States] = field(default_factory=dict)

    def reusable(self, prompt: list[int], spec: ModelSpec) -> int:
        """How many of the prompt's first tokens need not be run again."""
        shared = _common_prefix(self.token_ids, prompt)
        return max((n for n in self.states if n <= shared), default=0) if spec.state_layers else shared


@dataclass(frozen=True, kw_only=True)
class CapturedPrompt:
    """The result of one prefill pass, for compression with many plans.

    Attributes:
        token_ids: the prompt, history included.
        layers: queries of the new tokens, K and V of all tokens; one entry per layer that attends.
        states: after the last token, by layer.
        logits: float32 `[V]` after the last token; None for a prefix.
        drafts: the layers with a draft, by its most tokens, as far as they have been asked for.
        repeated: `LayerInputs.repeated` of each layer, by the scorer and the layers that it scores, likewise.
    """

    token_ids: tuple[int, ...]
    layers: tuple[LayerInputs, ...]
    logits: Tensor | None
    states: States = field(default_factory=dict)
    drafts: dict[int, tuple[LayerInputs, ...]] = field(default_factory=dict)
    repeated: dict[str, list[Tensor | None]] = field(default_factory=dict)

    def prefix(self, num_tokens: int) -> CapturedPrompt:
        """The capture of the first tokens; with causal attention their K and V do not depend on later ones.

        Args: num_tokens: at least one of this pass's new tokens must be among them.
        """
        assert not self.states, "a state has no prefix"
        dropped = len(self.token_ids) - num_tokens
        assert 0 < dropped < self.layers[0].queries.shape[2], (num_tokens, len(self.token_ids))
        layers = tuple(
            replace(
                inputs,
                queries=inputs.queries[:, :, :-dropped],
                keys=inputs.keys[:, :num_tokens],
                values=inputs.values[:, :num_tokens],
            )
            for inputs in self.layers
        )
        return CapturedPrompt(token_ids=self.token_ids[:num_tokens], layers=layers, logits=None)

    def joined(self, earlier: CapturedPrompt) -> CapturedPrompt:
        """Return this capture with the queries of all tokens, as one pass has them.

        Args: earlier: what this pass continued; a whole pass itself.
        """
        layers = tuple(
            replace(
                inputs,
                queries=torch.cat([first.queries[:, :, : len(self.token_ids) - new], inputs.queries], 2),
            )
            for first, inputs in zip(earlier.layers, self.layers, strict=True)
            if (new := inputs.queries.shape[2])
        )
        return replace(self, layers=layers)


class _PassStates:
    """Implements `LayerStates` for one pass. Args: earlier: the states before it."""

    def __init__(self, earlier: States) -> None:
        self._earlier = earlier
        self.after: States = {}

    def load(self, layer: int) -> dict[str, Tensor] | None:
        state = self._earlier.get(layer)
        return None if state is None else {name: its[None].clone() for name, its in state.items()}

    def store(self, layer: int, state: Tensors) -> None:
        self.after[layer] = {name: its[0].clone() for name, its in state.items()}


class _Capture:
    """Records each layer's inputs, and gives the model the K and V of an earlier capture."""

    def __init__(self, model: LanguageModel, earlier: CapturedPrompt | None, num_reused: int) -> None:
        self._model = model
        self._earlier = earlier
        self._num_reused = num_reused
        self.layers: list[LayerInputs] = []

    def history(self, layer: int) -> LayerKV | None:
        if self._earlier is None or self._num_reused == 0:
            return None
        inputs = self._earlier.layers[layer]
        return inputs.keys[:, : self._num_reused], inputs.values[:, : self._num_reused]

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.layers.append(LayerInputs.of(self._model.pre_rope_keys, layer, queries, keys, values, scaling))


class _Prefill:
    """Compresses each layer when it is done, or all at the end if they are measured; stores the full KV."""

    def __init__(self, model: LanguageModel, resolved: ResolvedPlan, history: dict[int, LayerKV]) -> None:
        self._model = model
        self._resolved = resolved
        self._history = history
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
        inputs = LayerInputs.of(self._model.pre_rope_keys, layer, queries, *full, scaling)
        if self._num_draft or repeats_prompt(self._resolved):
            self._continued.append(replace(inputs, queries=queries.clone()))
        elif is_measured(self._resolved):
            self._waiting.append(measure_layer(self._resolved, inputs))
        else:
            self._compressed[layer] = compress_layer(self._resolved, self._formats[layer], inputs)

    def finish(
        self, prompt: list[int], states: States, logits: Tensor
    ) -> tuple[ResolvedPlan, tuple[Tensors, ...]]:
        """After the last layer: the plan with each layer's own rows, and each layer's tensors.

        Args: states, logits: after the prompt.
        """
        if layers := self._continued:
            layers = reconstruct(self._model, self._resolved, layers, token_ids=prompt, states=states)
            if self._num_draft:
                layers = add_draft(
                    self._model, layers, logits=logits, num_draft=self._num_draft, states=states
                )
            return compress_prompt(self._model.spec, self._resolved, layers, states)
        if self._waiting:
            return compress_waiting(self._model.spec, self._resolved, self._waiting, states)
        return self._resolved, in_layer_order(self._model.spec, self._compressed, states)


class Continuation:
    """Decode from a compressed prompt, one token at a time, with tokens chosen by the caller.

    Args:
        compressed: the compressed prompt, one entry per layer.
    """

    def __init__(self, model: LanguageModel, resolved: ResolvedPlan, compressed: tuple[Tensors, ...]) -> None:
        self.resolved = resolved
        self.compressed = compressed
        self._model = model
        self._num_tokens = resolved.num_prompt_tokens
        self._decode = OracleDecode(model.spec, resolved, compressed)

    def step(self, token_id: int, *, dense: bool = False) -> Tensor:
        """Append a token; returns the float32 logits `[V]` after it.

        Args: dense: attend to every retained row, whichever rows the plan's attention would choose. For
            prompt tokens that come after the compression, such as a question about a compressed document.
        """
        return step_together([self], [token_id], dense=dense)[0]

    def continuing(self, other: Continuation) -> Continuation:
        """Return a continuation from where the other one is, with this one's rows of the prompt."""
        found = copy.copy(self)
        found._decode = self._decode.continuing(other._decode)
        found._num_tokens = other._num_tokens
        return found

    def fork(self) -> Continuation:
        """An independent continuation from here: steps of one do not affect the other."""
        other = copy.copy(self)
        other._decode = self._decode.fork()
        return other


def step_together(
    continuations: Sequence[Continuation], token_ids: Sequence[int], *, dense: bool = False
) -> Tensor:
    """One step of several continuations of one model in a batch, each with its own token.

    Args: token_ids, dense: as in `Continuation.step`.
    Returns: float32 logits `[B, V]`.
    """
    model = continuations[0]._model
    attentions = [c._decode.densely if dense else c._decode for c in continuations]

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
        outputs = [
            attention(layer, queries[i : i + 1], keys[i : i + 1], values[i : i + 1], scaling)
            for i, attention in enumerate(attentions)
        ]
        return torch.cat(outputs)

    class Together:
        def load(self, layer: int) -> dict[str, Tensor]:
            return stacked({i: c._decode.states[layer] for i, c in enumerate(continuations)}, len(positions))

        def store(self, layer: int, state: Tensors) -> None:
            for i, c in enumerate(continuations):
                c._decode.store(layer, {name: its[i : i + 1].clone() for name, its in state.items()})

    positions = [c._num_tokens for c in continuations]
    logits = model.decode(
        torch.tensor(list(token_ids), device=model.device),
        torch.tensor(positions, device=model.device),
        attention=attend,
        states=Together(),
    )
    for continuation in continuations:
        continuation._num_tokens += 1
    return logits


class OneProcessGenerator:
    """Generates with one model in one process; see the module."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def generate(
        self,
        prompt_token_ids: list[int],
        *,
        plan: CompressionPlan,
        sampling: SamplingParams,
        session: OracleSession | None = None,
        cut_off_after: int = 0,
        matcher: TokenMatcher | None = None,
    ) -> list[SampledToken]:
        """Prefill, compress, and decode to the end of the completion. Stop strings are ignored.

        Args:
            prompt_token_ids: at least one token, history included.
            session: full KV of earlier turns; its longest common prefix with the prompt is not run again. It
                is updated to the end of this turn.
            cut_off_after: if not 0, the number of tokens after which the client disconnects. This differs
                from a smaller `max_tokens`, with which a plan may select other rows.
            matcher: at the beginning of the sampling's grammar, where it has one.

        Returns:
            The completion's tokens, including a final end-of-sequence token.
        """
        spec = self._model.spec
        resolved = resolve_plan(
            plan,
            num_prompt_tokens=len(prompt_token_ids),
            max_new_tokens=sampling.max_tokens,
            num_layers=spec.num_layers,
            head_dim=spec.head_dim,
            layers=spec.layers,
        )
        reused = session.reusable(prompt_token_ids, spec) if session else 0
        earlier = session.layers if session and reused else {}
        history = {layer: (k[:, :reused], v[:, :reused]) for layer, (k, v) in earlier.items()}
        prefill = _Prefill(self._model, resolved, history)
        states = _PassStates(session.states.get(reused, {}) if session else {})
        new_ids = torch.tensor(prompt_token_ids[reused:], device=self._model.device)
        logits = self._model.prefill(new_ids, start=reused, observer=prefill, states=states)

        sampler = SequenceSampler(
            sampling,
            tuple(prompt_token_ids),
            spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            matcher=matcher,
        )
        tokens = [sampler.sample(logits)]
        decode = OracleDecode(spec, *prefill.finish(prompt_token_ids, states.after, logits))
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(spec.eos_token_ids))
        most = min(sampling.max_tokens, cut_off_after or sampling.max_tokens)
        while tokens[-1].token_id not in stop_ids and len(tokens) < most:
            logits = self._model.decode(
                torch.tensor([tokens[-1].token_id], device=self._model.device),
                torch.tensor([len(prompt_token_ids) + len(tokens) - 1], device=self._model.device),
                attention=decode,
                states=decode,
            )[0]
            tokens.append(sampler.sample(logits))
        if session is not None:
            session.token_ids = [*prompt_token_ids, *(t.token_id for t in tokens[:-1])]
            session.layers = {
                layer: (
                    torch.cat([keys, *(row[0] for row in decode.generated[layer])], 1),
                    torch.cat([values, *(row[1] for row in decode.generated[layer])], 1),
                )
                for layer, (keys, values) in prefill.full.items()
            }
            ends = {len(prompt_token_ids): states.after, len(session.token_ids): decode.states}
            session.states = {n: its for n, its in session.states.items() if n <= reused} | ends
        return tokens

    def capture(
        self, prompt_token_ids: list[int], *, earlier: CapturedPrompt | None = None
    ) -> CapturedPrompt:
        """Prefill without compression.

        Args: earlier: an earlier turn's capture; the longest common prefix with the prompt is not run again.
        """
        reused = _common_prefix(list(earlier.token_ids), prompt_token_ids) if earlier else 0
        if earlier is not None and earlier.states and reused < len(earlier.token_ids):
            reused = 0  # a state has no prefix
        observer = _Capture(self._model, earlier, reused)
        states = _PassStates(earlier.states if earlier is not None and reused else {})
        new_ids = torch.tensor(prompt_token_ids[reused:], device=self._model.device)
        logits = self._model.prefill(new_ids, start=reused, observer=observer, states=states)
        return CapturedPrompt(
            token_ids=tuple(prompt_token_ids),
            layers=tuple(observer.layers),
            logits=logits,
            states=states.after,
        )

    def first_tokens(self, captured: CapturedPrompt, num_tokens: int) -> CapturedPrompt:
        """The capture of a prompt's first tokens. A state has no prefix, so a model with states runs them."""
        if captured.states:
            return self.capture(list(captured.token_ids[:num_tokens]))
        return captured.prefix(num_tokens)

    def compress(
        self, captured: CapturedPrompt, *, plan: CompressionPlan, max_new_tokens: int
    ) -> Continuation:
        """Compress a captured prompt as `generate` does; returns a continuation from its end.

        Args: max_new_tokens: at least 1; the plan is resolved for it, as for `SamplingParams.max_tokens`.
        """
        spec = self._model.spec
        resolved = resolve_plan(
            plan,
            num_prompt_tokens=len(captured.token_ids),
            max_new_tokens=max_new_tokens,
            num_layers=spec.num_layers,
            head_dim=spec.head_dim,
            layers=spec.layers,
        )
        layers = self._drafted(captured, num_draft_tokens(resolved))
        if repeats_prompt(resolved):
            layers = self._repeated(captured, resolved, layers)
        measured, compressed = compress_prompt(spec, resolved, layers, captured.states)
        return Continuation(self._model, measured, compressed)

    def _drafted(self, captured: CapturedPrompt, num_draft: int) -> tuple[LayerInputs, ...]:
        """The layers with a draft of so many tokens; drafted once."""
        if not num_draft:
            return captured.layers
        if num_draft not in captured.drafts:
            logits = captured.logits
            if logits is None:
                logits = self.capture(list(captured.token_ids), earlier=captured).logits
                assert logits is not None
            layers = add_draft(
                self._model, captured.layers, logits=logits, num_draft=num_draft, states=captured.states
            )
            captured.drafts[num_draft] = tuple(layers)
        return captured.drafts[num_draft]

    def _repeated(
        self, captured: CapturedPrompt, resolved: ResolvedPlan, layers: tuple[LayerInputs, ...]
    ) -> tuple[LayerInputs, ...]:
        """The layers with the attention that the prompt's repetition gives their tokens; it is run once."""
        key = f"{resolved.plan.scorer} {sharing_layers(resolved)}"
        if key not in captured.repeated:
            repeated = reconstruct(
                self._model, resolved, layers, token_ids=captured.token_ids, states=captured.states
            )
            captured.repeated[key] = [its.repeated for its in repeated]
        found = captured.repeated[key]
        return tuple(replace(its, repeated=scores) for its, scores in zip(layers, found, strict=True))


def _common_prefix(recorded: list[int], prompt: list[int]) -> int:
    """The number of tokens shared from the start, without the prompt's last token."""
    limit = min(len(recorded), len(prompt) - 1)
    return next((i for i in range(limit) if recorded[i] != prompt[i]), limit)
