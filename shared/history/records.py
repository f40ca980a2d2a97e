"""The committed records of the host-memory history, the index of their prefixes, and the byte count of all
segments and checkpoints in use."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from kvferry.shared.control.messages import ReuseSource, SessionKey
from kvferry.shared.history.checkpoints import Checkpoint, States, longest
from kvferry.shared.history.rows import Piece, Segment

Part = Segment | States
"""What is counted and shared: it is freed when no record and no turn names it."""

PINNED_SHARE = 0.25
"""The part of the memory in which one owner's pinned records stay longer than others."""
BLOCK_TOKENS = 32
"""Prefixes shorter than one block are not found: running them costs no more than looking them up."""


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """A session's committed history. Immutable; turns compare records by identity.

    Attributes:
        pieces: where the tokens' KV is, in order; their lengths add up to `len(token_ids)`.
        checkpoints: where it can be continued if the model has states.
        num_exact_tokens: leading tokens whose KV prefill computed from the tokens before them alone. KV of
            generated tokens, and of what was run after them, also depends on the rows that decode had; other
            sessions do not continue from that.
        pinned: evicted after all others, see `RecordTable.make_room`.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    num_exact_tokens: int
    checkpoints: tuple[Checkpoint, ...] = ()
    pinned: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return parts_of(self.pieces, self.checkpoints)

    @property
    def size_bytes(self) -> int:
        """Host memory of the parts it names, each counted whole."""
        return sum(part.size_bytes for part in self.parts)


def parts_of(pieces: Iterable[Piece], checkpoints: Iterable[Checkpoint]) -> tuple[Part, ...]:
    return (*[piece.segment for piece in pieces], *[checkpoint.states for checkpoint in checkpoints])


@dataclass(frozen=True, kw_only=True)
class Found:
    """What host memory has of a prompt.

    Attributes:
        source: whose record it is.
        session: the record's.
        record: None if nothing is reused and the session has no record.
        num_tokens: how many of the prompt's first tokens can be continued from.
    """

    source: ReuseSource
    session: SessionKey
    record: StoredRecord | None
    num_tokens: int


class RecordTable:
    """Sessions' records, least recently used first, under a limit on bytes. Callers hold `lock`.

    Args:
        max_bytes: limit on `size_bytes`.
        has_states: whether sessions can be continued from checkpoints only.

    Attributes:
        size_bytes: of all parts that a record or a turn names, each counted once and whole, and of what is
            staged.
        busy: how many open turns each session has; sessions with any are not evicted.
    """

    def __init__(self, *, max_bytes: int, has_states: bool = False) -> None:
        self.lock = threading.RLock()
        self.max_bytes = max_bytes
        self._has_states = has_states
        self.size_bytes = 0
        self.busy: Counter[SessionKey] = Counter()
        self._sessions: OrderedDict[SessionKey, StoredRecord] = OrderedDict()
        self._prefixes = PrefixIndex()

    def get(self, session: SessionKey) -> StoredRecord | None:
        return self._sessions.get(session)

    def sessions(self) -> tuple[SessionKey, ...]:
        return tuple(self._sessions)

    def add(self, session: SessionKey, record: StoredRecord) -> None:
        """Add the record of a session that has none. The caller has retained its pieces."""
        assert session not in self._sessions, session
        self._sessions[session] = record
        self._prefixes.add(session, record)

    def num_reusable(self, session: SessionKey, prompt: tuple[int, ...]) -> int:
        """Return how many of the prompt's first tokens can be continued from, in the session's own record."""
        return self._num_reusable(self._sessions.get(session), prompt, len(prompt) - 1)

    def find(
        self,
        session: SessionKey,
        prompt: tuple[int, ...],
        document: SessionKey | None,
        num_observed: int | None,
        limit: int,
    ) -> Found:
        """Find the record that saves the prompt the most tokens, and how many. It is the session's own,
        unless the document saves more, or another session of the owner at least a block more. KV of the
        session's generated tokens is always its own. Arguments as in `HistoryStore.begin`; `limit` is the
        most tokens to use."""
        source: ReuseSource = "session"
        found = session
        own = self._sessions.get(session)
        reused = self._num_reusable(own, prompt, limit)
        if own is not None and reused > own.num_exact_tokens:
            document = num_observed = None
        other = self._sessions.get(document) if document is not None else None
        if document is not None and other is not None:
            length = self._num_reusable(other, prompt, min(other.num_exact_tokens, limit))
            if length > reused:
                source, reused, found = "document", length, document
        if num_observed is not None:
            limit = min(limit, len(prompt) - max(1, num_observed))
            key, length = self._prefixes.longest(session.owner, prompt, limit, self._reusable)
            if key is not None and key != session and length >= reused + BLOCK_TOKENS:
                source, reused, found = "prefix", length, key
        for key in (session, found):
            if key in self._sessions:
                self._sessions.move_to_end(key)
        return Found(source=source, session=found, record=self._sessions.get(found), num_tokens=reused)

    def num_shared(self, owner: str, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens are in some record of the owner, in whole blocks.

        Args: blocks: the prompt's `block_hashes`.
        """
        return self._prefixes.num_blocks(owner, blocks) * BLOCK_TOKENS

    def _num_reusable(self, record: StoredRecord | None, prompt: tuple[int, ...], limit: int) -> int:
        if record is None:
            return 0
        return self._reusable(record, min(common_prefix(record.token_ids, prompt), limit))

    def _reusable(self, record: StoredRecord, limit: int) -> int:
        """Return how many of the record's first tokens, at most `limit`, can be continued from."""
        return longest(record.checkpoints, limit) if self._has_states else limit

    def forget(self, session: SessionKey) -> None:
        record = self._sessions.pop(session, None)
        if record is not None:
            self._prefixes.remove(session, record)
            self.release(record.parts)

    def add_copies(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Count the bytes of pieces whose segments are new. Return the pieces before the first that
        does not fit."""
        for index, piece in enumerate(pieces):
            if piece.segment.references == 0:
                if not self.make_room(piece.segment.size_bytes):
                    return pieces[:index]
                self.size_bytes += piece.segment.size_bytes
        return pieces

    def retain(self, parts: Iterable[Part]) -> None:
        """Add a reference to each part."""
        for part in parts:
            part.references += 1

    def release(self, parts: Iterable[Part]) -> None:
        """Remove a reference from each part; those without references are freed."""
        for part in parts:
            part.references -= 1
            assert part.references >= 0, part
            if part.references == 0:
                self.size_bytes -= part.size_bytes

    def no_longer_busy(self, session: SessionKey) -> None:
        """Count one open turn fewer of a session."""
        self.busy[session] -= 1
        if not self.busy[session]:
            del self.busy[session]

    def make_room(self, num_bytes: int) -> bool:
        """Evict idle sessions until `num_bytes` fit: implicit ones first, pinned ones last. Of an owner's
        pinned records, only those used last that fit into PINNED_SHARE of the limit count as pinned. Evict
        none if that would not be enough; return whether there is room."""
        if self.size_bytes + num_bytes <= self.max_bytes:
            return True
        idle = [session for session in self._sessions if session not in self.busy]
        pinned = self._pinned()
        idle.sort(key=lambda session: (session in pinned) - session.is_implicit)
        named = Counter(part for session in idle for part in self._sessions[session].parts)
        evictable_bytes = sum(part.size_bytes for part, count in named.items() if count == part.references)
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


_Prefixed = TypeVar("_Prefixed", str, tuple[Any, ...])


def common_prefix(a: _Prefixed, b: _Prefixed) -> int:
    """Return the length of the longest common prefix."""
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
        for block in block_hashes(record.token_ids, record.num_exact_tokens):
            self._records.setdefault((session.owner, block), {})[session] = record

    def remove(self, session: SessionKey, record: StoredRecord) -> None:
        for block in block_hashes(record.token_ids, record.num_exact_tokens):
            named = self._records[session.owner, block]
            del named[session]
            if not named:
                del self._records[session.owner, block]

    def longest(
        self,
        owner: str,
        token_ids: tuple[int, ...],
        limit: int,
        reusable: Callable[[StoredRecord, int], int],
    ) -> tuple[SessionKey | None, int]:
        """Return the owner's session from whose record most of the first `limit` tokens can be reused, and
        how many; None if that is less than a block.

        Args: reusable: how many of a record's first tokens can be continued from, at most the given number.
        """
        hashes = block_hashes(token_ids, len(token_ids))
        blocks = list(takewhile(bool, (self._records.get((owner, block), {}) for block in hashes)))
        found: SessionKey | None = None
        longest, seen = BLOCK_TOKENS - 1, set[SessionKey]()
        # Those of the last block share the most; another one may have a checkpoint where those have none.
        while blocks and longest < min(limit, (len(blocks) + 1) * BLOCK_TOKENS - 1):
            proposed, shared = blocks.pop(), len(blocks) * BLOCK_TOKENS
            for session, record in proposed.items():
                if session in seen:
                    continue
                seen.add(session)
                rest = slice(shared, record.num_exact_tokens)
                beyond = common_prefix(record.token_ids[rest], token_ids[shared:])
                if reusable(record, min(shared + beyond, limit)) > longest:
                    exact = min(common_prefix(record.token_ids, token_ids), record.num_exact_tokens, limit)
                    found, longest = session, reusable(record, exact)
        return found, longest

    def num_blocks(self, owner: str, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks some record of the owner has."""
        return sum(1 for _ in takewhile(lambda block: (owner, block) in self._records, blocks))


def block_hashes(token_ids: tuple[int, ...], num_tokens: int) -> Iterator[int]:
    """Yield a 64-bit hash for each whole block of the first `num_tokens` tokens, of this block and all before
    it. It is the same in every process."""
    block = 0
    for end in range(BLOCK_TOKENS, num_tokens + 1, BLOCK_TOKENS):
        block = hash((block, token_ids[end - BLOCK_TOKENS : end]))
        yield block
