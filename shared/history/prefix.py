"""The index behind prefix sharing: which of an API key's records begin as a prompt does.

Place in the request's path: the store asks it when a turn begins. Records of one owner are never found for
another, so neither what is reused nor how long it takes tells one owner anything about another. Holds no KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from kvferry.shared.control.messages import SessionKey

BLOCK_TOKENS = 32
"""Prefixes shorter than one block are not found: running them costs no more than looking them up."""


class TokenRecord(Protocol):
    """What the index needs of a record. Keeps torch out of this module, which the router imports as well."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_exact_tokens(self) -> int:
        """Leading tokens whose KV follows from the token ids alone."""
        ...


RecordT = TypeVar("RecordT", bound=TokenRecord)


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


class PrefixIndex(Generic[RecordT]):
    """Records by owner and by the hash of their first 1, 2, 3, ... blocks, each hash made from the one
    before.

    A hash only proposes records; how much they share is compared token by token. Not thread-safe.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], dict[SessionKey, RecordT]] = {}

    def add(self, session: SessionKey, record: RecordT) -> None:
        """Make a record findable by its exact tokens."""
        for block in _block_hashes(record.token_ids, record.num_exact_tokens):
            self._records.setdefault((session.owner, block), {})[session] = record

    def remove(self, session: SessionKey, record: RecordT) -> None:
        for block in _block_hashes(record.token_ids, record.num_exact_tokens):
            named = self._records[session.owner, block]
            del named[session]
            if not named:
                del self._records[session.owner, block]

    def longest(self, owner: str, token_ids: tuple[int, ...]) -> tuple[SessionKey, int] | None:
        """The owner's session whose record shares most of its exact tokens with these, and how many; None if
        that is less than a block."""
        found: dict[SessionKey, RecordT] = {}
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
