"""One client of a cluster: a conversation of two turns, and what it must get whatever strikes the cluster.

A request must end within `LIMIT_S` with exactly the oracle's tokens, or with an error that has a name and
does not blame the client. Such a request is repeated, and the repetition must succeed once the faults are
over. A turn whose answer does not say that it was not stored is part of the session.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvferry.shared.compression.presets import preset
from kvtest.chaos.script import TOKEN_BUDGET, Script, Tokens

LIMIT_S = 60.0
PATIENCE_S = 150.0
"""How long a client repeats a turn that ends with named errors."""
PAUSE_S = 0.5
MODEL = "demo"


@dataclass(kw_only=True)
class Outcome:
    """How the requests of some conversations ended.

    Attributes:
        right: requests that ended with the oracle's tokens.
        reused_less: of these, second turns that reused fewer tokens than were stored.
        errors: requests that ended with a named error, by name.
        violations: what must not happen.
        longest_s: of all requests.
    """

    right: int = 0
    reused_less: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def add(self, other: Outcome) -> None:
        self.right += other.right
        self.reused_less += other.reused_less
        self.errors += other.errors
        self.violations += other.violations
        self.longest_s = max(self.longest_s, other.longest_s)


class _Ended(Exception):
    """A request ended without an answer. Args: the error's name."""


class Conversation:
    """Runs one script in a session of its own.

    Args:
        urls: of the routers; the turns alternate between them if `changes_router`.
        patience_s: how long a turn that ends with named errors is repeated.
    """

    def __init__(
        self,
        script: Script,
        session_id: str,
        urls: list[str],
        *,
        changes_router: bool,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.script = script
        self.session_id = self._name = session_id
        self._num_repeated = 0
        self._reports: list[dict[str, Any]] = []
        self.outcome = Outcome()
        self._urls = urls
        self._changes_router = changes_router
        self._patience_s = patience_s

    async def run(self) -> Outcome:
        async with httpx.AsyncClient(timeout=LIMIT_S + 5) as client:
            if await self._turn(client, 0):
                if self._changes_router:
                    self._urls = self._urls[::-1]
                await self._turn(client, 1)
        return self.outcome

    async def _turn(self, client: httpx.AsyncClient, index: int) -> bool:
        """Ask until there is an answer; returns whether there is one."""
        deadline_s, errors = time.monotonic() + self._patience_s, Counter[str]()
        while time.monotonic() < deadline_s:
            try:
                await self._ask(client, index)
                return True
            except _Ended as ended:
                errors[str(ended)] += 1
                self.outcome.errors[str(ended)] += 1
                if index == 1 and str(ended) == "session_not_stored":
                    return True  # an attempt that seemed lost was answered: only the whole goes on
            await asyncio.sleep(PAUSE_S)
            if index == 0:
                # Repeated in the same session, a turn continues from its own history, and selects from that.
                self._num_repeated += 1
                self.session_id = f"{self._name}-again-{self._num_repeated}"
            elif await self._is_in_session(client, deadline_s):
                return True
        self._violate(index, f"no answer within {self._patience_s:.0f} s: {dict(errors)}")
        return False

    async def _is_in_session(self, client: httpx.AsyncClient, deadline_s: float) -> bool:
        """Whether the second turn is part of the session, although its answer did not arrive whole."""
        first = self.script.prompts[1][: self.script.num_stored + 1]
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
                if tokens[:-1] == first or tokens == first:
                    return False
                if not self.script.has_answered(tokens):
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
        url, done, num_reused = self._urls[0], False, 0
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
                        if "kv" in event:
                            self._reports.append(event["kv"])
                            num_reused = event["kv"]["reused_tokens"]
                        for choice in event["choices"]:
                            tokens += choice.get("token_ids") or []
        except TimeoutError:
            self._violate(index, f"no end within {LIMIT_S:.0f} s, {len(tokens)} tokens")
            raise _Ended("hang") from None
        except httpx.HTTPError as error:
            raise _Ended(f"connection: {type(error).__name__}") from error
        finally:
            self.outcome.longest_s = max(self.outcome.longest_s, time.monotonic() - begin_s)
            self._check(index, tuple(prompt), tuple(tokens), num_reused if done else None)
        if not done:
            raise _Ended("connection: no end")
        if index == 0 and "session" in self._reports[-1]:
            raise _Ended("not stored")
        self.outcome.right += 1
        self.outcome.reused_less += index == 1 and num_reused < script.num_stored

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
        if error.get("code") in (None, "internal"):
            self._violate(index, f"an error without a name: {error}")
        raise _Ended(error.get("code") or "unnamed")

    def _check(self, index: int, prompt: Tokens, tokens: Tokens, num_reused: int | None) -> None:
        """The tokens are the oracle's.

        Args: num_reused: as a whole answer reports it; None where the answer was cut.
        """
        script = self.script
        if index == 0 and num_reused is not None and prompt == script.prompts[0]:
            script.first_reused(num_reused)
        if index == 1 and script.asks_again(prompt):
            return  # an attempt that seemed lost was stored after `_is_in_session` looked
        if prompt and prompt != script.prompts[index]:
            self._violate(index, f"the prompt has {len(prompt)} tokens, not {len(script.prompts[index])}")
        elif num_reused is not None and tokens not in (rights := script.answers(index, num_reused)):
            if len(tokens) != len(rights[0]) or not script.resumed_answer(index, num_reused, tokens):
                self._violate(index, f"wrong answer after {num_reused} reused tokens: {tokens}, not {rights}")
        elif not script.begins_answer(index, tokens):
            self._violate(index, f"wrong beginning: {tokens}")

    def _violate(self, index: int, what: str) -> None:
        said = f"{self.session_id} ({self.script.method}), turn {index + 1}: {what}; reports: {self._reports}"
        self.outcome.violations.append(said)
