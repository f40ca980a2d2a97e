"""The committed records of the host-memory history, the index of their prefixes, and the byte count of all
segments in use."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvferry.shared.control.messages import ReuseSource, SessionKey
from kvferry.shared.history.rows import Piece

PINNED_SHARE = 0.25
"""The part of the memory in which one owner's pinned records stay longer than others."""
BLOCK_TOKENS = 32
"""Prefixes shorter than one block are not found: running them costs no more than looking them up."""


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """A session's committed history. Immutable; turns compare records by identity.

    Attributes:
        pieces: where the tokens' KV is, in order; their lengths add up to `len(token_ids)`.
        num_exact_tokens: leading tokens whose KV prefill computed from the tokens before them alone. KV of
            generated tokens, and of what was run after them, also depends on the rows that decode had; other
            sessions do not continue from that.
        pinned: evicted after all others, see `RecordTable.make_room`.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    num_exact_tokens: int
    pinned: bool = False

    @property
    def size_bytes(self) -> int:
        """Host memory of the segments it names, each counted whole."""
        return sum(piece.segment.size_bytes for piece in self.pieces)


class RecordTable:
    """Sessions' records, least recently used first, under a limit on bytes. Callers hold `lock`.

    Args: max_bytes: limit on `size_bytes`.

    Attributes:
        size_bytes: of all segments that a record or a turn names, each counted once and whole, and of staged
            rows.
        busy: how many open turns each session has; sessions with any are not evicted.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.lock = threading.RLock()
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.busy: Counter[SessionKey] = Counter()
        self._sessions: OrderedDict[SessionKey, StoredRecord] = OrderedDict()
        self._prefixes = PrefixIndex()

    def get(self, session: SessionKey) -> StoredRecord | None:
        return self._sessions.get(session)

    def add(self, session: SessionKey, record: StoredRecord) -> None:
        """Add the record of a session that has none. The caller has retained its pieces."""
        assert session not in self._sessions, session
        self._sessions[session] = record
        self._prefixes.add(session, record)

    def find(
        self,
        session: SessionKey,
        prompt: tuple[int, ...],
        document: SessionKey | None,
        num_observed: int | None,
    ) -> tuple[ReuseSource, StoredRecord | None, int]:
        """The record that saves the prompt the most tokens, and how many. The session's own, unless the
        document saves more, or another session of the owner a block more. Arguments as in
        `HistoryStore.begin`."""
        source: ReuseSource = "session"
        reused, found = 0, session
        own = self._sessions.get(session)
        if own is not None:
            reused = min(common_prefix(own.token_ids, prompt), len(prompt) - 1)
        other = self._sessions.get(document) if document is not None else None
        if document is not None and other is not None:
            length = min(common_prefix(other.token_ids, prompt), other.num_exact_tokens, len(prompt) - 1)
            if length > reused:
                source, reused, found = "document", length, document
        shared = self._prefixes.longest(session.owner, prompt) if num_observed is not None else None
        if shared is not None and num_observed is not None:
            key, length = shared
            length = min(length, len(prompt) - max(1, num_observed))
            if key != session and length >= reused + BLOCK_TOKENS:
                source, reused, found = "prefix", length, key
        for key in (session, found):
            if key in self._sessions:
                self._sessions.move_to_end(key)
        return source, self._sessions.get(found), reused

    def forget(self, session: SessionKey) -> None:
        """Remove a session's record, if it has one."""
        record = self._sessions.pop(session, None)
        if record is not None:
            self._prefixes.remove(session, record)
            self.release(record.pieces)

    def add_copies(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Count the pieces whose segments are new. The first that does not fit and all after it are left
        out."""
        for index, piece in enumerate(pieces):
            if piece.segment.references == 0:
                if not self.make_room(piece.segment.size_bytes):
                    return pieces[:index]
                self.size_bytes += piece.segment.size_bytes
        return pieces

    def retain(self, pieces: Iterable[Piece]) -> None:
        """Add a reference to each piece's segment."""
        for piece in pieces:
            piece.segment.references += 1

    def release(self, pieces: Iterable[Piece]) -> None:
        """Remove a reference from each piece's segment; segments without references are freed."""
        for piece in pieces:
            piece.segment.references -= 1
            assert piece.segment.references >= 0, piece
            if piece.segment.references == 0:
                self.size_bytes -= piece.segment.size_bytes

    def make_room(self, num_bytes: int) -> bool:
        """Evict idle sessions until `num_bytes` fit: implicit ones first, pinned ones last. Of an owner's
        pinned records those count that were used last and fit into PINNED_SHARE of the limit. Evicts none if
        that would not be enough."""
        if self.size_bytes + num_bytes <= self.max_bytes:
            return True
        self.busy = +self.busy  # without zeros
        idle = [session for session in self._sessions if session not in self.busy]
        pinned = self._pinned()
        idle.sort(key=lambda session: (session in pinned) - session.is_implicit)
        named = Counter(piece.segment for session in idle for piece in self._sessions[session].pieces)
        evictable_bytes = sum(
            segment.size_bytes for segment, count in named.items() if count == segment.references
        )
        if self.size_bytes - evictable_bytes + num_bytes > self.max_bytes:
            return False
        for session in idle:
            if self.size_bytes + num_bytes <= self.max_bytes:
                break
            self.forget(session)
        return True

    def _pinned(self) -> set[SessionKey]:
        used: Counter[str] = Counter()
        pinned = set()
        for session, record in reversed(self._sessions.items()):
            if record.pinned:
                used[session.owner] += record.size_bytes
                if used[session.owner] <= PINNED_SHARE * self.max_bytes:
                    pinned.add(session)
        return pinned


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    # a and b agree up to low and differ before high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixIndex:
    """Which of an owner's records begin as a prompt does. Not thread-safe.

    Records by owner and by the hash of their first 1, 2, 3, ... blocks, each hash made from the one before. A
    hash only proposes records; how much they share is compared token by token. Records of one owner are never
    found for another, so neither what is reused nor how long it takes tells one owner anything about another.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], dict[SessionKey, StoredRecord]] = {}

    def add(self, session: SessionKey, record: StoredRecord) -> None:
        """Make a record findable by its exact tokens."""
        for block in _block_hashes(record.token_ids, record.num_exact_tokens):
            self._records.setdefault((session.owner, block), {})[session] = record

    def remove(self, session: SessionKey, record: StoredRecord) -> None:
        for block in _block_hashes(record.token_ids, record.num_exact_tokens):
            named = self._records[session.owner, block]
            del named[session]
            if not named:
                del self._records[session.owner, block]

    def longest(self, owner: str, token_ids: tuple[int, ...]) -> tuple[SessionKey, int] | None:
        """The owner's session whose record shares most of its exact tokens with these, and how many; None if
        that is less than a block."""
        found: dict[SessionKey, StoredRecord] = {}
        shared = 0
        for block in _block_hashes(token_ids, len(token_ids)):
            proposed = self._records.get((owner, block))
            if proposed is None:
                break
            found, shared = proposed, shared + BLOCK_TOKENS
        if not found:
            return None
        # All agree up to here and none beyond the next block, so the rest of that block decides.
        following = token_ids[shared : shared + BLOCK_TOKENS]

        def more(session: SessionKey) -> int:
            record = found[session]
            return common_prefix(
                record.token_ids[shared : min(shared + BLOCK_TOKENS, record.num_exact_tokens)], following
            )

        best = max(found, key=more)
        length = min(common_prefix(found[best].token_ids, token_ids), found[best].num_exact_tokens)
        return (best, length) if length >= BLOCK_TOKENS else None

    def __len__(self) -> int:
        return len(self._records)


def _block_hashes(token_ids: tuple[int, ...], num_tokens: int) -> Iterator[int]:
    block = 0
    for end in range(BLOCK_TOKENS, num_tokens + 1, BLOCK_TOKENS):
        block = hash((block, token_ids[end - BLOCK_TOKENS : end]))
        yield block
