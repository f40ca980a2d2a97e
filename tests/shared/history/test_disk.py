"""Host memory over a folder: what outlives a worker, what is bounded, who may commit, what a crash or damage
does. Rows are checked in every load (`kvtest.history`)."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvtest
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kvtest.history import TOKEN_BYTES, Worker, fifty_turns, tokens
from kvtest.waiting import until
from safetensors import safe_open

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import ConfigurationError, HistoryMiss
from kvferry.shared.history.disk_history import DiskHistory
from kvferry.shared.history.records import StoredRecord
from kvferry.shared.history.rows import Piece, RowPrecision, Segment, chunk_rows
from kvferry.shared.history.storage import new_record
from kvferry.shared.history.stored_format import StoredShape, TierRecord, read_record
from kvferry.shared.model.spec import Heads

A = SessionKey(owner="key-a", session_id="s")
B = SessionKey(owner="key-b", session_id="s")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def the_files(folder: Path) -> tuple[Path, Path]:
    """The record and the segment of a folder that has one of each."""
    (record,) = folder.rglob("record")
    (segment,) = folder.rglob("*.safetensors")
    return record, segment


def test_what_memory_evicts_is_found_on_disk(make_disk_worker: Callable[..., Worker]) -> None:
    worker = make_disk_worker(max_bytes=40 * TOKEN_BYTES)
    said = tokens(30)
    worker.turn(A, said)
    worker.turn(B, tokens(30, seed=1))
    assert worker.store.record(A) is None
    assert (worker.store.info(A).tier, worker.store.info(A).num_tokens) == ("disk", 30)
    turn = worker.begin(A, (*said, 1))
    assert turn.reused_by_tier == {"memory": 0, "disk": 30}
    assert worker.run(turn, (*said, 1), lambda layer: None) == 30
    assert turn.commit((*said, 1)).num_tokens == 31
    assert not worker.misses
    assert not worker.failures


def test_a_new_worker_continues_where_the_last_one_was(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    prompt, answer = tokens(70), tokens(5, seed=1)
    make_disk_worker(value_bytes=10 * 64).turn(A, prompt, answer)
    longer = prompt + answer + tokens(9, seed=2)
    second = make_disk_worker()
    assert second.turn(A, longer) == 74
    # Only what is new was written again.
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    assert make_disk_worker().turn(A, (*longer, 1)) == 84
    record = second.disk.record(A)
    assert record is not None
    assert (record.body.turn, record.body.method, record.body.fingerprint) == (3, "rocketkv", "model-a")


def test_commits_are_written_behind_the_turn_and_counted_until_they_are(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make_disk_worker(commit_timeout_s=0.0)
    waiting = worker.store.tier_waiting["disk"]
    said = tokens(10)
    with (tmp_path / "history" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in range(5):
            said = (*said, number + 1)
            worker.turn(A, said)
            worker.turn(B, said)
        assert 1 <= waiting() <= 3
        # What waits is not evicted before it is written.
        assert worker.store.size_bytes >= 2 * len(said) * TOKEN_BYTES
    worker.store.close()
    assert waiting() == 0
    assert make_disk_worker().turn(A, (*said, 99)) == len(said)
    assert make_disk_worker().turn(B, (*said, 99)) == len(said)


def test_a_queue_that_is_full_refuses_a_commit_and_the_next_one_brings_it(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make_disk_worker(commit_timeout_s=0.0)
    sessions = [SessionKey(owner="o", session_id=str(number)) for number in range(68)]
    with (tmp_path / "history" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for session in sessions:
            worker.turn(session, (1, 2))
    assert worker.failures["queue_full"] in (3, 4)
    until(lambda: not (worker.store.tier_waiting["disk"]()))
    worker.turn(sessions[-1], (1, 2, 3))
    worker.store.close()
    assert make_disk_worker().turn(sessions[-1], (1, 2, 3, 4)) == 3


def test_fifty_turns_with_branches_keep_every_row_and_no_other_file(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    workers = [make_disk_worker(max_bytes=400 * TOKEN_BYTES) for _ in range(2)]
    said = fifty_turns(A, workers)
    record = workers[0].disk.record(A)
    assert record is not None
    names = {path.stem for path in tmp_path.rglob("*.safetensors")}
    assert names == {entry.segment_id.hex() for entry in record.segments}
    fresh = make_disk_worker()
    assert fresh.turn(A, (*said, 1)) == len(said) - 1
    assert fresh.store.tier_bytes["disk"]() == folder_bytes(tmp_path)
    assert fresh.store.drop(A).num_tokens == len(said) + 1
    assert [path.name for path in (tmp_path / "history").iterdir()] == ["lock"]
    assert fresh.store.tier_bytes["disk"]() == 0


def test_the_limit_holds_and_the_least_recently_used_sessions_give_way(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    limit = 20_000  # four sessions of 20 tokens, with their headers
    worker = make_disk_worker(disk_max_bytes=limit, max_bytes=1)
    sessions = [SessionKey(owner="o", session_id=str(number)) for number in range(10)]
    for number, session in enumerate(sessions):
        worker = make_disk_worker(disk_max_bytes=limit)
        worker.turn(session, tokens(20, seed=number))
        time.sleep(0.01)
        # Session 0 is read again each time, by a worker that does not have it in memory.
        reader = make_disk_worker(disk_max_bytes=limit)
        turn = reader.begin(sessions[0], (*tokens(20), 1))
        assert reader.run(turn, (*tokens(20), 1), lambda layer: None) == 20
        turn.abort()
        time.sleep(0.01)
        assert 0 < folder_bytes(tmp_path) <= limit
    stored = [worker.disk.record(session) is not None for session in sessions]
    assert stored[0]
    assert stored[-2:] == [True, True]
    assert 3 <= sum(stored) <= 5
    assert sorted(stored[1:]) == stored[1:]
    worker.turn(A, tokens(300))
    assert worker.failures == {"quota": 1}
    assert [worker.disk.record(session) is not None for session in sessions] == stored
    # A smaller limit holds from the start on.
    make_disk_worker(disk_max_bytes=6000)
    assert 0 < folder_bytes(tmp_path) <= 6000


def test_a_session_that_is_written_anew_fits_if_it_fits_alone(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make_disk_worker(disk_max_bytes=6000)
    worker.turn(A, tokens(20))
    worker.turn(A, tokens(22, seed=1))
    assert not worker.failures
    assert folder_bytes(tmp_path) <= 6000
    assert make_disk_worker(disk_max_bytes=6000).turn(A, (*tokens(22, seed=1), 1)) == 22


def test_an_expired_session_is_not_read_and_is_removed(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    make_disk_worker().turn(A, tokens(20))
    record, _ = the_files(tmp_path)
    long_ago_s = time.time() - 1001
    os.utime(record, (long_ago_s, long_ago_s))
    worker = make_disk_worker()
    assert worker.store.info(A).tier == "none"
    worker.turn(B, tokens(5))
    assert not record.exists()
    assert worker.turn(A, (*tokens(20), 1)) == 0
    assert make_disk_worker().turn(A, (*tokens(20), 1, 2)) == 21


def test_a_document_is_found_on_disk(make_disk_worker: Callable[..., Worker]) -> None:
    document = SessionKey(owner="key-a", session_id="document/d")
    make_disk_worker().turn(document, tokens(75))
    worker = make_disk_worker()
    turn = worker.begin(A, (*tokens(75), 900), document=document)
    assert (turn.reused_by_tier["disk"], turn.reuse_source) == (75, "document")
    assert worker.run(turn, (*tokens(75), 900), lambda layer: None) == 75
    turn.abort()


def test_disk_is_asked_before_redis_and_both_are_written(
    make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    said = tokens(30)
    make_worker(folder=tmp_path / "one").turn(A, said)
    both = make_worker(folder=tmp_path / "one")
    assert both.begin(A, (*said, 1)).reused_by_tier == {"memory": 0, "disk": 30}
    elsewhere = make_worker(folder=tmp_path / "two")
    turn = elsewhere.begin(A, (*said, 1))
    assert turn.reused_by_tier == {"memory": 0, "redis": 30}
    assert elsewhere.run(turn, (*said, 1), lambda layer: None) == 30
    turn.commit((*said, 1))
    record = elsewhere.disk.record(A)
    assert record is not None
    assert record.token_ids == (*said, 1)
    # The first folder's record is behind Redis, which is continued from.
    assert both.begin(A, (*said, 1, 2)).reused_by_tier == {"memory": 0, "redis": 31}


@contextmanager
def small_files_only() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_refuses_a_write_costs_the_turn_nothing(make_disk_worker: Callable[..., Worker]) -> None:
    worker = make_disk_worker()
    with small_files_only():
        worker.turn(A, tokens(30))
    assert worker.failures == {"io": 1}
    assert worker.store.info(A).tier == "memory"
    assert worker.turn(A, (*tokens(30), 1)) == 30
    assert make_disk_worker().turn(A, (*tokens(30), 1, 2)) == 31


_FULL = """
import errno, json, sys
from pathlib import Path
from kvtest.history import Worker
from kvferry.shared.control.messages import SessionKey

folder, said = Path(sys.argv[1]) / "history", tuple(range(1, 31))
A = SessionKey(owner="key-a", session_id="s")
worker = Worker(folder=folder)
worker.turn(A, said)
filler = Path(sys.argv[1]) / "filler"
try:
    with filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
except OSError as error:
    assert error.errno == errno.ENOSPC, error
worker.turn(A, (*said, 1))
full = dict(worker.failures)
reused_from_memory = worker.turn(A, (*said, 1, 2))
filler.unlink()
unwritten = worker.store.write_behind(60.0)
worker.turn(A, (*said, 1, 2, 3))
worker.store.close()
reused_from_disk = Worker(folder=folder).turn(A, (*said, 1, 2, 3, 4))
names = sorted(path.suffix for path in folder.rglob("*") if path.is_file())
print(json.dumps([full, reused_from_memory, unwritten, reused_from_disk, names.count(".tmp")]))
"""


def test_a_disk_that_is_full_costs_the_turn_nothing_and_is_written_once_it_has_room(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=256k none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, _FULL]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(kvtest.__file__).parents[1]), *sys.path]),
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env=environment
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    full, from_memory, unwritten, from_disk, num_partial = json.loads(done.stdout.splitlines()[-1])
    assert full == {"full": 1}
    assert (from_memory, from_disk) == (31, 33)
    assert unwritten == 0
    assert num_partial == 0


def test_what_a_disk_refused_is_written_when_the_worker_drains(
    make_disk_worker: Callable[..., Worker],
) -> None:
    worker = make_disk_worker()
    with small_files_only():
        worker.turn(A, tokens(30))
        assert worker.store.write_behind(60.0) == 1
    assert worker.failures == {"io": 2}
    assert worker.store.write_behind(60.0) == 0
    assert make_disk_worker().turn(A, (*tokens(30), 1)) == 30


def test_a_folder_that_is_deleted_under_a_worker_is_made_anew(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make_disk_worker()
    worker.turn(A, tokens(30))
    shutil.rmtree(tmp_path / "history")
    assert worker.turn(A, (*tokens(30), 1)) == 30
    assert not worker.failures
    assert make_disk_worker().turn(A, (*tokens(30), 1, 2)) == 31
    shutil.rmtree(tmp_path / "history")
    worker.store.drop(A)
    assert worker.store.info(A).tier == "none"


def test_a_folder_that_cannot_be_used_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shape = StoredShape(
        fingerprint="f",
        heads=(Heads(num_kv_heads=1, group_size=1, head_dim=1),) * 1,
        precision=RowPrecision(dtype=torch.float32),
    )
    with pytest.raises(ConfigurationError, match="history_disk is"):
        DiskHistory(tmp_path / "file", max_bytes=1, shape=shape, ttl_s=1)


# ---- crashes and damage ----------------------------------------------------------------------------------

_WRITER = """
import sys
from pathlib import Path
from kvtest.history import Worker
from kvferry.shared.control.messages import SessionKey

worker = Worker(folder=Path(sys.argv[1]), value_bytes=640)
for number in range(10_000):
    session = SessionKey(owner="o", session_id=str(number % 3))
    record = worker.disk.record(session)
    said = (record.token_ids if record is not None and len(record.token_ids) < 60 else ()) + (number + 1,) * 5
    worker.turn(session, said)
    print(number % 3, len(said), flush=True)
"""


def test_a_worker_killed_at_any_moment_leaves_whole_records(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    generator = random.Random(11)
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path / "history")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(kvtest.__file__).parents[1])},
        )
        assert writer.stdout is not None
        committed: dict[str, int] = {}
        for _ in range(generator.randrange(3, 40)):
            number, num_tokens = writer.stdout.readline().split()
            committed[number] = int(num_tokens)
        time.sleep(generator.random() * 0.01)
        writer.send_signal(signal.SIGKILL)
        writer.wait(60)
        for line in writer.stdout.read().splitlines():
            number, num_tokens = line.split()
            committed[number] = int(num_tokens)
        writer.stdout.close()
        worker = make_disk_worker()
        for name, length in committed.items():
            session = SessionKey(owner="o", session_id=name)
            record = worker.disk.record(session)
            assert record is not None
            # What was answered is there, or the turn after it.
            assert len(record.token_ids) in (length, length + 5, 5)
            assert worker.turn(session, (*record.token_ids, 7)) == len(record.token_ids)
        assert not worker.misses
        worker.store.close()


def loads(worker: Worker, record: TierRecord, num_tokens: int) -> bool:
    """Whether a session's rows are read: the right ones, or none."""
    for layer in range(3):
        try:
            keys, _ = chunk_rows(worker.disk.load(A, record, layer, 0, num_tokens))
        except HistoryMiss:
            return False
        in_memory = worker.store.record(A)
        assert in_memory is not None
        assert torch.equal(keys, chunk_rows(in_memory.pieces[0].segment.rows(layer, num_tokens))[0])
    return True


def test_every_changed_byte_is_a_miss_or_changes_nothing(
    make_disk_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make_disk_worker(value_bytes=4 * 64)
    worker.turn(A, tokens(10))
    record_path, segment_path = the_files(tmp_path)
    record = worker.disk.record(A)
    assert record is not None
    original = record_path.read_bytes()
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1 + position % 255
        with pytest.raises(HistoryMiss) as raised:
            read_record(bytes(changed), A)
        assert raised.value.reason == "corrupt"
    segment = segment_path.read_bytes()
    misses = 0
    for position in range(len(segment)):
        changed = bytearray(segment)
        changed[position] ^= 1 + position % 255
        segment_path.write_bytes(changed)
        misses += not loads(worker, record, 10)
    assert len(segment) - 8 <= misses  # a space of the header's padding may become another space
    for size in range(0, len(segment), 7):
        segment_path.write_bytes(segment[:size])
        assert not loads(worker, record, 10)
    segment_path.write_bytes(segment)
    assert loads(worker, record, 10)


@given(junk=st.binary(max_size=300), header=st.booleans())
@example(junk=b'{"0.0":{"dtype":"U8","shape":[9],"data_offsets":[9,-9]}}', header=True)
@example(junk=b'{"0.0":{"dtype":"U8","shape":[9],"data_offsets":[0,99999999999999999]}}', header=True)
@example(junk=b'{"0.0":null}', header=True)
def test_any_other_file_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, header: bool
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    worker = Worker(folder=folder)
    worker.turn(A, tokens(3))
    _, segment_path = the_files(folder)
    record = worker.disk.record(A)
    assert record is not None
    segment_path.write_bytes((len(junk).to_bytes(8, "little") if header else b"") + junk)
    assert not loads(worker, record, 3)
    worker.store.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "remove", "record"])
def test_damage_is_a_counted_miss_and_gives_way(
    make_disk_worker: Callable[..., Worker], tmp_path: Path, damage: str
) -> None:
    said = tokens(30)
    make_disk_worker().turn(A, said)
    record, segment = the_files(tmp_path)
    data = bytearray(segment.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
        segment.write_bytes(data)
    elif damage == "cut":
        segment.write_bytes(data[:-4])
    elif damage == "swap":
        make_disk_worker().turn(B, tokens(30, seed=2))
        (other,) = set(tmp_path.rglob("*.safetensors")) - {segment}
        segment.write_bytes(other.read_bytes())
    elif damage == "remove":
        segment.unlink()
    else:
        record.write_bytes(record.read_bytes()[:-1])
    worker = make_disk_worker()
    assert worker.turn(A, (*said, 1), has_history=True) == 0
    assert worker.misses == {"evicted" if damage == "remove" else "corrupt": 1}
    assert not worker.failures
    assert make_disk_worker().turn(A, (*said, 1, 2)) == 31


# ---- the format ------------------------------------------------------------------------------------------


@given(
    bits=st.sampled_from(["model", "16", "8", "4"]),
    cuts=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    value_bytes=st.integers(1, 4000),
    data=st.data(),
)
def test_any_part_of_any_segment_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    bits: Any,
    cuts: list[int],
    value_bytes: int,
    data: st.DataObject,
) -> None:
    precision = RowPrecision(bits=bits, dtype=torch.float32)
    shape = StoredShape(
        fingerprint="f", heads=(Heads(num_kv_heads=2, group_size=1, head_dim=3),) * 2, precision=precision
    )
    folder = tmp_path_factory.mktemp("format")
    disk = DiskHistory(folder, max_bytes=1 << 30, shape=shape, ttl_s=1000, value_bytes=value_bytes)
    layers = [
        [precision.encode(torch.randn(2, size, 3), torch.randn(2, size, 3)) for size in cuts]
        for _ in range(2)
    ]
    num_tokens = sum(cuts)
    stored = StoredRecord(
        token_ids=tuple(range(num_tokens)),
        pieces=(Piece(segment=Segment(layers, num_tokens), length=num_tokens),),
        num_exact_tokens=0,
    )
    new = new_record(
        A, stored, shape=shape, base=None, num_base_tokens=0, method="full", value_bytes=value_bytes
    )
    disk.write(A, None, new)
    record = disk.record(A)
    assert record is not None
    assert record.token_ids == tuple(range(num_tokens))
    start = data.draw(st.integers(0, num_tokens - 1))
    stop = data.draw(st.integers(start + 1, num_tokens))
    for layer, chunks in enumerate(layers):
        expected, read = chunk_rows(chunks), chunk_rows(disk.load(A, record, layer, start, stop))
        assert torch.equal(read[0], expected[0][:, start:stop])
        assert torch.equal(read[1], expected[1][:, start:stop])
    _, segment = the_files(folder)
    with safe_open(segment, framework="pt") as opened:
        assert len(opened.keys()) == 2 * len(record.segments[0].value_tokens)
        assert opened.get_tensor("1.0").dtype == torch.uint8
    assert disk.size_bytes == folder_bytes(folder)
