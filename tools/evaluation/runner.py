"""Measures examples: one prefill of each for all contenders, then compression and the answer for each.

    turn k ──settings.py──► prompts compressed per contender ──scoring.py──► scores ──► records
       ▲                                                             │
       └─────── own answers, if earlier turns contain them ──────────┘

`jobs.py` runs it in processes; `records.py` writes the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.shared.compression.curves import estimate_context_nll
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import budget_tokens
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.compressor import Compressor, Sizes
from kvferry.tools.evaluation.conversation import Conversation, tokenize
from kvferry.tools.evaluation.distance import DistantModel
from kvferry.tools.evaluation.experiment import FULL, Contender, Experiment, Setting, Unit
from kvferry.tools.evaluation.records import Key, Record, TurnScore
from kvferry.tools.evaluation.scoring import AnswerScorer, FullAnswer
from kvferry.tools.evaluation.settings import Captures, TurnSetting, make_setting
from kvferry.tools.oracle import CapturedPrompt, Continuation, OneProcessGenerator

Work = tuple[Setting, Contender]
Job = tuple[Unit, tuple[Work, ...]]


@dataclass
class _Run:
    """One example in one setting.

    Attributes:
        full_answers: the full cache's to each turn.
        scores, last, answers: of each contender, as far as it has been asked.
    """

    unit: Unit
    setting: Setting
    contenders: Sequence[Contender]
    conversation: Conversation
    setting_turns: TurnSetting
    full_answers: Sequence[FullAnswer]

    def __post_init__(self) -> None:
        number = len(self.contenders)
        self.scores: list[list[TurnScore]] = [[] for _ in range(number)]
        self.last: list[Continuation | None] = [None] * number
        self.answers: list[tuple[int, ...]] = [()] * number


class UnitRunner:
    """Measures units of an experiment with one model. Not thread-safe."""

    def __init__(self, model: TransformersModel, tokenizer: ChatTokenizer, experiment: Experiment) -> None:
        self._model = DistantModel(model)
        self._tokenizer = tokenizer
        self._experiment = experiment
        self._generator = OneProcessGenerator(self._model)
        self._compressor = Compressor(self._model, self._generator, experiment)
        self._shared: CapturedPrompt | None = None
        self._scorer = AnswerScorer(
            tokenizer, eos_token_ids=model.spec.eos_token_ids, max_new_tokens=experiment.max_new_tokens
        )

    def run(self, jobs: Sequence[Job]) -> list[Record]:
        """Measure one record for each (unit, setting, contender); all are answered together, turn by turn.

        Raises:
            ConfigurationError: an example does not fit into the model's window.
        """
        conversations = [self._conversation(unit) for unit, _ in jobs]
        # the model skips positions of one prompt at a time
        assert len(jobs) == 1 or not self._experiment.gap, len(jobs)
        self._model.skip_positions(conversations[0].num_before_last_question, self._experiment.gap)
        captures = [Captures(self._generator, self._document(conversation)) for conversation in conversations]
        full_answers = self._full_answers(conversations, captures)
        runs = []
        for (unit, work), conversation, captured, full in zip(
            jobs, conversations, captures, full_answers, strict=True
        ):
            for setting in dict.fromkeys(setting for setting, _ in work):
                contenders = [contender for at, contender in work if at == setting]
                turns = make_setting(
                    setting, self._compressor, captured, conversation, contenders, self._experiment
                )
                runs.append(_Run(unit, setting, contenders, conversation, turns, full))
        for index in range(max(len(run.conversation.turns) for run in runs)):
            self._answer(index, [run for run in runs if index < len(run.conversation.turns)])
        return [record for run in runs for record in self._records(run)]

    def _conversation(self, unit: Unit) -> Conversation:
        conversation = tokenize(self._experiment.example(unit), self._tokenizer)
        num_answers = len(conversation.turns) if self._experiment.answers == "own" else 1
        longest = conversation.longest_answer(self._experiment.max_new_tokens)
        needed = len(conversation.turns[-1].prompt_token_ids) + num_answers * longest
        needed += self._experiment.gap
        if needed > self._model.spec.max_model_len:
            given = (
                f"--data has line {unit.seed + 1}; with its answer"
                if self._experiment.data
                else f"--lengths has {unit.num_tokens}; with its answer and --gap"
            )
            raise ConfigurationError(
                f"{given} that is {needed} of this model's tokens, whose window is "
                f"{self._model.spec.max_model_len}"
            )
        return conversation

    def _document(self, conversation: Conversation) -> CapturedPrompt | None:
        """Return a capture of the conversation's document, if the next example may be about the same."""
        if not self._experiment.shares_documents:
            return None
        document = conversation.turns[0].prompt_token_ids[: conversation.num_document_tokens]
        if self._shared is None or self._shared.token_ids != document:
            self._shared = None  # one document's memory at a time
            self._shared = self._generator.capture(list(document))
        return self._shared

    def _full_answers(
        self, conversations: Sequence[Conversation], captures: Sequence[Captures]
    ) -> list[list[FullAnswer]]:
        """Return the full cache's greedy answer to each turn, its first token as it would be served."""
        full = [Contender(method=FULL, plan=plan_for(FULL), target=None)]
        settings = [
            make_setting("aware", self._compressor, captured, conversation, full, self._experiment)
            for captured, conversation in zip(captures, conversations, strict=True)
        ]
        found: list[list[FullAnswer]] = [[] for _ in conversations]
        for index in range(max(len(conversation.turns) for conversation in conversations)):
            going = [i for i, conversation in enumerate(conversations) if index < len(conversation.turns)]
            pending = [
                a
                for i in going
                for a in settings[i].next_turn(index, self._own([answer.tokens for answer in found[i][-1:]]))
            ]
            answers = self._scorer.full(
                [a for a in pending if a is not None], [conversations[i].turns[index] for i in going]
            )
            for i, answer in zip(going, answers, strict=True):
                found[i].append(answer)
        return found

    def _answer(self, index: int, runs: Sequence[_Run]) -> None:
        """Answer turn `index` of every run."""
        asked = [
            (run, i, pending)
            for run in runs
            for i, pending in enumerate(run.setting_turns.next_turn(index, self._own(run.answers)))
            if pending is not None
        ]
        scores, answers = self._scorer.score(
            [pending for _, _, pending in asked],
            [run.conversation.turns[index] for run, _, _ in asked],
            [run.full_answers[index] for run, _, _ in asked],
        )
        for (run, i, pending), score, answer in zip(asked, scores, answers, strict=True):
            run.scores[i].append(score)
            run.last[i], run.answers[i] = pending.continuation, answer

    def _records(self, run: _Run) -> list[Record]:
        prompt = run.conversation.turns[-1].prompt_token_ids
        context_nll = estimate_context_nll(prompt, vocab_size=self._model.spec.vocab_size)
        return [
            self._record(
                Key.of(self._model.spec.fingerprint, self._experiment, run.unit, run.setting, contender),
                turns if len(turns) == len(run.conversation.turns) else [],
                continuation,
                context_nll,
            )
            for contender, turns, continuation in zip(run.contenders, run.scores, run.last, strict=True)
        ]

    def _own(self, answers: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]] | None:
        return answers if self._experiment.answers == "own" else None

    def _record(
        self, key: Key, turns: Sequence[TurnScore], continuation: Continuation | None, context_nll: float
    ) -> Record:
        if continuation is None or not turns:
            return Record(key=key, turns=())
        sizes: Sizes = self._compressor.sizes(continuation)
        plan, num_tokens = continuation.resolved.plan, continuation.resolved.num_prompt_tokens
        retention = plan.budget.retention
        if plan.budget.tokens is not None:
            retention = min(1.0, budget_tokens(plan, num_tokens) / num_tokens)
        return Record(
            key=key,
            turns=tuple(turns),
            num_compressed_tokens=num_tokens,
            kept_bytes=sizes.kept,
            read_bytes=sizes.read,
            full_bytes=sizes.full,
            retention=retention,
            context_nll=context_nll if retention is not None else None,
        )
