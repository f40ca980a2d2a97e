"""Tries grammars of clients in other processes, before anything else compiles them.

    check ──► known? ──► the caller's queue ──► a child in turn ──► its answer, or its end
                                                   └── too long, or the caller leaves: ended, begun anew

Compiling a grammar can take minutes, gigabytes or the whole stack; no limit of the compiler itself bounds
that. Callers take turns, and one caller never has all children.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvferry.shared.errors import CapacityExceeded, InvalidRequest, Overloaded
from kvferry.shared.process.turns import Turns
from kvferry.shared.sampling import grammar_child
from kvferry.shared.sampling.params import Grammar

NUM_CHILDREN = 2
MAX_WAITING = 32
"""How many grammars of one caller may wait."""
START_S, CHECK_S = 60.0, 20.0
"""Limits until a child has read the vocabulary, and for one grammar; processor time is also bounded."""
_MAX_KNOWN = 4096
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "HOME")
_PACKAGES = str(Path(__file__).parents[3])


class GrammarChecks:
    """For one event loop.

    Args:
        load_tokenizer: makes the text of `tokenizer.json` as grammars need it; called once, in a thread.
        vocab_size, eos_token_ids: of the model.
    """

    def __init__(
        self, load_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocabulary = vocab_size, tuple(eos_token_ids)
        self._greeting: bytes | None = None
        self._unusable: str | None = None
        """Why the tokenizer allows no grammar at all; None if it does, or is not known."""
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        """Why a grammar cannot be used, by grammar."""
        self._idle: list[_Child] = []
        # one child is left for others
        self._turns = Turns(NUM_CHILDREN, most_of_one=max(NUM_CHILDREN - 1, 1))

    async def check(self, grammar: Grammar, owner: str = "") -> None:
        """Try a client's grammar where it can harm nobody, before anything else compiles it.

        Raises: InvalidRequest: it is not valid, too large, cannot be compiled within the bounds, or no token
            can begin what it allows; CapacityExceeded: too many of the caller's are waiting.
        """
        if self._unusable is not None:
            raise InvalidRequest(self._unusable)
        key = hashlib.sha256(json.dumps((grammar.kind, grammar.text)).encode()).digest()
        if key not in self._known:
            async with self._turn(owner) as child:
                # another request may have asked for it meanwhile
                if key not in self._known:
                    self._remember(key, await child.ask(grammar.kind, grammar.text))
        self._known.move_to_end(key)
        if (error := self._known[key]) is not None:
            raise InvalidRequest(error)

    async def close(self) -> None:
        """End the idle children; a working one ends with its request. Idempotent."""
        while self._idle:
            await self._idle.pop().end()

    def _remember(self, key: bytes, error: str | None) -> None:
        self._known[key] = error
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[_Child]:
        if (num_waiting := self._turns.num_waiting(owner)) >= MAX_WAITING:
            raise CapacityExceeded(
                f"{num_waiting} grammars of this key are waiting to be compiled; at most {MAX_WAITING} may",
                reason="grammars",
                retry_after_s=1.0,
            )
        await self._turns.take(owner)
        child = self._idle.pop() if self._idle else _Child()
        try:
            if not child.is_running:
                await child.end()
                self._unusable = await child.start(await self._hello())
            if self._unusable is not None:
                raise InvalidRequest(self._unusable)
            yield child
        except BaseException:
            # its result is not wanted any more, or it has ended
            await asyncio.shield(child.end())
            raise
        else:
            self._idle.append(child)  # ended or not: it is started when it is needed
        finally:
            self._turns.leave(owner)

    async def _hello(self) -> bytes:
        if self._greeting is None:
            text = await asyncio.to_thread(self._load_tokenizer)
            vocab_size, eos_token_ids = self._vocabulary
            self._greeting = grammar_child.framed((text, vocab_size, eos_token_ids))
        return self._greeting


class _Child:
    """One process. A child that has not started, or has ended, can be started."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        if self._process is None or self._process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):
            return True
        try:  # it may have ended since the event loop looked
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    async def start(self, hello: bytes) -> str | None:
        """Start the process. Return why its vocabulary allows no grammar; None if it does.

        Raises: Overloaded: it did not start.
        """
        # it reads what clients wrote, so it gets none of the service's secrets
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        paths = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvferry.shared.sampling.grammar_child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**inherited, "PYTHONPATH": paths},
        )
        try:
            async with asyncio.timeout(START_S):
                return await self._answer_to(hello)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise Overloaded("The process that compiles grammars did not start", retry_after_s=1.0) from error

    async def ask(self, kind: str, text: str) -> str | None:
        """Say why a grammar cannot be used; None if it can. The process may have ended afterwards.

        Raises: InvalidRequest: there is no answer in time, which may be this machine's fault.
        """
        try:
            async with asyncio.timeout(CHECK_S):
                return await self._answer_to(grammar_child.framed((kind, text)))
        except TimeoutError:
            raise InvalidRequest(f"it did not compile within {CHECK_S:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            if await self.end() in (-signal.SIGKILL, -signal.SIGTERM):  # otherwise its own limits ended it
                raise Overloaded("The process that compiles grammars was killed", retry_after_s=1.0) from None
            return "it takes too much time, memory or depth to compile"

    async def end(self) -> int:
        """Kill the process, if it runs. Return how it ended, as `Process.returncode` says."""
        if self._process is None:
            return 0
        process = self._process
        if self.is_running:  # if killed after its end, asyncio would not learn how it ended
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self._process = None
        return await process.wait()

    async def _answer_to(self, message: bytes) -> str | None:
        assert self._process is not None, "it was started"
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "it is a pipe"
        assert stdout is not None, "it is a pipe"
        stdin.write(message)
        await stdin.drain()
        head = await stdout.readexactly(grammar_child.LENGTH.size)
        answer = json.loads(await stdout.readexactly(grammar_child.LENGTH.unpack(head)[0]))
        return None if answer is None else str(answer)
