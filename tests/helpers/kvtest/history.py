"""A prefill worker's history over a real Redis or a folder, and an engine's way of using it.

Rows encode their layer, token, position and head, so that a wrong row anywhere is a wrong value.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.shared.at_rest import AtRestKeys
from kvferry.shared.config import HistoryBits
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

LAYERS, HEADS, DIM = 3, 2, 4
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 4


def rows(layer: int, token_ids: tuple[int, ...], start: int) -> Tensor:
    """`[HEADS, n, DIM]`."""
    positions = torch.arange(start, start + len(token_ids), dtype=torch.float32)
    base = torch.tensor(token_ids, dtype=torch.float32) * 1000 + positions + layer * 1e6
    return base[None, :, None] + torch.arange(HEADS)[:, None, None] * 0.25 + torch.zeros(DIM)


class Worker:
    """One prefill worker's store: with Redis if it has a URL, with a folder if it has one. `misses` and
    `failures` count what metrics would."""

    link: RedisLink
    remote: RedisHistory
    disk: DiskHistory

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
        if url:
            options = RedisOptions(url=url, timeout_s=timeout_s, backoff_s=0.001, breaker_open_s=retry_s)
            self.link = RedisLink(options)
            quota = RedisQuota(self.link, max_bytes=redis_max_bytes, ttl_s=1000)
            self.remote = RedisHistory(self.link, quota, shape=shape, ttl_s=1000, value_bytes=value_bytes)
            self.store.add_tier(self.remote, **tier)
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
            loaded = turn.load(layer)
            if reused == 0:
                assert loaded is None
            else:
                assert loaded is not None
                expected = rows(layer, prompt[:reused], 0)
                assert torch.equal(loaded[0], expected)
                assert torch.equal(loaded[1], -expected)
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
        for layer in range(LAYERS):
            # the last generated token has no KV
            new = rows(layer, generated[:-1], len(prompt))
            turn.append(layer, new, -new)
        before_commit()
        turn.commit(prompt + generated)
        return reused


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
