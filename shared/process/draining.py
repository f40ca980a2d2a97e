"""The end of a service: it takes nothing new, and waits for what has begun.

open ──► ... ──► wait: refuses ──► nothing runs any more, or the time is over
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.shared.errors import KvferryError

REASON = "draining"
"""The reason of the error with which a draining service refuses work, or ends it."""
_POLL_S = 0.05


class Drain:
    """A service's end. For one event loop; any thread may read `has_begun`.

    Attributes:
        has_begun: the service refuses new requests with `refusal`.
        num_running: requests that run; the service counts them.

    Args: refusal: makes the error for requests that come after the drain has begun; its reason is `REASON`.
    """

    def __init__(self, refusal: Callable[[], KvferryError]) -> None:
        self.refusal = refusal
        self.has_begun = False
        self.num_running = 0

    async def wait(self, timeout_s: float, num_more: Callable[[], int] = lambda: 0) -> bool:
        """Begin, and wait for what runs. Return whether all ended in time.

        Args: num_more: how many other things to wait for.
        """
        self.has_begun = True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self.num_running or num_more():
            if loop.time() >= deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True
