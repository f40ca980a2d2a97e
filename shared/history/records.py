"""Committed records of the host-memory history, and the bytes of every segment that somebody names.

Behind `memory.py`, whose lock is held around every call. Knows no turns but by the sessions that have one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Set

from kvferry.shared.control.messages import ReuseSource, SessionKey
from kvferry.shared.history.prefix import BLOCK_TOKENS, PrefixIndex, common_prefix
from kvferry.shared.history.segment import Piece
from kvferry.shared.history.turn import StoredRecord


class RecordTable:
    """Sessions' records, least recently used first, under a bound on bytes. Not thread-safe.

    Args: max_bytes: bound on `size_bytes`.

    Attributes:
        size_bytes: of segments that a record or a turn names, each once and whole; of rows staged by turns.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._sessions: OrderedDict[SessionKey, StoredRecord] = OrderedDict()
        self._prefixes: PrefixIndex[SessionKey, StoredRecord] = PrefixIndex()

    def get(self, session: SessionKey) -> StoredRecord | None:
        """The session's record."""
        return self._sessions.get(session)

    def add(self, session: SessionKey, record: StoredRecord) -> None:
        """Take in the record of a session that has none; whoever made it has retained its pieces."""
        assert session not in self._sessions, session
        self._sessions[session] = record
        self._prefixes.add(session.owner, session, record)

    def continued_from(
        self,
        session: SessionKey,
        prompt: tuple[int, ...],
        document: SessionKey | None,
        num_observed: int | None,
    ) -> tuple[ReuseSource, StoredRecord | None, int]:
        """The record that saves the prompt most tokens, and how many; the session's own unless another saves
        a block more.

        Args:
            document: a session whose record may be continued too.
            num_observed: last tokens of the prompt that must be run whatever is held; None shares no prefix.
        """
        own = self._sessions.get(session)
        if own is not None:
            self._sessions.move_to_end(session)
        source: ReuseSource = "session"
        record, reused = own, min(common_prefix(own.token_ids, prompt), len(prompt) - 1) if own else 0
        held = self._sessions.get(document) if document is not None else None
        if document is not None and held is not None:
            length = min(common_prefix(held.token_ids, prompt), held.num_exact_tokens, len(prompt) - 1)
            if length > reused:
                self._sessions.move_to_end(document)
                source, record, reused = "document", held, length
        found = self._prefixes.longest(session.owner, prompt) if num_observed is not None else None
        if found is not None and num_observed is not None:
            other, held, length = found
            length = min(length, len(prompt) - max(1, num_observed))
            if other != session and length >= reused + BLOCK_TOKENS:
                self._sessions.move_to_end(other)
                source, record, reused = "prefix", held, length
        return source, record, reused

    def forget(self, session: SessionKey) -> None:
        """Take a session's record out of the store, if it has one."""
        record = self._sessions.pop(session, None)
        if record is not None:
            self._prefixes.remove(session.owner, session, record)
            self.release(record.pieces)

    def with_room(self, pieces: tuple[Piece, ...], *, busy: Set[SessionKey]) -> tuple[tuple[Piece, ...], int]:
        """Count the pieces that are new copies; where one has no room, it and those after it are left out.
        Returns the pieces and their tokens."""
        kept: list[Piece] = []
        for piece in pieces:
            if piece.segment.references == 0:
                if not self.make_room(piece.segment.size_bytes, busy=busy):
                    break
                self.size_bytes += piece.segment.size_bytes
            kept.append(piece)
        return tuple(kept), sum(piece.length for piece in kept)

    def retain(self, pieces: Iterable[Piece]) -> None:
        """Name the pieces' segments once more."""
        for piece in pieces:
            piece.segment.references += 1

    def release(self, pieces: Iterable[Piece]) -> None:
        """Name them once less; the bytes of those that nobody names are free."""
        for piece in pieces:
            piece.segment.references -= 1
            assert piece.segment.references >= 0, piece
            if piece.segment.references == 0:
                self.size_bytes -= piece.segment.size_bytes

    def make_room(self, num_bytes: int, *, busy: Set[SessionKey]) -> bool:
        """Evict sessions but the busy ones until `num_bytes` fit; evicts none if that cannot help."""
        idle = [session for session in self._sessions if session not in busy]
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
