"""One client of a cluster: a conversation of two turns, and what it must get whatever strikes the cluster.

A request must end within `LIMIT_S` with exactly the oracle's tokens, or with an error that has a name and
does not blame the client. Such a request is repeated, and the repetition must succeed once the faults are
over. A turn that was acknowledged is part of the session.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator, OracleSession
from kvtest.documents import make_document

LIMIT_S = 60.0
PATIENCE_S = 150.0
"""How long a client repeats a turn that ends with named errors."""
PAUSE_S = 0.5
TOKEN_BUDGET = 64
MODEL = "demo"
METHODS = (
    *("full", "rocketkv", "rdkv", "snapkv", "compactor", "h2o", "kivi", "think", "adakv", "quest"),
    *("streamingllm", "pyramidkv", "d2o", "rdkv-hsa", "sparq", "rocketkv-kivi"),
)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a client says, and what it must be told.

    Attributes:
        questions: of the two turns; the first has a document before it.
        prompts: token ids of both turns' prompts.
        answers: allowed token ids of each turn. A second turn continues from all of the first one, from its
            prompt alone where decode's KV was lost, or from nothing where prefill's was lost as well. Methods
            that look at the queries of all new tokens then select something else.
    """

    method: str
    questions: tuple[str, str]
    prompts: tuple[tuple[int, ...], tuple[int, ...]]
    answers: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    max_tokens: int


def make_script(
    seed: int, method: str, model: LanguageModel, tokenizer: ChatTokenizer, *, max_tokens: int
) -> Script:
    """A script with the oracle's answers."""
    rng = random.Random(seed)
    document = make_document(seed, num_words=rng.randrange(60, 220))
    first, second = rng.sample([question for question, _ in document.questions], 2)
    first = f"{document.text} {first}"
    end = model.spec.eos_token_ids[0]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logit_bias={end: -100.0})
    takes_budget = preset(method).takes_budget
    plan = plan_for(method, budget=Budget(tokens=TOKEN_BUDGET) if takes_budget else None)
    generator, session, prompt_only = OneProcessGenerator(model), OracleSession(), OracleSession()

    def generate(
        prompt: list[int], session: OracleSession | None, count: int = max_tokens
    ) -> tuple[int, ...]:
        limited = replace(sampling, max_tokens=count)
        tokens = generator.generate(prompt, plan=plan, sampling=limited, session=session)
        return tuple(token.token_id for token in tokens)

    prompt = list(tokenizer.render([{"role": "user", "content": first}]))
    answer = generate(prompt, session)
    next_prompt = [*prompt, *answer, end, *tokenizer.render([{"role": "user", "content": second}])[1:]]
    generate(prompt, prompt_only, 1)
    answers = tuple(generate(next_prompt, its) for its in (session, prompt_only, None))
    return Script(
        method=method,
        questions=(first, second),
        prompts=(tuple(prompt), tuple(next_prompt)),
        answers=((answer,), tuple(dict.fromkeys(answers))),
        max_tokens=max_tokens,
    )


@dataclass(kw_only=True)
class Outcome:
    """How the requests of some conversations ended.

    Attributes:
        right: requests that ended with the oracle's tokens.
        errors: requests that ended with a named error, by name.
        violations: what must not happen.
        longest_s: of all requests.
    """

    right: int = 0
    recomputed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def add(self, other: Outcome) -> None:
        self.right += other.right
        self.recomputed += other.recomputed
        self.errors += other.errors
        self.violations += other.violations
        self.longest_s = max(self.longest_s, other.longest_s)


class _Ended(Exception):
    """A request ended without an answer. Args: the error's name."""


class Conversation:
    """Runs one script in a session of its own.

    Args:
        urls: of the routers; the turns alternate between them if `changes_router`.
    """

    def __init__(self, script: Script, session_id: str, urls: list[str], *, changes_router: bool) -> None:
        self.script = script
        self.session_id = self._name = session_id
        self._num_repeated = 0
        self.outcome = Outcome()
        self._urls = urls
        self._changes_router = changes_router

    async def run(self) -> Outcome:
        async with httpx.AsyncClient(timeout=LIMIT_S + 5) as client:
            if await self._turn(client, 0):
                if self._changes_router:
                    self._urls = self._urls[::-1]
                await self._turn(client, 1)
        return self.outcome

    async def _turn(self, client: httpx.AsyncClient, index: int) -> bool:
        """Ask until there is an answer; returns whether there is one."""
        deadline_s, errors = time.monotonic() + PATIENCE_S, Counter[str]()
        while time.monotonic() < deadline_s:
            try:
                await self._ask(client, index)
                return True
            except _Ended as ended:
                errors[str(ended)] += 1
                self.outcome.errors[str(ended)] += 1
            await asyncio.sleep(PAUSE_S)
            if index == 0:
                # Repeated in the same session, a turn continues from its own history, and selects from that.
                self._num_repeated += 1
                self.session_id = f"{self._name}-again-{self._num_repeated}"
            elif await self._is_in_session(client, deadline_s):
                return True
        self._violate(index, f"no answer within {PATIENCE_S:.0f} s: {dict(errors)}")
        return False

    async def _is_in_session(self, client: httpx.AsyncClient, deadline_s: float) -> bool:
        """Whether the second turn is part of the session, although its answer did not arrive whole."""
        first = self.script.prompts[0] + self.script.answers[0][0]
        while time.monotonic() < deadline_s:
            try:
                reply = await client.get(f"{self._urls[0]}/v1/sessions/{self.session_id}/export")
            except httpx.HTTPError:
                reply = None
            if reply is not None and reply.status_code == 404:
                self._violate(1, "the session of an acknowledged turn is gone")
                return True
            if reply is not None and reply.status_code == 200:
                tokens = tuple(reply.json()["token_ids"])
                whole = [self.script.prompts[1] + answer for answer in self.script.answers[1]]
                if tokens[:-1] == first or tokens == first:
                    return False
                if not any(
                    tokens in (its[: len(tokens)], its[: len(tokens) - 1] + tokens[-1:]) for its in whole
                ):
                    self._violate(1, f"the session has other tokens: {tokens[len(first) :]}")
                return True
            await asyncio.sleep(PAUSE_S)
        return False

    async def _ask(self, client: httpx.AsyncClient, index: int) -> None:
        """One request. Raises: _Ended: with an error that it may end with."""
        script, begin_s = self.script, time.monotonic()
        budget = {"token_budget": TOKEN_BUDGET} if preset(script.method).takes_budget else {}
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": script.questions[index]}],
            "session_id": self.session_id,
            "session_mode": "append",
            "temperature": 0,
            "max_tokens": script.max_tokens,
            "logit_bias": {"6": -100},
            "kv_compression": {"method": script.method, **budget},
            "return_token_ids": True,
            "stream": True,
        }
        url, done = self._urls[0], False
        prompt: list[int] = []
        tokens: list[int] = []
        try:
            async with asyncio.timeout(LIMIT_S):
                request = client.stream("POST", f"{url}/v1/chat/completions", json=body)
                async with request as response:
                    if response.status_code != 200:
                        await response.aread()
                        self._refused(index, response)
                    async for line in response.aiter_lines():
                        done = done or line == "data: [DONE]"
                        if not line.startswith("data: {"):
                            continue
                        event = json.loads(line[6:])
                        if "error" in event:
                            self._failed(index, event["error"])
                        prompt = event.get("prompt_token_ids") or prompt
                        for choice in event["choices"]:
                            tokens += choice.get("token_ids") or []
        except TimeoutError:
            self._violate(index, f"no end within {LIMIT_S:.0f} s, {len(tokens)} tokens")
            raise _Ended("hang") from None
        except httpx.HTTPError as error:
            raise _Ended(f"connection: {type(error).__name__}") from error
        finally:
            self.outcome.longest_s = max(self.outcome.longest_s, time.monotonic() - begin_s)
            self._check(index, tuple(prompt), tuple(tokens), done)
        if not done:
            raise _Ended("connection: no end")
        self.outcome.right += 1
        self.outcome.recomputed += tuple(tokens) != script.answers[index][0]

    def _refused(self, index: int, response: httpx.Response) -> None:
        try:
            error = response.json()["error"]
        except (ValueError, KeyError):
            self._violate(index, f"status {response.status_code} without an error: {response.text[:200]}")
            raise _Ended("unnamed") from None
        if response.status_code < 500 and response.status_code not in (409, 429):
            self._violate(index, f"the client is blamed with {response.status_code}: {error}")
        self._failed(index, error)

    def _failed(self, index: int, error: dict[str, Any]) -> None:
        if not error.get("code"):
            self._violate(index, f"an error without a name: {error}")
        raise _Ended(error.get("code") or "unnamed")

    def _check(self, index: int, prompt: tuple[int, ...], tokens: tuple[int, ...], done: bool) -> None:
        """The tokens so far are the beginning of an allowed answer, and all of it at the end."""
        script = self.script
        if prompt and prompt != script.prompts[index]:
            self._violate(index, f"the prompt has {len(prompt)} tokens, not {len(script.prompts[index])}")
        elif done and tokens not in script.answers[index]:
            self._violate(index, f"wrong answer: {tokens}, not {script.answers[index]}")
        elif not any(its[: len(tokens)] == tokens for its in script.answers[index]):
            self._violate(index, f"wrong beginning: {tokens}, not of {script.answers[index]}")

    def _violate(self, index: int, what: str) -> None:
        self.outcome.violations.append(f"{self.session_id} ({self.script.method}), turn {index + 1}: {what}")
