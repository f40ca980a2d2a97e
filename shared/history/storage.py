"""A storage of history behind host memory: its interface, used by `back_tier.py`, and what a write stores."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import msgspec

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.history.checkpoints import Checkpoint, LayerState, States, thinned
from kvferry.shared.history.records import StoredRecord
from kvferry.shared.history.rows import RowChunk, part_of, piece_chunks
from kvferry.shared.history.stored_format import (
    FENCE_BYTES,
    CheckpointEntry,
    RecordBody,
    SegmentEntry,
    StoredShape,
    TierRecord,
    pack_token_ids,
    tier_record,
    write_chunk,
    write_record,
    write_state,
)

VALUE_BYTES = 4 << 20
"""Rows in one value, at most; but a value has at least one token."""


class Storage(Protocol):
    """Where a tier's records and rows are. Thread-safe. Every call may raise StoreUnavailable.

    Attributes:
        name: of the tier.
        shape: of the rows that it stores.
        value_bytes: as `new_record` takes it.
        size_bytes: of all workers' sessions, as of this worker's last write or deletion.
    """

    name: str
    shape: StoredShape
    value_bytes: int

    @property
    def size_bytes(self) -> int: ...

    def record(self, session: SessionKey) -> TierRecord | None:
        """Return the session's committed record. Raises: HistoryMiss, reason "key" or "corrupt"."""

    def load(
        self, session: SessionKey, record: TierRecord, layer: int, start: int, stop: int
    ) -> list[RowChunk]:
        """Load a layer's rows of tokens [start, stop). Raises: HistoryMiss, as `record`, or "evicted"."""

    def load_states(self, session: SessionKey, entry: CheckpointEntry) -> dict[int, LayerState]:
        """Load the states of a checkpoint by layer. Raises: HistoryMiss, as `record`, or reason "evicted"."""

    def write(self, session: SessionKey, base: TierRecord | None, new: NewRecord) -> None:
        """Publish a new record in place of the base.

        Raises:
            SessionBusy: the session's record is no longer the base.
            HistoryMiss: the base or some of its rows are gone, so that it cannot be continued.
            StoreUnavailable: also with reason "quota".
        """

    def touch(self, session: SessionKey, record: TierRecord) -> None:
        """Restart the session's time to live. Raises: HistoryMiss: rows of it are gone."""

    def delete(self, session: SessionKey) -> None:
        """Remove all that is stored of a session."""

    def close(self) -> None:
        """Close the storage. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class NewRecord:
    """A record to be published: older segments, then a new one.

    Attributes:
        session: whose it is.
        value: the record as stored.
        layers: the new segment's chunks, those of each value, by layer.
        states: of the new checkpoints.
    """

    session: SessionKey
    record: TierRecord
    value: bytes
    layers: Sequence[Sequence[RowChunk]]
    states: Sequence[tuple[CheckpointEntry, States]]
    shape: StoredShape

    @property
    def entry(self) -> SegmentEntry:
        return self.record.segments[-1]

    def values(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield layer, index and stored bytes of each value of the new segment."""
        segment_id = self.entry.segment_id
        for layer, chunks in enumerate(self.layers):
            first_token = 0
            for index, chunk in enumerate(chunks):
                value = write_chunk(
                    chunk, shape=self.shape, segment_id=segment_id, layer=layer, first_token=first_token
                )
                yield layer, index, self.shape.sealed(self.session, value, segment_id)
                first_token += chunk.num_tokens

    def state_values(self, entry: CheckpointEntry, states: States) -> Iterator[tuple[int, bytes]]:
        """Yield layer and stored bytes of each value of a checkpoint."""
        for layer, state in states.layers.items():
            value = write_state(state, checkpoint_id=entry.checkpoint_id, layer=layer)
            yield layer, self.shape.sealed(self.session, value, entry.checkpoint_id)


def new_record(
    session: SessionKey,
    record: StoredRecord,
    *,
    shape: StoredShape,
    base: TierRecord | None,
    num_base_tokens: int,
    method: str,
    value_bytes: int,
) -> NewRecord:
    """Make a tier's record of one in memory: the base's first `num_base_tokens`, then a new segment.

    Args: value_bytes: bytes of one value, about.
    """
    token_ids, num_exact_tokens = record.token_ids, record.num_exact_tokens
    layers = [
        part_of(piece_chunks(record.pieces, layer), num_base_tokens, len(token_ids))
        for layer in range(shape.num_layers)
    ]
    base_exact = base.body.num_exact_tokens if base is not None else 0
    if base_exact < num_base_tokens:
        num_exact_tokens = min(num_exact_tokens, base_exact)
    num_tokens = len(token_ids) - num_base_tokens
    layer_bytes = max((sum(chunk.size_bytes for chunk in chunks) for chunks in layers), default=0)
    value_tokens = _value_tokens(layers, max(1, value_bytes * num_tokens // max(1, layer_bytes)))
    value_tokens = value_tokens or (num_tokens,)  # no layer has rows
    ends = list(accumulate(value_tokens, initial=0))
    cut = [[part_of(chunks, low, high)[0] for low, high in pairwise(ends)] for chunks in layers]
    entry = SegmentEntry(
        segment_id=secrets.token_bytes(FENCE_BYTES),
        length=num_tokens,
        value_tokens=value_tokens,
        size_bytes=sum(shape.chunk_header_bytes + chunk.size_bytes for chunks in cut for chunk in chunks),
    )
    entries, new_states = _checkpoints(base, num_base_tokens, record.checkpoints, shape)
    body = RecordBody(
        owner=session.owner,
        session_id=session.session_id,
        fingerprint=shape.fingerprint,
        precision=shape.precision.code,
        method=method,
        turn=base.body.turn + 1 if base is not None else 1,
        token_ids=pack_token_ids(token_ids),
        segments=(*_first_entries(base.segments if base is not None else (), num_base_tokens), entry),
        checkpoints=entries,
        num_exact_tokens=num_exact_tokens,
    )
    fence = secrets.token_bytes(FENCE_BYTES)
    value = shape.sealed(session, write_record(fence, body), fence)
    return NewRecord(
        session=session,
        record=tier_record(fence, body, token_ids, len(value)),
        value=value,
        layers=cut,
        states=new_states,
        shape=shape,
    )


def _checkpoints(
    base: TierRecord | None, num_base_tokens: int, checkpoints: Sequence[Checkpoint], shape: StoredShape
) -> tuple[tuple[CheckpointEntry, ...], list[tuple[CheckpointEntry, States]]]:
    """Return the entries of a record's checkpoints, and those that the base lacks, with their states."""
    old = base.body.checkpoints if base is not None else ()
    entries = {entry.num_tokens: entry for entry in old if entry.num_tokens <= num_base_tokens}
    added = {
        checkpoint.num_tokens: checkpoint.states
        for checkpoint in checkpoints
        if checkpoint.num_tokens not in entries
    }
    for checkpoint in checkpoints:
        if checkpoint.num_tokens in added:
            entries[checkpoint.num_tokens] = CheckpointEntry(
                checkpoint_id=secrets.token_bytes(FENCE_BYTES),
                num_tokens=checkpoint.num_tokens,
                ends_turn=checkpoint.ends_turn,
                size_bytes=checkpoint.states.size_bytes
                + shape.state_header_bytes * len(checkpoint.states.layers),
            )
    kept = thinned(entries.values())
    return kept, [(entry, added[entry.num_tokens]) for entry in kept if entry.num_tokens in added]


def _first_entries(entries: Iterable[SegmentEntry], num_tokens: int) -> Iterator[SegmentEntry]:
    for entry in entries:
        if num_tokens <= 0:
            break
        yield msgspec.structs.replace(entry, length=min(entry.length, num_tokens))
        num_tokens -= entry.length


def _value_tokens(layers: Sequence[Sequence[RowChunk]], limit: int) -> tuple[int, ...]:
    """Count each value's tokens: values end where any layer's chunk ends, and have at most `limit` tokens."""
    ends = {end for chunks in layers for end in accumulate(chunk.num_tokens for chunk in chunks)}
    counts: list[int] = []
    begin = 0
    for end in sorted(ends):
        full, rest = divmod(end - begin, limit)
        counts += [limit] * full + ([rest] if rest else [])
        begin = end
    return tuple(counts)
