"""Measures one example: one prefill for all contenders, then compression and the answer for each.

    prompt of turn k ──capture──► queries, K, V ──compress per plan──► continuation ──► answers' scores

Settings decide what the selection sees: "aware" the whole prompt of each turn (RocketKV-MT selects afresh per
turn), "once" the first turn's prompt, "agnostic" the document alone. What comes after the selection is
appended and attended densely, token by token. Prefill always attends to the full K and V. Owns no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.services.evaluation.budgets import full_bytes, kept_bytes, plan_for_target, read_bytes
from kvferry.services.evaluation.conversation import Conversation, Turn, contains, same_text, tokenize
from kvferry.services.evaluation.experiment import (
    FULL,
    Contender,
    Experiment,
    FirstToken,
    Setting,
    Unit,
)
from kvferry.services.evaluation.records import Key, Record, TurnScore
from kvferry.shared.compression.plan import CompressionPlan, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.oracle import (
    CapturedPrompt,
    Continuation,
    OneProcessGenerator,
    step_together,
)

Work = tuple[Setting, Contender]


@dataclass(frozen=True)
class _Asked:
    """A turn that is about to be answered: what comes next is decided by `logits` `[V]`."""

    continuation: Continuation
    logits: Tensor


class UnitRunner:
    """Measures units of an experiment with one model. Not thread-safe."""

    def __init__(self, model: LanguageModel, tokenizer: ChatTokenizer, experiment: Experiment) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._experiment = experiment
        self._generator = OneProcessGenerator(model)

    def run(self, unit: Unit, work: Sequence[Work]) -> list[Record]:
        """One record for each (setting, contender).

        Raises:
            ConfigurationError: the example does not fit into the model's window.
        """
        conversation = self._conversation(unit)
        captures = self._capture(conversation)
        full_tokens = self._full_tokens(conversation, captures)
        records: list[Record] = []
        for setting in dict.fromkeys(setting for setting, _ in work):
            contenders = [contender for at, contender in work if at == setting]
            asked_turns = self._ask(setting, contenders, conversation, captures)
            records += self._measure(unit, setting, contenders, conversation, asked_turns, full_tokens)
        return records

    def _conversation(self, unit: Unit) -> Conversation:
        conversation = tokenize(unit.example(), self._tokenizer)
        needed = len(conversation.turns[-1].prompt_token_ids) + self._experiment.max_new_tokens
        if needed > self._model.spec.max_model_len:
            raise ConfigurationError(
                f"--lengths has {unit.num_tokens}; with its answer that is {needed} of this model's tokens, "
                f"whose window is {self._model.spec.max_model_len}"
            )
        return conversation

    def _capture(self, conversation: Conversation) -> list[CapturedPrompt]:
        captures: list[CapturedPrompt] = []
        for turn in conversation.turns:
            earlier = captures[-1] if captures else None
            captures.append(self._generator.capture(list(turn.prompt_token_ids), earlier=earlier))
        return captures

    def _full_tokens(
        self, conversation: Conversation, captures: Sequence[CapturedPrompt]
    ) -> list[tuple[int, ...]]:
        """What the full cache answers, greedily, for each turn."""
        full = Contender(method=FULL, plan=plan_for(FULL), target=None)
        asked = [self._asked_captured(captured, full, first_token="prefill") for captured in captures]
        return [self._greedy([a])[0] for a in asked if a is not None]

    def _measure(
        self,
        unit: Unit,
        setting: Setting,
        contenders: Sequence[Contender],
        conversation: Conversation,
        asked_turns: Iterable[Sequence[_Asked | None]],
        full_tokens: Sequence[tuple[int, ...]],
    ) -> list[Record]:
        spec = self._model.spec
        scores: list[list[TurnScore]] = [[] for _ in contenders]
        last: list[ResolvedPlan | None] = [None] * len(contenders)
        for turn, asked_turn, tokens in zip(conversation.turns, asked_turns, full_tokens, strict=True):
            met = [(i, asked) for i, asked in enumerate(asked_turn) if asked is not None]
            if not met:
                continue
            for (i, asked), score in zip(met, self._score([a for _, a in met], turn, tokens), strict=True):
                scores[i].append(score)
                last[i] = asked.continuation.resolved
        records = []
        for contender, turns, resolved in zip(contenders, scores, last, strict=True):
            key = Key.of(spec.fingerprint, self._experiment, unit, setting, contender)
            if resolved is None or len(turns) < len(conversation.turns):
                records.append(Record(key=key, turns=()))
                continue
            records.append(
                Record(
                    key=key,
                    turns=tuple(turns),
                    num_compressed_tokens=resolved.num_prompt_tokens,
                    kept_bytes=kept_bytes(spec, resolved),
                    read_bytes=read_bytes(spec, resolved),
                    full_bytes=full_bytes(spec, resolved.num_prompt_tokens),
                )
            )
        return records

    def _ask(
        self,
        setting: Setting,
        contenders: Sequence[Contender],
        conversation: Conversation,
        captures: Sequence[CapturedPrompt],
    ) -> Iterator[list[_Asked | None]]:
        """Each turn as the setting compresses it, for each contender; None where a budget cannot be met."""
        if setting == "aware":
            for captured in captures:
                yield [self._asked_captured(captured, contender) for contender in contenders]
            return
        prompts = [turn.prompt_token_ids for turn in conversation.turns]
        num_fed = conversation.num_document_tokens if setting == "agnostic" else len(prompts[0])
        num_later = len(prompts[-1]) - num_fed
        continuations: list[Continuation | None]
        if setting == "agnostic":
            document = captures[0].prefix(num_fed)
            continuations = [self._solve(document, contender, num_later) for contender in contenders]
        else:
            asked = [self._asked_captured(captures[0], contender, num_later) for contender in contenders]
            yield asked
            continuations = [a.continuation if a is not None else None for a in asked]
            prompts = prompts[1:]
        met = [continuation for continuation in continuations if continuation is not None]
        for prompt in prompts:
            rows: Iterator[Tensor] = iter(())
            for token_id in prompt[num_fed:] if met else ():
                rows = iter(step_together(met, [token_id] * len(met), dense=True))
            num_fed = len(prompt)
            yield [_Asked(c, next(rows)) if c is not None else None for c in continuations]

    def _asked_captured(
        self,
        captured: CapturedPrompt,
        contender: Contender,
        num_later: int = 0,
        first_token: FirstToken | None = None,
    ) -> _Asked | None:
        """A prompt compressed whole; or, "refed", all but its last token, which is then fed as a new one."""
        if (first_token or self._experiment.first_token) == "prefill":
            continuation = self._solve(captured, contender, num_later)
            assert captured.logits is not None
            return None if continuation is None else _Asked(continuation, captured.logits)
        continuation = self._solve(captured.prefix(len(captured.token_ids) - 1), contender, num_later + 1)
        return (
            None if continuation is None else _Asked(continuation, continuation.step(captured.token_ids[-1]))
        )

    def _solve(self, captured: CapturedPrompt, contender: Contender, num_later: int) -> Continuation | None:
        """The prompt compressed to the contender's target.

        Args: num_later: prompt tokens that come after the compression.
        """
        max_new_tokens = self._experiment.max_new_tokens + num_later
        plan: CompressionPlan | None = contender.plan
        if contender.target is not None:
            plan = plan_for_target(
                contender.plan,
                contender.target,
                match=self._experiment.match,
                spec=self._model.spec,
                num_tokens=len(captured.token_ids),
                max_new_tokens=max_new_tokens,
            )
        if plan is None:
            return None
        return self._generator.compress(captured, plan=plan, max_new_tokens=max_new_tokens)

    def _score(self, asked: Sequence[_Asked], turn: Turn, full_tokens: tuple[int, ...]) -> list[TurnScore]:
        right = turn.answer_token_ids
        nlls, likeliest = _forced(asked, right)
        # An answer whose every token is the likeliest is what greedy decoding gives.
        wrong = [a for a, tokens in zip(asked, likeliest, strict=True) if tokens != right]
        wrong_tokens = iter(self._greedy(wrong))
        answers = [tokens if tokens == right else next(wrong_tokens) for tokens in likeliest]
        if full_tokens != right:
            _, likeliest = _forced(asked, full_tokens)
        scores = []
        for nll, answer, tokens in zip(nlls, answers, likeliest, strict=True):
            text = self._tokenizer.decode(answer)
            agreeing = [token == full for token, full in zip(tokens, full_tokens, strict=True)]
            scores.append(
                TurnScore(
                    exact=same_text(text, turn.answer),
                    contained=contains(text, turn.answer),
                    nll=nll,
                    agreement=sum(agreeing) / len(agreeing),
                    text=text,
                )
            )
        return scores

    def _greedy(self, asked: Sequence[_Asked]) -> list[tuple[int, ...]]:
        """The likeliest tokens up to an end token, or as many as an answer may have."""
        continuations = [a.continuation.fork() for a in asked]
        answers = [[int(a.logits.argmax())] for a in asked]
        ends = self._model.spec.eos_token_ids
        for _ in range(self._experiment.max_new_tokens - 1):
            going = [i for i, answer in enumerate(answers) if answer[-1] not in ends]
            if not going:
                break
            logits = step_together([continuations[i] for i in going], [answers[i][-1] for i in going])
            for i, token_id in zip(going, logits.argmax(-1).tolist(), strict=True):
                answers[i].append(token_id)
        return [tuple(answer) for answer in answers]


def _forced(asked: Sequence[_Asked], tokens: tuple[int, ...]) -> tuple[list[float], list[tuple[int, ...]]]:
    """Given tokens as the answer: their mean negative log-likelihood, and the likeliest in their places."""
    continuations = [a.continuation.fork() for a in asked]
    rows = [torch.stack([a.logits for a in asked])]
    rows += [step_together(continuations, [token_id] * len(asked)) for token_id in tokens[:-1]]
    logits = torch.stack(rows, 1)  # [B, n, V]
    nlls = -logits.log_softmax(-1)[:, range(len(tokens)), list(tokens)].mean(1)
    return nlls.tolist(), [tuple(row) for row in logits.argmax(-1).tolist()]
