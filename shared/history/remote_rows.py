"""The rows that a staged turn reads from Redis because host memory lacks them, one layer ahead of the
prompt's pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from kvferry.shared.control.messages import ReuseSource
from kvferry.shared.errors import HistoryMiss, StoreUnavailable
from kvferry.shared.history.rows import RowChunk


class RemoteRows:
    """`num_tokens` tokens' rows of each layer. `load` is called by one thread, `cancel` by any.

    Args:
        fetch: begins to read a layer.
        source: whose record they are of.
        timeout_s: how long all calls of `load` may wait in all.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fetch: Callable[[int], Future[list[RowChunk]]],
        *,
        num_tokens: int,
        num_layers: int,
        source: ReuseSource,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.num_tokens = num_tokens
        self.source = source
        self._fetch = fetch
        self._num_layers = num_layers
        self._timeout_s = timeout_s
        self._remaining_s = timeout_s
        self._clock = clock
        self._fetches: dict[int, Future[list[RowChunk]]] = {}

    def load(self, layer: int) -> list[RowChunk]:
        """Wait for a layer's rows and begin to read the next layer's.

        Raises: HistoryMiss, reason "redis_slow", "redis_unavailable", "evicted" or "corrupt".
        """
        fetch = self._fetches.pop(layer, None) or self._fetch(layer)
        if layer + 1 < self._num_layers and layer + 1 not in self._fetches:
            self._fetches[layer + 1] = self._fetch(layer + 1)
        begin_s = self._clock()
        try:
            return fetch.result(max(0.0, self._remaining_s))
        except FutureTimeout:
            raise HistoryMiss(
                f"layer {layer} was not read from Redis in time; a turn waits at most {self._timeout_s:g} s",
                reason="redis_slow",
            ) from None
        except StoreUnavailable as error:
            raise HistoryMiss(error.message, reason="redis_unavailable") from error
        finally:
            self._remaining_s -= self._clock() - begin_s

    def cancel(self) -> None:
        """Cancel reads that have not begun. Idempotent."""
        for fetch in list(self._fetches.values()):
            fetch.cancel()
        self._fetches.clear()
