"""Sends a load to a server and returns a sample of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import h11
import msgspec

from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.bench.http import HttpStatus
from kvferry.tools.bench.load import Conversation, Load, Question
from kvferry.tools.bench.sample import Reading, Sample
from kvferry.tools.bench.server import PATHS, Server, Talk


class Run:
    """One run of a load against one server.

    Attributes: samples: in the order in which the requests ended; a conversation ends with its first failure,
        and the requests that it would have had are not among them.
    """

    def __init__(self, server: Server, load: Load, config: BenchConfig, on_end: Callable[[], None]) -> None:
        """Args: on_end: called after each request."""
        self._server = server
        self._load = load
        self._config = config
        self._on_end = on_end
        self._began_s = 0.0
        self.samples: list[Sample] = []

    async def run(self) -> None:
        await self._server.prepare(self._load)
        self._began_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._config.arrivals == "closed":
                    waiting = iter(self._load.conversations)
                    for _ in range(min(self._config.concurrency, len(self._load.conversations))):
                        tasks.create_task(self._one_after_another(waiting))
                else:
                    for conversation in self._load.conversations:
                        tasks.create_task(self._converse(conversation, conversation.start_s))
        finally:
            await self._server.clean_up()

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def _one_after_another(self, waiting: Iterator[Conversation]) -> None:
        for conversation in waiting:
            await self._converse(conversation, self._now_s())

    async def _converse(self, conversation: Conversation, due_s: float) -> None:
        talk = self._server.talk(conversation, self._load)
        for turn, question in enumerate(conversation.questions):
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            sample = Sample(kind=question.kind.name, turn=turn, due_s=due_s)
            await self._ask(talk, question, sample)
            self.samples.append(sample)
            self._on_end()
            if sample.outcome == "failed":
                return
            due_s = self._now_s() + self._config.think_s

    async def _ask(self, talk: Talk, question: Question, sample: Sample) -> None:
        reading = Reading(sample, self._began_s, question.cancel_after)
        body = talk.body(question)
        sample.sent_s = self._now_s()
        try:
            async with asyncio.timeout(self._config.bench_timeout_s):
                await self._server.events.post(PATHS[self._config.api], body, reading.event)
            reading.end()
        except TimeoutError:
            sample.error = ("timeout", f"no end within {self._config.bench_timeout_s:g} s")
        except HttpStatus as error:
            sample.error = (f"http_{error.status}", error.message)
        except (OSError, h11.RemoteProtocolError) as error:
            sample.error = ("connection", str(error) or type(error).__name__)
        except msgspec.MsgspecError as error:
            sample.error = ("malformed", str(error))
        talk.answered(question, "".join(reading.answer))
