"""History at rest with keys: no rows and no token ids in Redis or on disk, and another key is a miss."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kvtest.history import rows

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.trust.at_rest import AtRestKeys

if TYPE_CHECKING:
    from kvtest.history import Worker

A = SessionKey(owner="key-a", session_id="s")
KEYS, OTHER = AtRestKeys((b"1" * 32,)), AtRestKeys((b"2" * 32,))
ROTATED = AtRestKeys((b"2" * 32, b"1" * 32))
PROMPT = tuple(random.Random(3).randrange(1, 900) for _ in range(70))
LONGER = (*PROMPT, 5, 6, 7)


@pytest.fixture
def stored(redis_server: Any, tmp_path: Path) -> Callable[[], bytes]:
    """Every byte that the tiers have."""

    def read() -> bytes:
        with redis_server.client() as client:
            dumps = [client.get(key) for key in client.scan_iter() if client.type(key) == b"string"]
        return b"".join([*dumps, *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())])

    return read


def write(worker: Worker) -> None:
    assert worker.turn(A, PROMPT) == 0


def found(worker: Worker) -> int:
    """How many tokens a longer prompt finds; every row is compared."""
    return worker.turn(A, LONGER)


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "encrypted"])
def test_rows_and_ids_are_in_the_tier_without_keys_only(
    make_any_worker: Callable[..., Worker], stored: Callable[[], bytes], keys: AtRestKeys | None
) -> None:
    write(make_any_worker(keys=keys))
    data = stored()
    assert len(data) > 70 * 24
    row = rows(1, PROMPT, 0)[0, 9].numpy().tobytes()
    ids = b"".join(token.to_bytes(4, "little") for token in PROMPT[:8])
    assert [secret in data for secret in (row, ids)] == [keys is None] * 2
    assert found(make_any_worker(keys=keys)) == 70


def test_the_next_key_reads_what_the_former_wrote(make_any_worker: Callable[..., Worker]) -> None:
    write(make_any_worker(keys=KEYS))
    assert found(make_any_worker(keys=ROTATED)) == 70


@pytest.mark.parametrize(("one", "other"), [(KEYS, OTHER), (KEYS, None), (None, KEYS)])
def test_without_the_key_it_is_a_miss_that_the_next_turn_replaces(
    make_any_worker: Callable[..., Worker], one: AtRestKeys | None, other: AtRestKeys | None
) -> None:
    write(make_any_worker(keys=one))
    worker = make_any_worker(keys=other)
    assert worker.store.info(A).num_tokens == 0
    assert found(worker) == 0
    assert worker.misses == {"key": 1}
    assert make_any_worker(keys=other).store.info(A).num_tokens == 73


def test_deleting_a_session_leaves_none_of_its_bytes(
    make_any_worker: Callable[..., Worker], redis_server: Any, tmp_path: Path
) -> None:
    worker = make_any_worker(keys=KEYS)
    write(worker)
    worker.store.drop(A)
    with redis_server.client() as client:
        assert [key for key in client.scan_iter() if b"key-a" in key] == []
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in ([], ["lock"])
