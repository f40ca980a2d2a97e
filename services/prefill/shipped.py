"""What each session's last turn shipped: the positions of which its decode worker may still hold the rows.

Written by the engine when a prompt has been shipped, asked when the next one's ticket names that transfer. A
memory of positions alone, bounded; what it has forgotten is shipped whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.wire.held_rows import HeldRows, Positions


@dataclass(frozen=True, kw_only=True, eq=False)
class ShippedSelection:
    """One transfer's rows. Attributes: as `HeldRows` has them."""

    transfer_id: int
    num_prompt_tokens: int
    layers: tuple[Positions | None, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if layer is not None)


class ShippedSelections:
    """The last selection of each session, the longest unused forgotten first. Thread-safe.

    Args:
        max_bytes: of positions; 0 remembers none.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._selections: OrderedDict[SessionKey, ShippedSelection] = OrderedDict()
        self._size_bytes = 0

    def put(self, session: SessionKey, selection: ShippedSelection) -> None:
        """Remember it in place of the session's former one."""
        self.drop(session)
        with self._lock:
            if self._max_bytes == 0:
                return
            self._selections[session] = selection
            self._size_bytes += selection.size_bytes
            while self._size_bytes > self._max_bytes:
                self._size_bytes -= self._selections.popitem(last=False)[1].size_bytes

    def held(self, session: SessionKey, *, transfer_id: int, num_tokens: int) -> HeldRows | None:
        """What a worker holds that has kept this transfer's rows; None where another one was the last.

        Args: num_tokens: tokens from the start whose rows are still the same.
        """
        with self._lock:
            selection = self._selections.get(session)
        if selection is None or selection.transfer_id != transfer_id or num_tokens == 0:
            return None
        return HeldRows(
            transfer_id=transfer_id,
            num_prompt_tokens=selection.num_prompt_tokens,
            num_tokens=num_tokens,
            layers=selection.layers,
        )

    def drop(self, session: SessionKey) -> None:
        with self._lock:
            selection = self._selections.pop(session, None)
            if selection is not None:
                self._size_bytes -= selection.size_bytes
