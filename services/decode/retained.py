"""KV that stays in the arena between a session's turns, so that the next transfer can leave it out.

A selection is always spare: it is freed when its session's lease ends, when the session is dropped or starts
again, or when anyone needs the bytes. The longest unused session's oldest selection is evicted first.
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
    """One session's rows, as one of its turns left them.

    Attributes:
        transfer_id: of the transfer that brought the prompt's rows.
        token_ids: int64, those of the prompt and the generated ones that have rows.
        num_prompt_tokens: how many of them are the prompt's.
        positions: as `RetainedRows.layers`.
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
    num_users: int = 0
    listed: bool = True

    def retained_rows(self, num_tokens: int) -> RetainedRows:
        """Those of the first `num_tokens` tokens."""
        return RetainedRows(
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


@dataclass(eq=False, kw_only=True)
class _Chain:
    """A session's selections, the newest first; each came without rows that the next one has."""

    selections: list[RetainedSelection]
    lease_until_s: float


class RetainedSelections:
    """The selections of all sessions, `MAX_RETAINED_SELECTIONS` a session at most. Thread-safe.

        RETURNING ──keep──► listed ──lease, drop, evict, begun anew──► freed
                              │ pin ▲ unpin                │ in use: unlisted, freed with the last unpin
                              └─► in use ──────────────────┘

    Args:
        retain_s: how long a session's selections stay after a turn; 0 keeps none.
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
        self._chains: dict[SessionKey, _Chain] = {}

    @property
    def spare_bytes(self) -> int:
        """Bytes that a reservation could have."""
        with self._lock:
            return self._spare_bytes()

    def keep(self, sequence: Sequence) -> bool:
        """Take a finished sequence's bytes over; returns False, nothing taken, where it is not to be kept."""
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
        """The session's selections and their rows that fit the new prompt, which stay until `unpin`."""
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
        """A reservation is done with them."""
        with self._lock:
            for selection in selections:
                selection.num_users -= 1
            freed = [selection for selection in selections if _is_unused(selection)]
        self._free(freed)

    def touch(self, session: SessionKey | None) -> None:
        """Make the session's selections the last to be evicted."""
        with self._lock:
            if session is not None and (chain := self._chains.pop(session, None)) is not None:
                self._chains[session] = chain

    def drop(self, session: SessionKey | None, *, transfer_id: int | None = None) -> int:
        """Forget a session's selections; only if the newest is of one transfer, where that is named. Returns
        their bytes."""
        with self._lock:
            chain = self._chains.get(session) if session is not None else None
            if session is None or chain is None or transfer_id not in (None, chain.selections[0].transfer_id):
                return 0
            del self._chains[session]
            freed = self._unlist(chain.selections)
        self._free(freed)
        return sum(selection.allocation.size_bytes for selection in chain.selections)

    def expire(self) -> None:
        """Forget what has outlived its lease."""
        now_s = self._clock()
        with self._lock:
            due = [session for session, its in self._chains.items() if its.lease_until_s <= now_s]
            freed = [gone for session in due for gone in self._unlist(self._chains.pop(session).selections)]
        self._free(freed)

    def evict(self, wanted_bytes: int) -> bool:
        """Free the longest unused session's oldest selection straight into the arena; the caller serves the
        line itself.

        Returns: False, with nothing freed, where all that is spare and free would not be enough.
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
        """Forget all."""
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
        """New reservations find these no more; returns those whose bytes are to be freed now."""
        for selection in selections:
            selection.listed = False
        return [selection for selection in selections if _is_unused(selection)]

    def _free(self, selections: list[RetainedSelection]) -> None:
        for selection in selections:
            self._release(selection.allocation)


def _extends(manifest: Manifest, former: RetainedSelection) -> bool:
    """Whether the transfer left out rows of the former one, and its prompt begins with all of that one's."""
    return manifest.retained_transfer_id == former.transfer_id and former.retained_rows(0).is_extended_by(
        manifest.retained_tokens
    )


def _is_unused(selection: RetainedSelection) -> bool:
    return not selection.listed and selection.num_users == 0
