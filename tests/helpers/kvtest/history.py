"""A prefill worker's history over a real Redis or a folder, and an engine's way of using it.

Rows encode their layer, token, position and head, so that a wrong row anywhere is a wrong value.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.disk_history import DiskHistory
from kvferry.shared.history.redis_client import RedisLink, RedisOptions
from kvferry.shared.history.redis_history import RedisHistory
from kvferry.shared.history.redis_quota import RedisQuota
from kvferry.shared.history.rows import RowPrecision
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.stored_format import StoredShape
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.model.spec import Heads
from kvferry.shared.process.config import HistoryBits
from kvferry.shared.trust.at_rest import AtRestKeys

LAYERS, HEADS, DIM = 3, 2, 4
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 4


def rows(layer: int, token_ids: tuple[int, ...], start: int) -> Tensor:
    """`[HEADS, n, DIM]`."""
    positions = torch.arange(start, start + len(token_ids), dtype=torch.float32)
    base = torch.tensor(token_ids, dtype=torch.float32) * 1000 + positions + layer * 1e6
    return base[None, :, None] + torch.arange(HEADS)[:, None, None] * 0.25 + torch.zeros(DIM)


def stage(turn: StagedTurn, token_ids: tuple[int, ...], start: int) -> None:
    """Append the rows of these tokens to every layer."""
    for layer in range(LAYERS):
        new = rows(layer, token_ids, start)
        turn.append(layer, new, -new)


def assert_loaded(turn: StagedTurn, layer: int, token_ids: tuple[int, ...]) -> None:
    """Load a layer's history, which is the rows of these tokens."""
    loaded = turn.load(layer)
    if not token_ids:
        assert loaded is None
        return
    assert loaded is not None
    expected = rows(layer, token_ids, 0)
    assert torch.equal(loaded[0], expected)
    assert torch.equal(loaded[1], -expected)


def tokens(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Return random token ids."""
    generator = random.Random(seed)
    return tuple(generator.randrange(1, 900) for _ in range(num_tokens))


class Worker:
    """One prefill worker's store: with Redis if it has a URL, with a folder if it has one. `misses` and
    `failures` count what metrics would."""

    link: RedisLink
    remote: RedisHistory
    disk: DiskHistory
    lowest: RedisHistory | DiskHistory

    def __init__(
        self,
        url: str = "",
        *,
        folder: Path | None = None,
        disk_max_bytes: int = 1 << 30,
        max_bytes: int = 1 << 30,
        bits: HistoryBits = "model",
        fingerprint: str = "model-a",
        redis_max_bytes: int = 0,
        value_bytes: int = 1 << 20,
        timeout_s: float = 20.0,
        turn_timeout_s: float = 60.0,
        retry_s: float = 0.001,
        commit_timeout_s: float = 60.0,
        num_layers: int = LAYERS,
        heads: int = HEADS,
        dim: int = DIM,
        keys: AtRestKeys | None = None,
    ) -> None:
        precision = RowPrecision(bits=bits, dtype=torch.float32)
        self.misses: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        shape = StoredShape(
            fingerprint=fingerprint,
            heads=(Heads(num_kv_heads=heads, group_size=1, head_dim=dim),) * num_layers,
            precision=precision,
            keys=keys,
        )
        self.store = HistoryStore(
            max_bytes=max_bytes,
            num_layers=num_layers,
            turn_lease_s=600,
            precision=precision,
            on_miss=lambda reason: self.misses.update([reason]),
            clock=time.monotonic,
        )
        tier: dict[str, Any] = {
            "turn_timeout_s": turn_timeout_s,
            "commit_timeout_s": commit_timeout_s,
            "on_failure": lambda reason: self.failures.update([reason]),
        }
        if folder is not None:
            self.disk = DiskHistory(
                folder, max_bytes=disk_max_bytes, shape=shape, ttl_s=1000, value_bytes=value_bytes
            )
            self.store.add_tier(self.disk, **tier)
            self.lowest = self.disk
        if url:
            options = RedisOptions(url=url, timeout_s=timeout_s, backoff_s=0.001, breaker_open_s=retry_s)
            self.link = RedisLink(options)
            quota = RedisQuota(self.link, max_bytes=redis_max_bytes, ttl_s=1000)
            self.remote = RedisHistory(self.link, quota, shape=shape, ttl_s=1000, value_bytes=value_bytes)
            self.store.add_tier(self.remote, **tier)
            self.lowest = self.remote
        self._count = 0

    def evict(self, session: SessionKey) -> None:
        """Remove a session from host memory, as if there were no room."""
        with self.store.records.lock:
            self.store.records.forget(session)

    def begin(self, session: SessionKey, prompt: tuple[int, ...], **options: Any) -> StagedTurn:
        self._count += 1
        return self.store.begin(session, f"r{self._count}", prompt, method="rocketkv", **options)

    def run(self, turn: StagedTurn, prompt: tuple[int, ...], at_layer: Callable[[int], None]) -> int:
        """A pass of the prompt as the engine makes it; returns the reused tokens that it ended with."""
        try:
            self._pass(turn, prompt, at_layer)
        except HistoryMiss as miss:
            self.misses[miss.reason] += 1
            turn.restart()
            self._pass(turn, prompt, lambda layer: None)
        return turn.reused_tokens

    def _pass(self, turn: StagedTurn, prompt: tuple[int, ...], at_layer: Callable[[int], None]) -> None:
        reused = turn.reused_tokens
        for layer in range(LAYERS):
            at_layer(layer)
            assert_loaded(turn, layer, prompt[:reused])
            new = rows(layer, prompt[reused:], reused)
            turn.append(layer, new, -new)

    def turn(
        self,
        session: SessionKey,
        prompt: tuple[int, ...],
        generated: tuple[int, ...] = (),
        *,
        at_layer: Callable[[int], None] = lambda layer: None,
        before_commit: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> int:
        """A whole turn; returns its reused tokens. Args: options: of `HistoryStore.begin`."""
        turn = self.begin(session, prompt, **options)
        reused = self.run(turn, prompt, at_layer)
        stage(turn, generated[:-1], len(prompt))  # the last generated token has no KV
        before_commit()
        turn.commit(prompt + generated)
        return reused


def fifty_turns(session: SessionKey, workers: Sequence[Worker]) -> tuple[int, ...]:
    """Run a conversation, of which some turns branch, on any of the workers; returns what was said."""
    generator = random.Random(3)
    said: tuple[int, ...] = ()
    for number in range(50):
        # one turn in five goes back to an earlier point and on from there
        kept = said if generator.random() > 0.2 else said[: generator.randrange(len(said) + 1)]
        prompt = kept + tokens(generator.randrange(1, 6), seed=number)
        answer = tokens(3, seed=1000 + number)
        reused = generator.choice(workers).turn(session, prompt, answer)
        # all that was said before has KV but the last token; the prompt's last token is run in any case
        assert reused == min(max(0, len(said) - 1), len(kept), len(prompt) - 1)
        said = prompt + answer
    return said


@pytest.fixture
def make_worker(redis_server: Any) -> Iterator[Callable[..., Worker]]:
    """`make_worker(url="", **options)`; all are closed at the end."""
    made: list[Worker] = []

    def make(url: str = "", **options: Any) -> Worker:
        made.append(Worker(url or redis_server.socket_url, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.store.close()


@pytest.fixture
def make_disk_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """`make_disk_worker(**options)`: workers that share one folder; all are closed at the end."""
    made: list[Worker] = []

    def make(**options: Any) -> Worker:
        made.append(Worker(**{"folder": tmp_path / "history", **options}))
        return made[-1]

    yield make
    for worker in made:
        worker.store.close()


@pytest.fixture(params=["redis", "disk"])
def make_any_worker(request: pytest.FixtureRequest) -> Callable[..., Worker]:
    """`make_any_worker(**options)`: workers that share one tier, of either kind."""
    fixture = "make_worker" if request.param == "redis" else "make_disk_worker"
    make: Callable[..., Worker] = request.getfixturevalue(fixture)
    return make
