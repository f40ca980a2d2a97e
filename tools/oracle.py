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
    compress_prompt,
)
from kvferry.shared.compression.draft import Drafted, greedy, run_draft
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.formats.state import stacked
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import (
    CompressionPlan,
    ResolvedPlan,
    num_draft_tokens,
    repeats_prompt,
    sharing_layers,
)
from kvferry.shared.compression.reconstruct import reconstruct
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.question import Question
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.grammar import TokenMatcher
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.tools.oracle_decode import LayerKV, OracleDecode
from kvferry.tools.oracle_prefill import Capture, OraclePrefill, PassStates, States


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
        """Count the prompt's first tokens that need not be run again."""
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
        drafts: greedy drafts by their most tokens, as far as they have been asked for.
        repeated: `LayerInputs.repeated` of each layer, by the scorer and the layers that it scores, likewise.
    """

    token_ids: tuple[int, ...]
    layers: tuple[LayerInputs, ...]
    logits: Tensor | None
    states: States = field(default_factory=dict)
    drafts: dict[int, Drafted] = field(default_factory=dict)
    repeated: dict[str, list[Tensor | None]] = field(default_factory=dict)

    def prefix(self, num_tokens: int) -> CapturedPrompt:
        """Return the first tokens' capture; with causal attention their K and V do not depend on later ones.

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
                question=inputs.question and inputs.question.before(dropped),
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


class Continuation:
    """Decode from a compressed prompt, one token at a time, with tokens chosen by the caller.

    While they are those of the draft, they are not run again: their rows are the draft's, and so are the
    logits after them.

    Attributes: drafted: the draft, until another token than its next one is chosen; None without one.

    Args:
        compressed: the compressed prompt, one entry per layer.
    """

    def __init__(
        self,
        model: LanguageModel,
        resolved: ResolvedPlan,
        compressed: tuple[Tensors, ...],
        drafted: Drafted | None = None,
    ) -> None:
        self.drafted = drafted
        self.resolved = resolved
        self.compressed = compressed
        self._model = model
        self._num_tokens = resolved.num_prompt_tokens
        self._decode = OracleDecode(model.spec, resolved, compressed)

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self._model.spec

    def step(self, token_id: int, *, dense: bool = False) -> Tensor:
        """Append a token; returns the float32 logits `[V]` after it.

        Args: dense: attend to every retained row, whichever rows the plan's attention would choose. For
            prompt tokens that come after the compression, such as a question about a compressed document.
        """
        return step_together([self], [token_id], dense=dense)[0]

    def follow_draft(self, token_id: int) -> Tensor | None:
        """Append a token of the draft; returns the float32 logits `[V]` after it, or None if the draft has
        ended or had another token."""
        drafted, number = self.drafted, self._num_tokens - self.resolved.num_prompt_tokens
        if drafted is None or number >= len(drafted.tokens) or drafted.tokens[number].token_id != token_id:
            self.drafted = None
            return None
        token = drafted.tokens[number]
        self._decode.append(drafted.layers, number, token.states)
        self._num_tokens += 1
        return token.logits

    def continuing(self, other: Continuation) -> Continuation:
        """Return a continuation from where the other one is, with this one's rows of the prompt."""
        found = copy.copy(self)
        found._decode, found.drafted = self._decode.continuing(other._decode), None
        found._num_tokens = other._num_tokens
        return found

    def fork(self) -> Continuation:
        """Return an independent continuation from here: steps of one do not affect the other."""
        other = copy.copy(self)
        other._decode = self._decode.fork()
        return other


def step_together(
    continuations: Sequence[Continuation], token_ids: Sequence[int], *, dense: bool = False
) -> Tensor:
    """Run one step of several continuations of one model in a batch, each with its own token.

    Args: token_ids, dense: as in `Continuation.step`.
    Returns: float32 logits `[B, V]`.
    """
    drafted = [c.follow_draft(token_id) for c, token_id in zip(continuations, token_ids, strict=True)]
    run = [i for i, logits in enumerate(drafted) if logits is None]
    if run:
        chosen = [continuations[i] for i in run]
        for i, logits in zip(run, _run_together(chosen, [token_ids[i] for i in run], dense), strict=True):
            drafted[i] = logits
    return torch.stack([logits for logits in drafted if logits is not None])


def _run_together(continuations: Sequence[Continuation], token_ids: Sequence[int], dense: bool) -> Tensor:
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
                c._decode.store(layer, {name: tensor[i : i + 1].clone() for name, tensor in state.items()})

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
        question: Question | None = None,
        cut_off_after: int = 0,
        matcher: TokenMatcher | None = None,
        has_siblings: bool = False,
    ) -> list[SampledToken]:
        """Prefill, compress, and decode to the end of the completion. Stop strings are ignored.

        Args:
            prompt_token_ids: at least one token, history included.
            session: full KV of earlier turns; its longest common prefix with the prompt is not run again. It
                is updated to the end of this turn.
            question: where the prompt has it, as a router finds it for chats.
            cut_off_after: if not 0, the number of tokens after which the client disconnects. This differs
                from a smaller `max_tokens`, with which a plan may select other rows.
            matcher: at the beginning of the sampling's grammar, where it has one.
            has_siblings: whether it is one of several completions of the prompt.

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
        prefill = OraclePrefill(self._model, resolved, history, question)
        states = PassStates(session.states.get(reused, {}) if session else {})
        new_ids = torch.tensor(prompt_token_ids[reused:], device=self._model.device)
        logits = self._model.prefill(new_ids, start=reused, observer=prefill, states=states)

        sampler = SequenceSampler(
            sampling,
            tuple(prompt_token_ids),
            spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            matcher=matcher,
        )
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(spec.eos_token_ids))
        tokens, most_drafted = list[SampledToken](), min(num_draft_tokens(resolved), sampling.max_tokens - 1)

        def draw(logits: Tensor) -> int | None:
            token = sampler.sample(logits)
            tokens.append(token)
            return None if token.token_id in stop_ids or len(tokens) > most_drafted else token.token_id

        measured, compressed, drafted = prefill.finish(
            prompt_token_ids, states.after, logits, None if has_siblings else draw
        )
        if not tokens:
            tokens.append(sampler.sample(logits))
        most = min(sampling.max_tokens, cut_off_after or sampling.max_tokens)
        decode = OracleDecode(spec, measured, compressed)
        if drafted is not None:
            for number, drafted_token in enumerate(drafted.tokens[: most - 1]):
                decode.append(drafted.layers, number, drafted_token.states)
        del tokens[most:]
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
            session.states = {n: state for n, state in session.states.items() if n <= reused} | ends
        return tokens

    def capture(
        self,
        prompt_token_ids: list[int],
        *,
        earlier: CapturedPrompt | None = None,
        question: Question | None = None,
    ) -> CapturedPrompt:
        """Prefill without compression.

        Args: earlier: an earlier turn's capture; the longest common prefix with the prompt is not run again.
            question: as of `generate`.
        """
        reused = _common_prefix(list(earlier.token_ids), prompt_token_ids) if earlier else 0
        if earlier is not None and earlier.states and reused < len(earlier.token_ids):
            reused = 0  # a state has no prefix
        observer = Capture(self._model, earlier, reused, question)
        states = PassStates(earlier.states if earlier is not None and reused else {})
        new_ids = torch.tensor(prompt_token_ids[reused:], device=self._model.device)
        logits = self._model.prefill(new_ids, start=reused, observer=observer, states=states)
        return CapturedPrompt(
            token_ids=tuple(prompt_token_ids),
            layers=tuple(observer.layers),
            logits=logits,
            states=states.after,
        )

    def first_tokens(self, captured: CapturedPrompt, num_tokens: int) -> CapturedPrompt:
        """Capture a prompt's first tokens. A state has no prefix, so a model with states runs them."""
        if captured.states:
            whole = captured.layers[0].question if captured.layers else None
            question = whole and whole.before(len(captured.token_ids) - num_tokens)
            return self.capture(list(captured.token_ids[:num_tokens]), question=question)
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
        drafted = self._drafted(captured, min(num_draft_tokens(resolved), max_new_tokens - 1))
        layers = captured.layers if drafted is None else drafted.layers
        if repeats_prompt(resolved):
            layers = self._repeated(captured, resolved, layers)
        measured, compressed = compress_prompt(spec, resolved, layers, captured.states)
        return Continuation(self._model, measured, compressed, drafted)

    def _drafted(self, captured: CapturedPrompt, num_draft: int) -> Drafted | None:
        """Return the prompt with a greedy draft of this many tokens; drafted once."""
        if not num_draft:
            return None
        if num_draft not in captured.drafts:
            logits = captured.logits
            if logits is None:
                logits = self.capture(list(captured.token_ids), earlier=captured).logits
                assert logits is not None
            captured.drafts[num_draft] = run_draft(
                self._model,
                captured.layers,
                logits=logits,
                draw=greedy(self._model.spec, num_draft),
                states=captured.states,
            )
        return captured.drafts[num_draft]

    def _repeated(
        self, captured: CapturedPrompt, resolved: ResolvedPlan, layers: tuple[LayerInputs, ...]
    ) -> tuple[LayerInputs, ...]:
        """Return layers with the attention that the prompt's repetition gives their tokens; run once."""
        key = f"{resolved.plan.scorer} {sharing_layers(resolved)}"
        if key not in captured.repeated:
            repeated = reconstruct(
                self._model, resolved, layers, token_ids=captured.token_ids, states=captured.states
            )
            captured.repeated[key] = [layer.repeated for layer in repeated]
        found = captured.repeated[key]
        return tuple(replace(layer, repeated=scores) for layer, scores in zip(layers, found, strict=True))


def _common_prefix(recorded: list[int], prompt: list[int]) -> int:
    """Count the tokens shared from the start, without the prompt's last token."""
    limit = min(len(recorded), len(prompt) - 1)
    return next((i for i in range(limit) if recorded[i] != prompt[i]), limit)
