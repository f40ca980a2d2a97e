"""Sessions' history in a folder: a segment's file first, the record last, each written under another name,
flushed to the disk and renamed.

    write: lock ──► is the fence the base's? ──► room ──► segment ──► record ──► files that it does not name
    read:  record ──► a layer's values; a file that is missing, cut or damaged is a HistoryMiss

    PATH/lock                                   held by whoever writes or deletes, in any process
    PATH/<hash of the session>/record           record (stored_format.py)
    PATH/<hash of the session>/<segment>.safetensors    tensor "<layer>.<i>": a value, uint8
    PATH/<hash of the session>/<checkpoint>.safetensors    tensor "<layer>": a value, uint8

A crash at any point leaves the record before or after the commit. What an unfinished write leaves counts
toward the limit until the session's next commit, or until it is evicted. Several workers may share a folder
of one machine's file system. Nothing is loaded at a start: the folder is the state.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import ConfigurationError, HistoryMiss, SessionBusy, StoreUnavailable
from kvferry.shared.history.checkpoints import LayerState
from kvferry.shared.history.rows import RowChunk
from kvferry.shared.history.storage import VALUE_BYTES, NewRecord
from kvferry.shared.history.stored_format import (
    CheckpointEntry,
    StoredShape,
    TierRecord,
    corrupt,
    read_record,
    read_state,
    read_values,
    wanted_values,
)

_LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.02
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
_ALIGNMENT = 8


class _Tensor(msgspec.Struct, frozen=True):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class DiskHistory:
    """Implements `Storage`. Thread-safe.

    Args:
        folder: is created if it does not exist; only this user may read it.
        max_bytes: limit on the sizes of all files; the least recently used sessions give way.
        ttl_s: a session that had no turn for this long is not read any more, and removed by the next write.

    Raises: ConfigurationError: the folder cannot be used.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        shape: StoredShape,
        ttl_s: float,
        value_bytes: int = VALUE_BYTES,
    ) -> None:
        self.shape = shape
        self._folder = folder
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self.value_bytes = value_bytes
        try:
            with self._locked():
                self._evict(0)
        except OSError as error:
            raise ConfigurationError(
                f"history_disk is {str(folder)!r}; it must be a folder that can be written: {error}"
            ) from None

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def record(self, session: SessionKey) -> TierRecord | None:
        path = self._session_folder(session) / "record"
        try:
            with _named_errors(passing=FileNotFoundError), path.open("rb") as file:
                if os.fstat(file.fileno()).st_mtime < time.time() - self._ttl_s:
                    return None
                return read_record(self.shape.opened(session, file.read()), session)
        except FileNotFoundError:
            return None

    def load(
        self, session: SessionKey, record: TierRecord, layer: int, start: int, stop: int
    ) -> list[RowChunk]:
        wanted = list(wanted_values(record, start, stop))
        values: list[bytes | None] = []
        if layer == 0:  # a document that is read is in use, too
            with contextlib.suppress(OSError):
                os.utime(self._session_folder(session) / "record")
        for entry, of_segment in groupby(wanted, key=lambda want: want.entry):
            names = [f"{layer}.{want.index}" for want in of_segment]
            values += self._read(self._path(session, entry.segment_id), names)
        return read_values(session, wanted, values, shape=self.shape, layer=layer)

    def load_states(self, session: SessionKey, entry: CheckpointEntry) -> dict[int, LayerState]:
        layers = list(self.shape.states)
        values = self._read(self._path(session, entry.checkpoint_id), [str(layer) for layer in layers])
        return {
            layer: read_state(
                value, session, shape=self.shape, checkpoint_id=entry.checkpoint_id, layer=layer
            )
            for layer, value in zip(layers, values, strict=True)
        }

    @staticmethod
    def _read(path: Path, names: Sequence[str]) -> Sequence[bytes | None]:
        """Read some tensors of a file as bytes; None for each if there is no file."""
        try:
            with _named_errors(passing=FileNotFoundError), path.open("rb") as file:
                return _read_tensors(file, names)
        except FileNotFoundError:
            return [None] * len(names)

    def write(self, session: SessionKey, base: TierRecord | None, new: NewRecord) -> None:
        header = _header(
            {
                f"{layer}.{index}": self.shape.chunk_header_bytes + chunk.size_bytes
                for layer, chunks in enumerate(new.layers)
                for index, chunk in enumerate(chunks)
            }
        )
        folder = self._session_folder(session)
        named = self._paths(session, new.record)
        with _named_errors(), self._locked():
            self._check_base(session, base)
            sizes = [path.stat().st_size for path in named if path.exists()]
            if len(sizes) < len(named) - 1 - len(new.states):  # the new ones are not there yet
                raise HistoryMiss("segments of the session are gone", reason="evicted")
            num_bytes = len(header) + new.entry.size_bytes + len(new.value)
            num_bytes += sum(entry.size_bytes for entry, _ in new.states)
            if sum(sizes) + num_bytes > self._max_bytes:
                raise StoreUnavailable(
                    f"a session takes {sum(sizes) + num_bytes} bytes on disk; history_disk_bytes is "
                    f"{self._max_bytes}",
                    reason="quota",
                )
            if not self._evict(num_bytes, spared=folder):
                _remove(folder, spared=named)
            folder.mkdir(mode=0o700, exist_ok=True)
            with _published(self._path(session, new.entry.segment_id)) as file:
                file.write(header)
                for _, _, value in new.values():
                    file.write(value)
            for entry, states in new.states:
                values = dict(new.state_values(entry, states))
                with _published(self._path(session, entry.checkpoint_id)) as file:
                    file.write(_header({str(layer): len(value) for layer, value in values.items()}))
                    for value in values.values():
                        file.write(value)
            with _published(folder / "record") as file:
                file.write(new.value)
            _remove(folder, spared=named | {folder / "record"})
            self.size_bytes = sum(size for _, size, _ in self._sessions())

    def touch(self, session: SessionKey, record: TierRecord) -> None:
        with _named_errors():
            if not all(path.exists() for path in self._paths(session, record)):
                raise HistoryMiss("segments of a session are gone", reason="evicted")
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._session_folder(session) / "record")

    def delete(self, session: SessionKey) -> None:
        with _named_errors(), self._locked():
            _remove(self._session_folder(session))
            self.size_bytes = sum(size for _, size, _ in self._sessions())

    def _check_base(self, session: SessionKey, base: TierRecord | None) -> None:
        """Check that the record is still the base. Raises: SessionBusy, HistoryMiss as `Storage.write`."""
        current = self.record(session)
        if current is None and base is not None:
            raise HistoryMiss(f"the record of session {session.session_id!r} is gone", reason="evicted")
        if current is not None and (base is None or base.fence != current.fence):
            raise SessionBusy(f"session {session.session_id!r} was changed by another turn", reason="fenced")

    def _evict(self, num_bytes: int, *, spared: Path | None = None) -> bool:
        """Remove expired sessions, then the least recently used, until `num_bytes` fit beside the others.
        Return whether they do."""
        sessions = sorted(self._sessions())
        self.size_bytes = sum(size_bytes for _, size_bytes, _ in sessions)
        oldest_s = time.time() - self._ttl_s
        for used_s, size_bytes, folder in sessions:
            is_needed = used_s >= oldest_s and self.size_bytes + num_bytes <= self._max_bytes
            if folder != spared and not is_needed:
                _remove(folder)
                self.size_bytes -= size_bytes
        return self.size_bytes + num_bytes <= self._max_bytes

    def _sessions(self) -> Iterator[tuple[float, int, Path]]:
        """Yield when each session was last used (0 if it has no record), its bytes and its folder."""
        with os.scandir(self._folder) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir()]
        for folder in folders:
            used_s, size_bytes = 0.0, 0
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
                for file in files:
                    status = file.stat()
                    size_bytes += status.st_size
                    if file.name == "record":
                        used_s = status.st_mtime
            yield used_s, size_bytes, folder

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that keeps other writers out; wait for it a bounded time."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._folder / "lock", "ab", opener=partial(os.open, mode=0o600)) as file:
            deadline_s = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise StoreUnavailable(
                            f"{file.name} was locked for {_LOCK_WAIT_S:g} s", reason="timeout"
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield

    def _session_folder(self, session: SessionKey) -> Path:
        name = hashlib.sha256(f"{session.owner}/{session.session_id}".encode()).hexdigest()
        return self._folder / name[:32]

    def _path(self, session: SessionKey, part_id: bytes) -> Path:
        """Return the file of a segment or a checkpoint."""
        return self._session_folder(session) / f"{part_id.hex()}.safetensors"

    def _paths(self, session: SessionKey, record: TierRecord) -> set[Path]:
        segments = (entry.segment_id for entry in record.segments)
        checkpoints = (entry.checkpoint_id for entry in record.body.checkpoints)
        return {self._path(session, part_id) for part_id in (*segments, *checkpoints)}


@contextlib.contextmanager
def _named_errors(passing: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Raise errors of the file system as StoreUnavailable, reason "full" or "io", all but one type."""
    try:
        yield
    except passing:
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreUnavailable(f"history on disk: {error}", reason="full" if is_full else "io") from error


@contextlib.contextmanager
def _published(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name when it is complete and on the disk."""
    aside = path.with_suffix(".tmp")
    try:
        with open(aside, "wb", opener=partial(os.open, mode=0o600)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path, spared: Set[Path] = frozenset()) -> None:
    """Remove a session's files but the spared ones: the record first, because it must not name files that are
    gone."""
    paths = set(folder.iterdir()) - spared if folder.is_dir() else set()
    for path in sorted(paths, key=lambda path: path.name != "record"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty, or not there
        folder.rmdir()


def _tensor(begin: int, end: int) -> _Tensor:
    return _Tensor("U8", (end - begin,), (begin, end))


def _header(sizes_bytes: Mapping[str, int]) -> bytes:
    """Make the beginning of a file with values of these sizes, up to the first value."""
    tensors: dict[str, _Tensor] = {}
    begin = 0
    for name, size_bytes in sizes_bytes.items():
        tensors[name] = _tensor(begin, begin + size_bytes)
        begin += size_bytes
    encoded = msgspec.json.encode(tensors)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def _read_tensors(file: BinaryIO, names: Sequence[str]) -> list[bytes]:
    """Read some tensors of a safetensors file as bytes, too few if it was cut. Raises: HistoryMiss."""
    size_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if header_bytes > min(size_bytes, _MAX_HEADER_BYTES):
        raise corrupt(f"{file.name} has a header of {header_bytes} bytes")
    try:
        tensors: Mapping[str, _Tensor] = msgspec.json.decode(file.read(header_bytes), type=dict[str, _Tensor])
        wanted = [tensors[name] for name in names]
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
        raise corrupt(f"{file.name} has a damaged header: {error}") from None
    values = []
    for tensor in wanted:
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= size_bytes or tensor != _tensor(begin, end):
            raise corrupt(f"{file.name} has an impossible tensor: {tensor}")
        file.seek(_LENGTH_BYTES + header_bytes + begin)
        values.append(file.read(end - begin))
    return values
