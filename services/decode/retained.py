"""KV that stays in the arena between a session's turns, so that the next transfer can leave it out.

A selection is freed when its session's lease ends, when the session is dropped or its next turn does not
extend it, or when a reservation needs the bytes. Pinned selections are freed only after they are unpinned.
Eviction begins with the oldest selection of the least recently used session.
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
from kvferry.shared.cache.delta import Positions, RetainedChain, RetainedRows
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.wire.messages import MAX_RETAINED_SELECTIONS, Manifest


@dataclass(eq=False, kw_only=True)
class RetainedSelection:
    """The rows in the arena after one turn of a session.

    Attributes:
        transfer_id: of the transfer that brought the prompt's rows.
        token_ids: int64, of the prompt and of the generated tokens that have rows.
        num_prompt_tokens: how many of them are the prompt's.
        positions: as `RetainedRows.layers`.
        rows: K and V of each layer, `[H_kv, cap, D]` in the arena.
        num_users: reservations that pin it; its bytes are not freed while there are any.
        listed: whether new reservations can still find it.
    """

    session: SessionKey
    transfer_id: int
    token_ids: npt.NDArray[np.int64]
    num_prompt_tokens: int
    positions: tuple[Positions | None, ...]
    rows: tuple[tuple[Tensor, Tensor], ...]
    allocation: Allocation
    num_users: int = 0
    listed: bool = True

    def retained_rows(self, num_tokens: int) -> RetainedRows:
        """The rows that a prompt with the same first `num_tokens` tokens can reuse."""
        return RetainedRows(
            transfer_id=self.transfer_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=num_tokens,
            layers=self.positions,
        )

    def num_common_tokens(self, prompt_token_ids: tuple[int, ...]) -> int:
        """Length of the common prefix of the prompt and this selection, in tokens."""
        prompt = np.asarray(prompt_token_ids, np.int64)
        length = min(len(prompt), len(self.token_ids))
        differs = np.flatnonzero(prompt[:length] != self.token_ids[:length])
        return int(differs[0]) if differs.size else length


@dataclass(eq=False, kw_only=True)
class _Chain:
    """A session's selections, newest first; each was shipped without rows that older ones have."""

    selections: list[RetainedSelection]
    lease_until_s: float


class RetainedSelections:
    """The selections of all sessions, at most `MAX_RETAINED_SELECTIONS` per session. Thread-safe.

        RETURNING ──keep──► listed ──lease, drop, evict, not extended──► freed
                              │ pin ▲ unpin                │ pinned: unlisted, freed at the last unpin
                              └─► pinned ──────────────────┘

    `evict` skips pinned selections.

    Args:
        retain_s: how long a session's selections stay after a turn; 0 retains none.
        release: frees bytes and grants them to waiting requests; called without this object's lock.
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
        self._chains: dict[SessionKey, _Chain] = {}

    @property
    def spare_bytes(self) -> int:
        """Bytes of unpinned selections, which eviction can free."""
        with self._lock:
            return self._spare_bytes()

    def keep(self, sequence: Sequence) -> bool:
        """Retain a finished sequence's bytes. Returns False, and takes nothing, if they cannot be reused."""
        session, manifest = sequence.request.session, sequence.manifest
        with sequence.lock:
            wanted = self._retain_s > 0 and session is not None and not sequence.cancelled
            if not wanted or session is None or sequence.state is not SequenceState.RETURNING:
                return False
            if manifest is None or len(sequence.positions) != len(sequence.caches):
                return False
            num_tokens = sequence.resolved.num_prompt_tokens + sequence.num_appended
            token_ids = (*sequence.request.prompt_token_ids, *sequence.token_ids)[:num_tokens]
            selection = RetainedSelection(
                session=session,
                transfer_id=sequence.key.transfer_id,
                token_ids=np.asarray(token_ids, np.int64),
                num_prompt_tokens=sequence.resolved.num_prompt_tokens,
                positions=sequence.positions,
                rows=tuple((its.regions["keys"], its.regions["values"]) for its in sequence.caches),
                allocation=sequence.hand_over_bytes(),
            )
        self._arena.advance(selection.allocation, "retained")
        with self._lock:
            former = self._chains.pop(session, None)
            earlier = former.selections if former is not None else []
            stays = bool(earlier) and _extends(manifest, earlier[0])
            kept = [selection, *earlier][: MAX_RETAINED_SELECTIONS if stays else 1]
            self._chains[session] = _Chain(selections=kept, lease_until_s=self._clock() + self._retain_s)
            freed = self._unlist(earlier[len(kept) - 1 :])
        self._free(freed)
        return True

    def pin(
        self, session: SessionKey | None, prompt_token_ids: tuple[int, ...]
    ) -> tuple[tuple[RetainedSelection, ...], RetainedChain] | None:
        """Pin the session's selections until `unpin`.

        Returns: the selections and the rows that the prompt can reuse; None if there are none.
        """
        with self._lock:
            chain = self._chains.get(session) if session is not None else None
            selections = tuple(chain.selections) if chain is not None else ()
            num_tokens = selections[0].num_common_tokens(prompt_token_ids) if selections else 0
            if num_tokens == 0:
                return None
            for selection in selections:
                selection.num_users += 1
            chain_rows = RetainedChain(selections=tuple(its.retained_rows(num_tokens) for its in selections))
            return selections, chain_rows.first(chain_rows.depth, num_tokens)

    def unpin(self, selections: tuple[RetainedSelection, ...]) -> None:
        """Release a reservation's pin; frees the selections that are unlisted and unused."""
        with self._lock:
            for selection in selections:
                selection.num_users -= 1
            freed = [selection for selection in selections if _is_unused(selection)]
        self._free(freed)

    def touch(self, session: SessionKey | None) -> None:
        """Mark the session as most recently used, so that its selections are evicted last."""
        with self._lock:
            if session is not None and (chain := self._chains.pop(session, None)) is not None:
                self._chains[session] = chain

    def drop(self, session: SessionKey | None, *, transfer_id: int | None = None) -> int:
        """Drop a session's selections; with `transfer_id`, only if the newest one is of that transfer.

        Returns: the dropped selections' bytes.
        """
        with self._lock:
            chain = self._chains.get(session) if session is not None else None
            if session is None or chain is None or transfer_id not in (None, chain.selections[0].transfer_id):
                return 0
            del self._chains[session]
            freed = self._unlist(chain.selections)
        self._free(freed)
        return sum(selection.allocation.size_bytes for selection in chain.selections)

    def expire(self) -> None:
        """Drop the sessions whose lease has ended."""
        now_s = self._clock()
        with self._lock:
            due = [session for session, its in self._chains.items() if its.lease_until_s <= now_s]
            freed = [gone for session in due for gone in self._unlist(self._chains.pop(session).selections)]
        self._free(freed)

    def evict(self, wanted_bytes: int) -> bool:
        """Free the oldest selection of the least recently used session that is not pinned.

        Frees it in the arena without granting waiting requests, which the caller does.

        Returns: whether one was freed; False also if all free and unpinned bytes together are too few.
        """
        with self._lock:
            if self._arena.free_bytes + self._spare_bytes() < wanted_bytes:
                return False
            spare = next((its for its in self._chains.values() if its.selections[-1].num_users == 0), None)
            if spare is None:
                return False
            selection = spare.selections.pop()
            selection.listed = False
            if not spare.selections:
                del self._chains[selection.session]
        self._arena.free(selection.allocation)
        return True

    def close(self) -> None:
        """Drop all selections."""
        with self._lock:
            freed = [gone for chain in self._chains.values() for gone in self._unlist(chain.selections)]
            self._chains.clear()
        self._free(freed)

    def _spare_bytes(self) -> int:
        return sum(
            selection.allocation.size_bytes
            for chain in self._chains.values()
            for selection in chain.selections
            if selection.num_users == 0
        )

    def _unlist(self, selections: list[RetainedSelection]) -> list[RetainedSelection]:
        """Hide these from new reservations; returns the unpinned ones, whose bytes can be freed now."""
        for selection in selections:
            selection.listed = False
        return [selection for selection in selections if _is_unused(selection)]

    def _free(self, selections: list[RetainedSelection]) -> None:
        for selection in selections:
            self._release(selection.allocation)


def _extends(manifest: Manifest, former: RetainedSelection) -> bool:
    """Whether the transfer left out rows of `former` and its prompt begins with all of that one's prompt."""
    return manifest.retained_transfer_id == former.transfer_id and former.retained_rows(0).is_extended_by(
        manifest.retained_tokens
    )


def _is_unused(selection: RetainedSelection) -> bool:
    return not selection.listed and selection.num_users == 0
