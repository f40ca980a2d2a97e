"""KV reuse without session ids: prompts of each API key whose KV a prefill worker stores for a while.

A prompt without a session is staged at prefill under an id that no session can have. Prefill continues it
from the longest prefix that any record of the same key shares with it, by the rule that the answer must not
depend on what was cached. This table decides which prompts stay stored and which worker a prompt should go
to. It holds token ids, no KV, and calls no workers.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from kvferry.shared.control.messages import IMPLICIT_PREFIX, SessionKey
from kvferry.shared.history.records import BLOCK_TOKENS, common_prefix

_SALTED = "+"
_MAX_RECORDS = 1024
"""Over all keys; the token ids of each are in this process's memory."""
_TOKEN_BYTES = 36
"""Of an id and of its place in a tuple."""


@dataclass(frozen=True, kw_only=True)
class ImplicitRecord:
    """A stored prompt.

    Attributes:
        retained_as: what decode retains the rows of prompts under that continue this one.
    """

    token_ids: tuple[int, ...]
    prefill_address: str
    decode_address: str
    retained_as: SessionKey
    expires_at_s: float


@dataclass(frozen=True, kw_only=True)
class ImplicitTurn:
    """One prompt's turn.

    Attributes:
        key: what it is stored under.
        former: the stored prompt that shares most tokens with it; None where none shares a block.
        shared_tokens: how many it shares.
        extends_former: whether it begins with the whole of it.
        prefill_addresses: where that prompt's KV is.
        retained_as: under which session decode retains the rows, so that a prompt which continues this one
            ships what decode lacks: that of the prompt which it continues, else its own, whose rows are the
            first to be evicted. None for a prompt that is stored already.
        decode_addresses: where the rows are that decode retains.
        keep_s: as the caller of `begin` wants it.
    """

    key: SessionKey
    token_ids: tuple[int, ...]
    former: SessionKey | None = None
    shared_tokens: int = 0
    extends_former: bool = False
    prefill_addresses: tuple[str, ...] = ()
    retained_as: SessionKey | None = None
    decode_addresses: tuple[str, ...] = ()
    keep_s: float | None = None

    def is_worth_storing(self, reused_tokens: int) -> bool:
        """Return whether storing the prompt makes tokens reusable that a later prompt would find: a block of
        new ones, or those after the former prompt, which it replaces. The rows that it reuses are not copied.

        Args: reused_tokens: how many of its tokens prefill found stored.
        """
        num_tokens = len(self.token_ids)
        if reused_tokens and self.shared_tokens == num_tokens:
            return False
        return self.extends_former or num_tokens - reused_tokens >= BLOCK_TOKENS


class ImplicitSessions:
    """The stored prompts of all keys, least recently used first.

    Args:
        max_per_key: prompts of one API key; 0 stores none.
        max_bytes_per_key: of their token ids together; 0: no limit.
        ttl_s: a prompt that nothing reuses for this long is dropped.
        clock: Unix time in seconds.
    """

    def __init__(
        self, *, max_per_key: int, max_bytes_per_key: int, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        self._max_per_key = max_per_key
        self._max_tokens = max_bytes_per_key // _TOKEN_BYTES if max_bytes_per_key else math.inf
        self._ttl_s = ttl_s
        self._clock = clock
        self._records: OrderedDict[SessionKey, ImplicitRecord] = OrderedDict()

    def begin(
        self, owner: str, token_ids: tuple[int, ...], *, keep_s: float | None = None
    ) -> ImplicitTurn | None:
        """Begin the turn of a prompt without a session; None if it is too short to be found again.

        Args:
            owner: see `salted_owner`.
            keep_s: how long it stays if nothing reuses it; None: `ttl_s`.
        """
        if not self._max_per_key or len(token_ids) < BLOCK_TOKENS:
            return None
        key = SessionKey(owner=owner, session_id=f"{IMPLICIT_PREFIX}{secrets.token_hex(8)}")
        shares = (
            (common_prefix(record.token_ids, token_ids), other)
            for other, record in self._records.items()
            if other.owner == owner
        )
        shared, former = max(shares, key=itemgetter(0), default=(0, key))
        turn = ImplicitTurn(key=key, token_ids=token_ids, retained_as=_rows_of(key), keep_s=keep_s)
        if shared < BLOCK_TOKENS:
            return turn
        record = self._records.pop(former)
        until_s = max(record.expires_at_s, self._clock() + self._ttl_s)
        self._records[former] = replace(record, expires_at_s=until_s)
        extends_former = shared == len(record.token_ids)
        is_continued = extends_former and shared < len(token_ids)
        retained_as = None if shared == len(token_ids) else turn.retained_as
        return replace(
            turn,
            former=former,
            shared_tokens=shared,
            extends_former=extends_former,
            prefill_addresses=(record.prefill_address,),
            retained_as=record.retained_as if is_continued else retained_as,
            decode_addresses=(record.decode_address,) if is_continued else (),
        )

    def add(
        self, turn: ImplicitTurn, *, prefill_address: str, decode_address: str
    ) -> list[tuple[SessionKey, str]]:
        """Note that the turn's prompt is stored; returns prompts to drop for it, and where they are."""
        former = turn.former if turn.extends_former and turn.former in self._records else None
        dropped = [] if former is None else [former]
        self._records[turn.key] = ImplicitRecord(
            token_ids=turn.token_ids,
            prefill_address=prefill_address,
            decode_address=decode_address,
            retained_as=turn.retained_as or _rows_of(turn.key),
            expires_at_s=self._clock() + (self._ttl_s if turn.keep_s is None else turn.keep_s),
        )
        owned = [key for key in self._owned(turn.key.owner) if key not in dropped]
        num_tokens = sum(len(self._records[key].token_ids) for key in owned)
        for rank, key in enumerate(owned):
            if len(owned) - rank > self._max_per_key or num_tokens > self._max_tokens:
                dropped.append(key)
                num_tokens -= len(self._records[key].token_ids)
        excess = len(self._records) - len(dropped) - _MAX_RECORDS
        dropped += [key for key in self._records if key not in dropped][: max(0, excess)]
        return [(key, self._records.pop(key).prefill_address) for key in dropped]

    def remove_stale(self) -> list[tuple[SessionKey, str]]:
        """Remove expired prompts; returns what can be dropped, and where."""
        now_s = self._clock()
        stale = [key for key, record in self._records.items() if record.expires_at_s <= now_s]
        return [(key, self._records.pop(key).prefill_address) for key in stale]

    def remove_former(self, turn: ImplicitTurn) -> list[SessionKey]:
        """Remove the prompt that the turn's continues; returns under which keys workers have its KV."""
        if turn.former is None or not turn.extends_former:
            return []
        record = self._records.pop(turn.former, None)
        return [] if record is None else [turn.former, record.retained_as]

    def remove_owner(self, owner: str) -> list[SessionKey]:
        """Remove all prompts of an owner; returns under which keys workers have their KV."""
        removed = [(key, self._records.pop(key)) for key in tuple(self._owned(owner))]
        return [each for key, record in removed for each in (key, record.retained_as)]

    def _owned(self, owner: str) -> Iterator[SessionKey]:
        """Return the prompts of an API key with any salt."""
        owner = owner.partition(_SALTED)[0]
        return (key for key in self._records if key.owner.partition(_SALTED)[0] == owner)


def salted_owner(owner: str, salt: str) -> str:
    """Return the owner under which a prompt's KV is stored and found: one API key's prompts of a salt. Those
    without a salt are the key's own, and find its sessions, too."""
    return f"{owner}{_SALTED}{hashlib.sha256(salt.encode()).hexdigest()}"


def _rows_of(key: SessionKey) -> SessionKey:
    """Return another key for the rows, which stay when the prompt is dropped for one that continues it."""
    return replace(key, session_id=f"{key.session_id}.rows")
