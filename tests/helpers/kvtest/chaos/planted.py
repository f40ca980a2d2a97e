"""A service's process of a test: the `kvferry` command, which may do one thing wrong on purpose.

Every planted fault is one that the chaos suite must find. "tcp" is none: it makes the process exchange blocks
over ZeroMQ, so that a proxy sees them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any


def tcp() -> None:
    """Blocks go over ZeroMQ."""
    from kvferry.shared.wire import shared_memory

    shared_memory.IS_SUPPORTED = False


def leak() -> None:
    """Decode does not free the arena bytes of every sixth sequence."""
    from kvferry.services.decode.memory import Scheduler

    release, numbers = Scheduler.release, itertools.count(1)

    def forgetful(self: Scheduler, allocation: Any) -> None:
        if next(numbers) % 6:
            release(self, allocation)

    Scheduler.release = forgetful  # type: ignore[method-assign]


def skipped_checksum() -> None:
    """Decode takes blocks as they come."""
    import xxhash

    from kvferry.shared.wire import frames, receiver

    decode = receiver.decode_message

    def trusting(message: Any) -> Any:
        header = bytes(message[0])[: frames._CHECKED_BYTES]
        digest = xxhash.xxh3_64(header)
        for frame in message[1:]:
            digest.update(frame)
        return decode([header + frames._CHECKSUM.pack(digest.intdigest()), *message[1:]])

    receiver.decode_message = trusting


def wrong_generation() -> None:
    """Every second transfer is written to the arena range of one of the four sequences before it, as a block
    of an old generation would be."""
    from collections import deque

    from kvferry.services.decode import receiver

    make_writer, numbers = receiver.PartReceiver._writer, itertools.count(1)
    last: deque[Any] = deque(maxlen=4)

    def confused(self: Any, part: Any, manifest: Any) -> Any:
        writer = make_writer(self, part, manifest)
        mine = writer._buffer
        if next(numbers) % 2 == 0:
            fitting = [buffer for buffer in last if buffer.numel() >= mine.numel()]
            writer._buffer = fitting[0][: mine.numel()] if fitting else mine
        last.append(mine)
        return writer

    receiver.PartReceiver._writer = confused  # type: ignore[method-assign]


def dropped_token() -> None:
    """The router loses every hundredth token."""
    from kvferry.services.router.turn import turn

    events, numbers = turn.Turn.events, itertools.count(1)

    async def leaky(self: Any) -> Any:
        async for event in events(self):
            if not isinstance(event, turn.SampledToken) or next(numbers) % 100:
                yield event

    turn.Turn.events = leaky  # type: ignore[method-assign, assignment]


PLANTED: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (tcp, leak, skipped_checksum, wrong_generation, dropped_token)
}


def run() -> None:
    """`NAME[,NAME] ROLE [OPTIONS]` of `sys.argv`."""
    from kvferry.services.launcher.cli import main

    for name in filter(None, sys.argv[1].split(",")):
        PLANTED[name]()
    main(sys.argv[2:])
