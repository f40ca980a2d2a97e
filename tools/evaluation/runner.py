"""Measures one example: one prefill for all contenders, then compression and the answer for each.

    turn k ──settings.py──► prompts compressed per contender ──scoring.py──► scores ──► records
       ▲                                                             │
       └─────── own answers, if earlier turns contain them ──────────┘

`jobs.py` runs it in processes; `records.py` writes the results.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.shared.compression.presets import plan_for
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.oracle import Continuation, OneProcessGenerator
from kvferry.tools.evaluation.compressor import Compressor, Sizes
from kvferry.tools.evaluation.conversation import Conversation, tokenize
from kvferry.tools.evaluation.experiment import FULL, Contender, Experiment, Setting, Unit
from kvferry.tools.evaluation.records import Key, Record, TurnScore
from kvferry.tools.evaluation.scoring import AnswerScorer
from kvferry.tools.evaluation.settings import Captures, make_setting

Work = tuple[Setting, Contender]


class UnitRunner:
    """Measures units of an experiment with one model. Not thread-safe."""

    def __init__(self, model: TransformersModel, tokenizer: ChatTokenizer, experiment: Experiment) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._experiment = experiment
        self._generator = OneProcessGenerator(model)
        self._compressor = Compressor(model, self._generator, experiment)
        self._scorer = AnswerScorer(
            tokenizer, eos_token_ids=model.spec.eos_token_ids, max_new_tokens=experiment.max_new_tokens
        )

    def run(self, unit: Unit, work: Sequence[Work]) -> list[Record]:
        """One record for each (setting, contender).

        Raises:
            ConfigurationError: the example does not fit into the model's window.
        """
        conversation = self._conversation(unit)
        self._model.skip_positions(conversation.num_before_last_question, self._experiment.gap)
        captures = Captures(self._generator)
        full_tokens = self._full_tokens(conversation, captures)
        records: list[Record] = []
        for setting in dict.fromkeys(setting for setting, _ in work):
            contenders = [contender for at, contender in work if at == setting]
            records += self._measure(unit, setting, contenders, conversation, captures, full_tokens)
        return records

    def _conversation(self, unit: Unit) -> Conversation:
        conversation = tokenize(unit.example(), self._tokenizer)
        num_answers = len(conversation.turns) if self._experiment.answers == "own" else 1
        needed = len(conversation.turns[-1].prompt_token_ids) + num_answers * self._experiment.max_new_tokens
        needed += self._experiment.gap
        if needed > self._model.spec.max_model_len:
            raise ConfigurationError(
                f"--lengths has {unit.num_tokens}; with its answer and --gap that is {needed} of this "
                f"model's tokens, whose window is {self._model.spec.max_model_len}"
            )
        return conversation

    def _full_tokens(self, conversation: Conversation, captures: Captures) -> list[tuple[int, ...]]:
        """The full cache's greedy answer to each turn, its first token as it would be served."""
        full = [Contender(method=FULL, plan=plan_for(FULL), target=None)]
        turn_setting = make_setting("aware", self._compressor, captures, conversation, full, self._experiment)
        tokens: list[tuple[int, ...]] = []
        for index in range(len(conversation.turns)):
            pending = turn_setting.next_turn(index, self._own(tokens[-1:]))
            tokens += self._scorer.greedy([a for a in pending if a is not None])
        return tokens

    def _measure(
        self,
        unit: Unit,
        setting: Setting,
        contenders: Sequence[Contender],
        conversation: Conversation,
        captures: Captures,
        full_tokens: Sequence[tuple[int, ...]],
    ) -> list[Record]:
        turn_setting = make_setting(
            setting, self._compressor, captures, conversation, contenders, self._experiment
        )
        scores: list[list[TurnScore]] = [[] for _ in contenders]
        last: list[Continuation | None] = [None] * len(contenders)
        answers: list[tuple[int, ...]] = [()] * len(contenders)
        for index, (turn, tokens) in enumerate(zip(conversation.turns, full_tokens, strict=True)):
            pending_turn = turn_setting.next_turn(index, self._own(answers))
            met = [(i, pending) for i, pending in enumerate(pending_turn) if pending is not None]
            if not met:
                continue
            turn_scores, turn_answers = self._scorer.score([pending for _, pending in met], turn, tokens)
            for (i, pending), score, answer in zip(met, turn_scores, turn_answers, strict=True):
                scores[i].append(score)
                last[i], answers[i] = pending.continuation, answer
        return [
            self._record(
                Key.of(self._model.spec.fingerprint, self._experiment, unit, setting, contender),
                turns if len(turns) == len(conversation.turns) else [],
                continuation,
            )
            for contender, turns, continuation in zip(contenders, scores, last, strict=True)
        ]

    def _own(self, answers: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]] | None:
        return answers if self._experiment.answers == "own" else None

    def _record(self, key: Key, turns: Sequence[TurnScore], continuation: Continuation | None) -> Record:
        if continuation is None or not turns:
            return Record(key=key, turns=())
        sizes: Sizes = self._compressor.sizes(continuation)
        return Record(
            key=key,
            turns=tuple(turns),
            num_compressed_tokens=continuation.resolved.num_prompt_tokens,
            kept_bytes=sizes.kept,
            read_bytes=sizes.read,
            full_bytes=sizes.full,
        )
