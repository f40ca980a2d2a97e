"""Session records as they lie in Redis: keys, scripts and encodings behind typed calls.

Under `redis_sessions.py`, which decides whose turn it is and what a failure means. Every call may raise
StoreUnavailable; every one may be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.services.router import session_scripts as scripts
from kvferry.services.router.session_record import (
    KeyUsage,
    SessionRecord,
    SessionSummary,
    decode_record,
    decode_summary,
    encode_record,
    encode_summary,
    is_document,
)
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.history.redis_client import AsyncRedisLink

_WRITE_BACKS: dict[int, Literal["conflict", "written", "held"]] = {0: "conflict", 1: "written", 2: "held"}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What Redis has of a session.

    Attributes:
        commit_id: of the record, or the deletion's marker; empty where it knows of neither.
        record: None where there is none, or it has expired.
    """

    commit_id: str
    record: SessionRecord | None


class RedisRecords:
    """Args: clock: Unix time in seconds."""

    def __init__(self, link: AsyncRedisLink, *, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock

    # ---- leases ------------------------------------------------------------------------------------------

    async def acquire(self, key: SessionKey, token: str, lease_s: float) -> Kept | None:
        """Take the session's turn; None while another router has it."""
        answer = await self._run(scripts.ACQUIRE, [_session(key)], token, _ms(lease_s))
        return self._kept(answer[2], answer[1]) if answer[0] else None

    async def renew(self, key: SessionKey, token: str, lease_s: float) -> bool:
        """Returns whether the lease is still held."""
        return bool(await self._run(scripts.RENEW, [_session(key)], token, _ms(lease_s)))

    async def release(self, key: SessionKey, token: str) -> None:
        await self._run(scripts.RELEASE, [_session(key)], token)

    async def commit(self, key: SessionKey, token: str, record: SessionRecord) -> bool:
        """Returns whether the lease still had the session; nothing is written otherwise."""
        return bool(await self._put(scripts.COMMIT, [token], key, record))

    async def write_back(
        self, key: SessionKey, base: str, router: str, record: SessionRecord
    ) -> Literal["conflict", "written", "held"]:
        """Write a record that was committed elsewhere, on top of the commit `base`."""
        return _WRITE_BACKS[await self._put(scripts.WRITE_BACK, [base, router], key, record)]

    async def delete(self, key: SessionKey, marker: str, ttl_s: float) -> bool:
        """Leave only a marker; returns whether there was more."""
        return bool(await self._run(scripts.DELETE, _keys(key), marker, _ms(ttl_s), key.session_id))

    # ---- reading -----------------------------------------------------------------------------------------

    async def read(self, key: SessionKey) -> Kept:
        data, commit_id = await self._link.call(
            lambda client: client.hmget(_session(key), "record", "committed")
        )
        return self._kept(data, commit_id)

    async def commit_ids(self, keys: Sequence[SessionKey]) -> list[str]:
        """Of each session; empty as in `Kept`."""
        return [(value or b"").decode() for value in await self._fields(keys, "committed")]

    async def summaries(self, owner: str, *, documents: bool) -> dict[SessionKey, SessionSummary]:
        """Of the owner's sessions, or of its documents."""
        ids = await self._run(scripts.LIST, _index(owner, documents))
        keys = [SessionKey(owner=owner, session_id=name.decode()) for name in ids]
        values = await self._fields(keys, "summary")
        return {key: decode_summary(data) for key, data in zip(keys, values, strict=True) if data is not None}

    async def usage(self, owner: str, *, documents: bool, excluding: SessionKey) -> KeyUsage:
        records, tokens = await self._run(scripts.USAGE, _index(owner, documents), excluding.session_id)
        return KeyUsage(num_records=records, num_tokens=tokens)

    async def close(self) -> None:
        await self._link.close()

    def _kept(self, data: bytes | None, commit_id: bytes | None) -> Kept:
        record = decode_record(data) if data else None
        if record is not None and record.expires_at_s <= self._clock():
            record = None
        return Kept(commit_id=(commit_id or b"").decode(), record=record)

    # ---- calls -------------------------------------------------------------------------------------------

    async def _put(self, script: str, first: list[str], key: SessionKey, record: SessionRecord) -> int:
        remaining_s = max(1.0, record.expires_at_s - self._clock())
        return int(
            await self._run(
                script,
                _keys(key),
                *first,
                encode_record(record),
                encode_summary(record.summary),
                record.commit_id,
                _ms(remaining_s),
                _ms(record.expires_at_s),
                key.session_id,
                len(record.token_ids),
            )
        )

    async def _run(self, script: str, keys: list[str], *arguments: str | bytes | int) -> Any:
        return await self._link.call(lambda client: client.eval(script, len(keys), *keys, *arguments))

    async def _fields(self, keys: Sequence[SessionKey], field: str) -> list[bytes | None]:
        """One field of many sessions."""

        async def read(client: Any) -> list[bytes | None]:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.hget(_session(key), field)
            return list(await pipeline.execute())

        return await self._link.call(read) if keys else []


def _session(key: SessionKey) -> str:
    return f"kvferry:router:{{{key.owner}}}:session:{key.session_id}"


def _index(owner: str, documents: bool) -> list[str]:
    kind = "documents" if documents else "sessions"
    return [f"kvferry:router:{{{owner}}}:{kind}", f"kvferry:router:{{{owner}}}:{kind}:tokens"]


def _keys(key: SessionKey) -> list[str]:
    return [_session(key), *_index(key.owner, is_document(key))]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
