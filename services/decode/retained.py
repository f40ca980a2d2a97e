"""Selections that stay in the arena after their turn, so that the session's next one need not bring them.

Between a sequence's end and the next reservation of its session. A selection is only ever spare: it goes when
its lease ends, its session is dropped, or anyone needs the bytes, the longest unused first. Copies no rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.shared.cache.arena import Allocation, ByteArena
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.wire.held_rows import HeldRows, Positions


@dataclass(eq=False, kw_only=True)
class RetainedSelection:
    """One session's rows, as its last turn left them.

    Attributes:
        transfer_id: of the transfer that brought the prompt's rows.
        token_ids: int64, those of the prompt and the generated ones that have rows.
        num_prompt_tokens: how many of them are the prompt's.
        positions: as `HeldRows.layers`.
        rows: K and V of each layer, `[H_kv, cap, D]` in the arena.
        num_users: reservations that count on it; its bytes stay while there are any.
        listed: whether new reservations may still find it.
    """

    session: SessionKey
    transfer_id: int
    token_ids: npt.NDArray[np.int64]
    num_prompt_tokens: int
    positions: tuple[Positions | None, ...]
    rows: tuple[tuple[Tensor, Tensor], ...]
    allocation: Allocation
    lease_until_s: float
    num_users: int = 0
    listed: bool = True

    def held_rows(self, num_tokens: int) -> HeldRows:
        """Those of the first `num_tokens` tokens."""
        return HeldRows(
            transfer_id=self.transfer_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=num_tokens,
            layers=self.positions,
        )

    def num_common_tokens(self, prompt_token_ids: tuple[int, ...]) -> int:
        """How many tokens the prompt and this selection begin with alike."""
        prompt = np.asarray(prompt_token_ids, np.int64)
        length = min(len(prompt), len(self.token_ids))
        differs = np.flatnonzero(prompt[:length] != self.token_ids[:length])
        return int(differs[0]) if differs.size else length


class RetainedSelections:
    """The selections of all sessions, one a session at most. Thread-safe.

        RETURNING ──keep──► listed ──lease, drop, evict, replaced──► freed
                              │ pin ▲ unpin          │ in use: unlisted, freed with the last unpin
                              └─► in use ────────────┘

    Args:
        retain_s: how long a selection stays; 0 keeps none.
        release: gives bytes back and serves who waits for them; never called with this object's lock held.
    """

    def __init__(
        self,
        arena: ByteArena,
        *,
        retain_s: float,
        clock: Callable[[], float],
        release: Callable[[Allocation], None],
    ) -> None:
        self._arena = arena
        self._retain_s = retain_s
        self._clock = clock
        self._release = release
        self._lock = threading.Lock()
        self._listed: dict[SessionKey, RetainedSelection] = {}

    @property
    def spare_bytes(self) -> int:
        """Bytes that a reservation could have."""
        with self._lock:
            return self._spare_bytes()

    def keep(self, sequence: Sequence) -> bool:
        """Take a finished sequence's bytes over; returns False, nothing taken, where it is not to be kept."""
        session = sequence.request.session
        with sequence.lock:
            wanted = self._retain_s > 0 and session is not None and not sequence.cancelled
            if not wanted or session is None or sequence.state is not SequenceState.RETURNING:
                return False
            if len(sequence.positions) != len(sequence.caches):
                return False
            num_tokens = sequence.resolved.num_prompt_tokens + sequence.num_appended
            token_ids = (*sequence.request.prompt_token_ids, *sequence.token_ids)[:num_tokens]
            selection = RetainedSelection(
                session=session,
                transfer_id=sequence.key.transfer_id,
                token_ids=np.asarray(token_ids, np.int64),
                num_prompt_tokens=sequence.resolved.num_prompt_tokens,
                positions=sequence.positions,
                rows=tuple((cache.keys, cache.values) for cache in sequence.caches),
                allocation=sequence.hand_over_bytes(),
                lease_until_s=self._clock() + self._retain_s,
            )
        self._arena.advance(selection.allocation, "retained")
        with self._lock:
            replaced = self._unlist(self._listed.get(session))
            self._listed[session] = selection
        self._free(replaced)
        return True

    def pin(
        self, session: SessionKey | None, prompt_token_ids: tuple[int, ...]
    ) -> tuple[RetainedSelection, HeldRows] | None:
        """The session's selection and its rows that fit the new prompt, which stay until `unpin`."""
        with self._lock:
            selection = self._listed.get(session) if session is not None else None
            num_tokens = selection.num_common_tokens(prompt_token_ids) if selection is not None else 0
            if selection is None or num_tokens == 0:
                return None
            selection.num_users += 1
            return selection, selection.held_rows(num_tokens)

    def unpin(self, selection: RetainedSelection, *, superseded: bool) -> None:
        """A reservation is done with it. Args: superseded: a newer one has arrived; nobody is to find it."""
        with self._lock:
            selection.num_users -= 1
            freed = self._unlist(selection) if superseded else self._unused(selection)
        self._free(freed)

    def touch(self, session: SessionKey | None) -> None:
        """Make the session's selection the last to be evicted."""
        with self._lock:
            if session is not None and (selection := self._listed.pop(session, None)) is not None:
                self._listed[session] = selection

    def drop(self, session: SessionKey | None, *, transfer_id: int | None = None) -> int:
        """Forget a session's selection; that of one transfer alone where it is named. Returns its bytes."""
        with self._lock:
            selection = self._listed.get(session) if session is not None else None
            if selection is None or transfer_id not in (None, selection.transfer_id):
                return 0
            freed = self._unlist(selection)
        self._free(freed)
        return selection.allocation.size_bytes

    def expire(self) -> None:
        """Forget what has outlived its lease."""
        now_s = self._clock()
        with self._lock:
            due = [its for its in self._listed.values() if its.lease_until_s <= now_s]
            freed = [self._unlist(selection) for selection in due]
        for selection in freed:
            self._free(selection)

    def evict(self, wanted_bytes: int) -> bool:
        """Free the longest unused selection straight into the arena; the caller serves the line itself.

        Returns: False, with nothing freed, where all that is spare and free would not be enough.
        """
        with self._lock:
            if self._arena.free_bytes + self._spare_bytes() < wanted_bytes:
                return False
            spare = next((its for its in self._listed.values() if its.num_users == 0), None)
            freed = self._unlist(spare)
        if freed is None:
            return False
        self._arena.free(freed.allocation)
        return True

    def close(self) -> None:
        """Forget all."""
        with self._lock:
            freed = [self._unlist(selection) for selection in tuple(self._listed.values())]
        for selection in freed:
            self._free(selection)

    def _spare_bytes(self) -> int:
        return sum(its.allocation.size_bytes for its in self._listed.values() if its.num_users == 0)

    def _unlist(self, selection: RetainedSelection | None) -> RetainedSelection | None:
        """Take it off the table; returns it if its bytes are to be freed now."""
        if selection is None or not selection.listed:
            return None if selection is None else self._unused(selection)
        selection.listed = False
        del self._listed[selection.session]
        return self._unused(selection)

    def _unused(self, selection: RetainedSelection) -> RetainedSelection | None:
        return selection if not selection.listed and selection.num_users == 0 else None

    def _free(self, selection: RetainedSelection | None) -> None:
        if selection is not None:
            self._release(selection.allocation)
