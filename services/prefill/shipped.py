"""Positions of the rows that each session's last turns shipped, which its decode worker may still retain.

Written by the engine when a prompt has been shipped, read when the next ticket names that transfer. Bounded:
what was forgotten is shipped whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from kvferry.shared.cache.delta import Positions, RetainedChain, RetainedRows
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.wire.messages import MAX_RETAINED_SELECTIONS


@dataclass(frozen=True, kw_only=True, eq=False)
class ShippedSelection:
    """One transfer's rows. Attributes: as `RetainedRows` has them."""

    transfer_id: int
    num_prompt_tokens: int
    layers: tuple[Positions | None, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def retained_rows(self) -> RetainedRows:
        """All of them."""
        return RetainedRows(
            transfer_id=self.transfer_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_prompt_tokens,
            layers=self.layers,
        )


_Chain = tuple[ShippedSelection, ...]
"""A session's, the newest first, each of which left out rows of those after it."""


class ShippedSelections:
    """The last selections of each session, the longest unused session forgotten first. Thread-safe.

    Args:
        max_bytes: of positions; 0 remembers none.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._chains: OrderedDict[SessionKey, _Chain] = OrderedDict()
        self._size_bytes = 0

    def put(
        self, session: SessionKey, selection: ShippedSelection, *, retained: RetainedChain | None
    ) -> None:
        """Remember what was shipped. Args: retained: what was left out of it, which stays remembered where
        the prompt extends that one's; anything else of the session is forgotten."""
        with self._lock:
            if self._max_bytes == 0:
                return
            chain: _Chain = (selection,)
            if retained is not None and retained.selections[0].is_extended_by(retained.num_tokens):
                chain += self._from(session, retained.transfer_id)[: retained.depth]
            self._forget(session)
            self._chains[session] = chain[:MAX_RETAINED_SELECTIONS]
            self._size_bytes += _size_bytes(self._chains[session])
            while self._size_bytes > self._max_bytes:
                self._forget(next(iter(self._chains)))

    def retained(
        self, session: SessionKey, *, transfer_id: int, num_tokens: int, depth: int
    ) -> RetainedChain | None:
        """The rows that a worker retains of this transfer and of those before it; None where
        the transfer is not known.

        Args:
            num_tokens: tokens from the start whose rows are still the same.
            depth: how many transfers' rows the worker has.
        """
        with self._lock:
            chain = self._from(session, transfer_id)[:depth]
        if not chain or num_tokens == 0:
            return None
        newest, *older = (selection.retained_rows() for selection in chain)
        # of the newest, rows of generated tokens are retained as well
        newest = replace(newest, num_tokens=num_tokens)
        return RetainedChain(selections=(newest, *older)).first(depth, num_tokens)

    def drop(self, session: SessionKey) -> None:
        with self._lock:
            self._forget(session)

    def _from(self, session: SessionKey, transfer_id: int) -> _Chain:
        """The chain from this transfer on. A turn after it may have been given up by its worker."""
        chain = self._chains.get(session, ())
        known = [selection.transfer_id for selection in chain]
        return chain[known.index(transfer_id) :] if transfer_id in known else ()

    def _forget(self, session: SessionKey) -> None:
        self._size_bytes -= _size_bytes(self._chains.pop(session, ()))


def _size_bytes(chain: _Chain) -> int:
    return sum(selection.size_bytes for selection in chain)
