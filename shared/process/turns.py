"""Places that callers take in turn, so that one with much to do does not keep the others waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque


class Turns:
    """For one event loop.

    take ──► the caller's queue ──► places in turn ──► leave

    The caller at the head of the queues waits until there are enough places for it; only callers that have
    their share already are passed over.

    Args: num_places: of all callers together; most_of_one: of them, for one caller.
    """

    def __init__(self, num_places: int, *, most_of_one: int) -> None:
        assert 1 <= most_of_one <= num_places, (most_of_one, num_places)
        self._num_free = num_places
        self._most_of_one = most_of_one
        self._taken: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        """The waiting places by caller; the caller whose turn is next comes first."""

    def num_waiting(self, owner: str) -> int:
        """Return how many of a caller's requests wait."""
        return len(self._queues.get(owner, ()))

    async def take(self, owner: str, num: int = 1) -> None:
        """Wait for so many places, or a caller's whole share where that is less. `leave` gives them back."""
        num = min(num, self._most_of_one)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append((num, place))
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                with contextlib.suppress(KeyError, ValueError):  # it waits no more
                    self._queues[owner].remove((num, place))
                self._admit()  # others may have waited behind it
            else:  # its turn had come
                self.leave(owner, num)
            raise

    def leave(self, owner: str, num: int = 1) -> None:
        """Give places back."""
        num = min(num, self._most_of_one)
        self._num_free += num
        self._taken[owner] -= num
        if not self._taken[owner]:
            del self._taken[owner]
        self._admit()

    def _admit(self) -> None:
        """Give free places to those whose turn it is."""
        while (turn := self._next()) is not None:
            num, place = self._queues[turn][0]
            if not place.done():  # else its caller is leaving
                if num > self._num_free:
                    break
                self._num_free -= num
                self._taken[turn] += num
                place.set_result(None)
                self._queues.move_to_end(turn)
            self._queues[turn].popleft()
        for owner in [owner for owner, queue in self._queues.items() if not queue]:
            del self._queues[owner]

    def _next(self) -> str | None:
        """Return the caller whose turn it is; None where each has its share or waits for nothing."""
        for owner, queue in self._queues.items():
            if queue and self._taken[owner] + queue[0][0] <= self._most_of_one:
                return owner
        return None
