"""Which of an API key's records begins as a prompt does: the index behind prefix sharing.

Place in the request's path: the store asks it where a turn begins. Records of one owner are never found for
another, so neither what is reused nor how long it takes tells one key of the other. Holds no KV.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

BLOCK_TOKENS = 32
"""Shorter prefixes than one block are not found: running them costs no more than looking them up."""


class TokenRecord(Protocol):
    """What the index needs of a record."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_exact_tokens(self) -> int:
        """Leading tokens whose KV follows from the token ids alone."""
        ...


KeyT = TypeVar("KeyT", bound=Hashable)
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


class PrefixIndex(Generic[KeyT, RecordT]):
    """Records by owner and by the hash of their first 1, 2, 3, ... blocks, each hash made of the one before.

    A hash only proposes a record; how much it really shares is compared token by token. Not thread-safe.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], dict[KeyT, RecordT]] = {}

    def add(self, owner: str, key: KeyT, record: RecordT) -> None:
        """Make a record findable by its exact tokens; `key` names it among its owner's."""
        for block in _block_hashes(record.token_ids, record.num_exact_tokens):
            self._records.setdefault((owner, block), {})[key] = record

    def remove(self, owner: str, key: KeyT, record: RecordT) -> None:
        for block in _block_hashes(record.token_ids, record.num_exact_tokens):
            named = self._records[owner, block]
            del named[key]
            if not named:
                del self._records[owner, block]

    def longest(self, owner: str, token_ids: tuple[int, ...]) -> tuple[KeyT, RecordT, int] | None:
        """The owner's record that shares most of its exact tokens with these, and how many; None where it is
        less than a block."""
        found: dict[KeyT, RecordT] = {}
        shared = 0
        for block in _block_hashes(token_ids, len(token_ids)):
            proposed = self._records.get((owner, block))
            if proposed is None:
                break
            found, shared = proposed, shared + BLOCK_TOKENS
        if not found:
            return None
        # They agree so far, and none beyond the next block: the rest of that one decides.
        following = token_ids[shared : shared + BLOCK_TOKENS]

        def more(key: KeyT) -> int:
            record = found[key]
            return common_prefix(
                record.token_ids[shared : min(shared + BLOCK_TOKENS, record.num_exact_tokens)], following
            )

        best = max(found, key=more)
        record = found[best]
        length = min(common_prefix(record.token_ids, token_ids), record.num_exact_tokens)
        return (best, record, length) if length >= BLOCK_TOKENS else None

    def __len__(self) -> int:
        return len(self._records)


def _block_hashes(token_ids: tuple[int, ...], num_tokens: int) -> Iterator[int]:
    block = 0
    for end in range(BLOCK_TOKENS, num_tokens + 1, BLOCK_TOKENS):
        block = hash((block, token_ids[end - BLOCK_TOKENS : end]))
        yield block
