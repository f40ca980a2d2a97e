"""What the client of a conversation says, and what the oracle answers.

A lossy method that looks at the queries of all new tokens chooses other rows when a turn reuses another
number of tokens: fewer after a worker's death, more where another session has the same prompt. So an answer
belongs to the number of reused tokens, which every response reports. A turn that resumes on another worker
reuses no more than it did before; where that worker has less, its later tokens belong to the smaller number.
A prompt of which a part is reused has, of the rest, the same rows but for rounding, and a second turn that
reuses those may choose otherwise between two equal tokens: so its answer belongs to what the first turn
reused, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.question import Question, find_question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator, OracleSession
from kvtest.documents import make_document

Tokens = tuple[int, ...]

TOKEN_BUDGET = 64
METHODS = (
    *("full", "rocketkv", "rdkv", "snapkv", "compactor", "h2o", "kivi", "think", "adakv", "quest"),
    *("streamingllm", "pyramidkv", "d2o", "rdkv-hsa", "sparq", "rocketkv-kivi"),
)


@dataclass(kw_only=True, eq=False)
class Script:
    """A conversation of two turns; the first question has a document before it.

    Attributes:
        prompts: token ids of both turns' prompts; the second one contains the first answer.
        found: where the prompts have their questions.
        num_stored: how many tokens have KV after the first turn.
    """

    method: str
    questions: tuple[str, str]
    prompts: tuple[Tokens, Tokens]
    found: tuple[Question | None, Question | None]
    num_stored: int
    max_tokens: int
    _stored: dict[int, OracleSession]
    """After the first turn, by the number of tokens that it reused of another session's prompt."""
    _exact: OracleSession
    """After the second turn in a session that began with it, so that its whole prompt was run at once."""
    _plan: CompressionPlan
    _sampling: SamplingParams
    _generator: OneProcessGenerator
    _answers: dict[tuple[int, int, int], Tokens] = field(default_factory=dict)

    def first_reused(self, num_reused: int) -> None:
        """Note that a session's first turn has reused so many tokens.

        Raises: ValueError: the prompt has no token after them.
        """
        if num_reused in self._stored:
            return
        prompt = self.prompts[0]
        if num_reused >= len(prompt):
            raise ValueError(f"turn 1 of {len(prompt)} tokens reuses {num_reused}")
        session = self._beginning(self._stored[0], prompt, num_reused)
        self._generator.generate(
            list(prompt),
            plan=self._plan,
            sampling=self._sampling,
            session=session,
            question=self.found[0],
        )
        self._stored[num_reused] = session

    def answers(self, index: int, num_reused: int) -> list[Tokens]:
        """The oracle's answers of a turn that reuses the KV of its prompt's first `num_reused` tokens.

        There is one for each number that first turns have reused, where those rows are of the first turn.
        """
        return [self.answer(index, num_reused, first) for first in self._firsts(index, num_reused)]

    def answer(self, index: int, num_reused: int, first: int = 0) -> Tokens:
        """The oracle's answer of a turn that reuses the KV of its prompt's first `num_reused` tokens.

        Args: first: how many the first turn has reused.
        Raises: ValueError: the prompt has no token after them.
        """
        if num_reused >= len(self.prompts[index]):
            raise ValueError(f"turn {index + 1} of {len(self.prompts[index])} tokens reuses {num_reused}")
        if (index, num_reused, first) not in self._answers:
            self._answers[index, num_reused, first] = self._generated(index, num_reused, first)
        return self._answers[index, num_reused, first]

    def _firsts(self, index: int, num_reused: int) -> list[int]:
        return list(self._stored) if index == 1 and num_reused == self.num_stored else [0]

    def resumed_answer(self, index: int, num_reused: int, tokens: Tokens) -> bool:
        """Whether an answer that began with `num_reused` reused tokens was resumed where fewer were left, and
        then begins so."""
        for right in self.answers(index, num_reused):
            num_delivered = next(
                (n for n, pair in enumerate(zip(tokens, right, strict=False)) if len({*pair}) > 1), 0
            )
            for fewer in self._likely(index):
                if fewer < num_reused and num_delivered:
                    resumed = self._generated(index, fewer, delivered=tokens[:num_delivered])
                    if resumed[: len(tokens)] == tokens:
                        return True
        return False

    def begins_answer(self, index: int, tokens: Tokens) -> bool:
        """Whether some answer of the turn begins with these tokens, whatever it reuses."""
        return any(
            answer[: len(tokens)] == tokens
            for num_reused in self._reusable(index)
            for answer in self.answers(index, num_reused)
        ) or any(self.resumed_answer(index, likely, tokens) for likely in self._likely(index))

    def has_answered(self, tokens: Tokens) -> bool:
        """Whether a session with these tokens has the second turn, whole or its beginning.

        The last token may be the end of sequence, which is stored where an answer was cut.
        """
        for num_reused in self._reusable(1):
            for answer in self.answers(1, num_reused):
                whole = self.prompts[1] + answer
                if tokens in (whole[: len(tokens)], whole[: len(tokens) - 1] + tokens[-1:]):
                    return True
        return False

    def asks_again(self, prompt: Tokens) -> bool:
        """Whether the prompt asks the second question after a session that has it already."""
        question = self.prompts[1][self.num_stored + 1 :]
        session = prompt[: -len(question)]
        is_after = len(session) >= len(self.prompts[1]) and prompt[-len(question) :] == question
        return is_after and self.has_answered(session)

    def _generated(self, index: int, num_reused: int, first: int = 0, delivered: Tokens = ()) -> Tokens:
        # KV of generated tokens is the session's own or, where that was lost, is computed again.
        is_own = index == 1 and num_reused == self.num_stored
        session = self._beginning(
            self._stored[first] if is_own else self._exact, self.prompts[index], num_reused
        )
        sampling = replace(self._sampling, delivered=delivered)
        tokens = self._generator.generate(
            list(self.prompts[index]),
            plan=self._plan,
            sampling=sampling,
            session=session,
            question=self.found[index],
        )
        return tuple(token.token_id for token in tokens)

    @staticmethod
    def _beginning(stored: OracleSession, prompt: Tokens, num_reused: int) -> OracleSession:
        """A session that has the prompt's first tokens, with the rows that another one has of them."""
        session = OracleSession()
        if num_reused:
            session.token_ids = list(prompt[:num_reused])
            session.layers = {
                layer: (keys[:, :num_reused], values[:, :num_reused])
                for layer, (keys, values) in stored.layers.items()
            }
        return session

    def _likely(self, index: int) -> list[int]:
        return [self.num_stored, len(self.prompts[0]), 0] if index else [0]

    def _reusable(self, index: int) -> list[int]:
        """Every number of tokens that a turn may reuse, the likely ones first."""
        return list(dict.fromkeys([*self._likely(index), *reversed(range(len(self.prompts[index])))]))


def make_script(
    seed: int, method: str, model: LanguageModel, tokenizer: ChatTokenizer, *, max_tokens: int
) -> Script:
    """A script with the oracle's first answer; the second one's are computed as they are needed."""
    rng = random.Random(seed)
    document = make_document(seed, num_words=rng.randrange(60, 220))
    first, second = rng.sample([question for question, _ in document.questions], 2)
    first = f"{document.text} {first}"
    end = model.spec.eos_token_ids[0]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logit_bias={end: -100.0})
    plan = plan_for(method, budget=Budget(tokens=TOKEN_BUDGET) if preset(method).takes_budget else None)
    generator, stored, exact = OneProcessGenerator(model), OracleSession(), OracleSession()

    def answer(prompt: Tokens, question: Question | None, session: OracleSession) -> Tokens:
        tokens = generator.generate(
            list(prompt), plan=plan, sampling=sampling, session=session, question=question
        )
        return tuple(token.token_id for token in tokens)

    asked = [[{"role": "user", "content": text}] for text in (first, second)]
    prompt = tuple(tokenizer.render(asked[0]))
    found = find_question(tokenizer, asked[0], prompt)
    next_prompt = (*prompt, *answer(prompt, found, stored), end, *tokenizer.render(asked[1])[1:])
    next_found = find_question(tokenizer, asked[1], next_prompt)
    answer(next_prompt, next_found, exact)
    return Script(
        method=method,
        questions=(first, second),
        prompts=(prompt, next_prompt),
        found=(found, next_found),
        num_stored=len(stored.token_ids),
        max_tokens=max_tokens,
        _stored={0: stored},
        _exact=exact,
        _plan=plan,
        _sampling=sampling,
        _generator=generator,
    )
