"""The committed records of the host-memory history, and the byte count of all segments in use."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from kvferry.shared.control.messages import ReuseSource, SessionKey
from kvferry.shared.history.prefix import BLOCK_TOKENS, PrefixIndex, common_prefix
from kvferry.shared.history.rows import Piece


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """A session's committed history. Immutable; turns compare records by identity.

    Attributes:
        version: grows by one with each commit of the session.
        pieces: where the tokens' KV is, in order; their lengths add up to `len(token_ids)`.
        num_exact_tokens: leading tokens whose KV prefill computed from the tokens before them alone. KV of
            generated tokens, and of what was run after them, also depends on the rows that decode had; other
            sessions do not continue from that.
    """

    token_ids: tuple[int, ...]
    version: int
    pieces: tuple[Piece, ...]
    num_exact_tokens: int

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
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.lock = threading.RLock()
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._sessions: OrderedDict[SessionKey, StoredRecord] = OrderedDict()
        self._prefixes: PrefixIndex[StoredRecord] = PrefixIndex()

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

    def add_copies(
        self, pieces: tuple[Piece, ...], *, busy: Callable[[], Set[SessionKey]]
    ) -> tuple[tuple[Piece, ...], int]:
        """Count the pieces whose segments are new. The first that does not fit and all after it are left out.
        Returns the remaining pieces and their tokens."""
        added: list[Piece] = []
        for piece in pieces:
            if piece.segment.references == 0:
                if not self.make_room(piece.segment.size_bytes, busy=busy):
                    break
                self.size_bytes += piece.segment.size_bytes
            added.append(piece)
        return tuple(added), sum(piece.length for piece in added)

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

    def make_room(self, num_bytes: int, *, busy: Callable[[], Set[SessionKey]]) -> bool:
        """Evict sessions that are not busy until `num_bytes` fit. Evicts none if that would not be enough.

        Args: busy: returns the sessions that have open turns.
        """
        if self.size_bytes + num_bytes <= self.max_bytes:
            return True
        in_turns = busy()
        idle = [session for session in self._sessions if session not in in_turns]
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
