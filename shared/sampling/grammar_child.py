"""The process in which a grammar is tried first: it may fail or be killed without harming any other.

    parent ──► vocabulary ──► error or null ──► (kind, text) ──► error or null ──► (kind, text) ...

Messages are JSON with their length before them. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import struct
import sys
import threading
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")
NICE = 10
"""The process's niceness: it yields to requests that have no grammar to try."""
CPU_S = 5
"""Processor time of one grammar."""
MEMORY_BYTES = 512 << 20
"""Memory beyond what the process has after reading the vocabulary."""
STACK_BYTES = 4 << 20
"""Stack of the compiling thread: less than a service's threads have, so what passes here passes there."""
NUM_TRIED = 32
"""Random tokens for which a grammar is followed: some grammars show only then that they take too much."""


def read(stream: BinaryIO) -> Any:
    """Read a message; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return json.loads(stream.read(LENGTH.unpack(head)[0]))


def framed(message: Any) -> bytes:
    """Return a message with its length before it."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def _write(message: Any) -> None:
    sys.stdout.buffer.write(framed(message))
    sys.stdout.buffer.flush()


def _used_bytes() -> int:
    """Return the used bytes of the address space."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _try(tokens: Any, kind: str, text: str) -> str | None:
    """Say why a grammar cannot be used; None if it can, as far as this shows."""
    # imported once the process has its limits
    from kvferry.shared.errors import KvferryError
    from kvferry.shared.sampling.grammar_source import Follower, compiled

    chance = random.Random(0)
    try:
        follower = Follower(compiled(tokens, kind, text))
        for number in range(NUM_TRIED):
            allowed = int.from_bytes(follower.mask(), "little")
            if not allowed:
                return None if number else "no token of the model's vocabulary can begin it"
            passed = chance.randrange(allowed.bit_length())
            rest = allowed >> passed
            if not follower.accept(passed + (rest & -rest).bit_length() - 1):
                break
    except KvferryError as error:
        return error.message
    except MemoryError:
        return "it takes too much memory"
    return None


def main() -> None:
    """Try grammars until the input ends."""
    import llguidance

    tokenizer, vocab_size, eos_token_ids = read(sys.stdin.buffer)
    try:
        tokens = llguidance.LLTokenizer(tokenizer, vocab_size, list(eos_token_ids))
    except ValueError as error:
        _write(f"the model's tokenizer has no structured output: {error}")
        return
    _write(None)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not every system reports usage, or limits it
        most = _used_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(STACK_BYTES)
    while (request := read(sys.stdin.buffer)) is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = int(usage.ru_utime + usage.ru_stime) + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        answers: list[str | None] = []
        thread = threading.Thread(
            target=lambda tried, to: to.append(_try(tokens, *tried)), args=(request, answers)
        )
        thread.start()
        thread.join()
        _write(answers.pop())  # without one the process ends, too


if __name__ == "__main__":
    main()
