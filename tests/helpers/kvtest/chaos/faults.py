"""Seeded faults: which part of a cluster they strike, when and how. The same seed gives the same faults."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Literal, get_args

from kvtest.chaos.cluster import Cluster
from kvtest.chaos.links import Armed, ByteFault, Side

ProcessFault = Literal["kill", "stop", "redis stop", "redis kill"]

SPOILING: frozenset[str] = frozenset({"duplicate", "reorder", "drop", "flip"})
"""TCP delivers no such bytes, so a link to a client or to Redis, whose protocol has no checksum, has none."""
PHASES = {
    # bytes that pass in one direction of a link before a fault, at most; longest silence in seconds
    "blocks": (60_000, 6.0),
    "control": (3_000, 6.0),
    "http": (6_000, 3.0),
    "redis": (20_000, 3.0),
}
PROCESS_SHARE = 0.06


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a round.

    Attributes:
        kind: of `Armed`, or what happens to a process.
        target: the link, or the process.
        start_s: when it is armed or begins, from the round's start.
    """

    kind: str
    target: str
    start_s: float
    toward: Side = "server"
    after_bytes: int = 0
    seconds: float = 0.0
    size: int = 1
    bits: int = 0
    seed: int = 0

    @property
    def phase(self) -> str:
        return self.target.split("-")[0]


@dataclass(frozen=True, kw_only=True)
class Only:
    """Which faults to draw: of this kind, on links of this phase, toward their servers.

    Attributes: size, bits: as of `Armed`.
    """

    kind: ByteFault
    phase: str
    size: int = 1
    bits: int = 0


def draw(rng: random.Random, cluster: Cluster, count: int, *, only: Only | None = None) -> list[Fault]:
    """Faults of one round."""
    faults: list[Fault] = []
    while len(faults) < count:
        fault = _draw(rng, cluster, only)
        # A process has one fault at a time.
        if fault.target in cluster.links or all(other.target != fault.target for other in faults):
            faults.append(fault)
    return faults


def _draw(rng: random.Random, cluster: Cluster, only: Only | None) -> Fault:
    start_s, seed = rng.uniform(0.0, 1.5), rng.randrange(1 << 30)
    if only is None and rng.random() < PROCESS_SHARE:
        kind: ProcessFault = rng.choices(("kill", "stop", "redis stop", "redis kill"), weights=(2, 6, 3, 1))[
            0
        ]
        target = "redis" if kind.startswith("redis") else rng.choice(sorted(cluster.nodes))
        longest_s = 12.0 if kind == "redis stop" else 7.0
        return Fault(kind=kind, target=target, start_s=start_s, seconds=rng.uniform(0.3, longest_s))
    phase = only.phase if only is not None else rng.choices(sorted(PHASES), weights=[5, 4, 2, 3])[0]
    target = rng.choice([name for name in sorted(cluster.links) if name.startswith(phase)])
    allowed = [only.kind] if only is not None else sorted(get_args(ByteFault))
    if phase in ("http", "redis"):
        allowed = [candidate for candidate in allowed if candidate not in SPOILING]
    longest_bytes, longest_s = PHASES[phase]
    return Fault(
        kind=rng.choice(allowed),
        target=target,
        start_s=start_s,
        toward=rng.choice(("client", "server")) if only is None else "server",
        after_bytes=int(longest_bytes * rng.random() ** 2),
        seconds=rng.uniform(0.2, longest_s),
        size=rng.choice((1, 1, 8, 64)) if only is None else only.size,
        bits=0 if only is None else only.bits,
        seed=seed,
    )


async def strike(fault: Fault, cluster: Cluster) -> Armed | None:
    """Let a fault happen in its time; returns once it is over or armed."""
    await asyncio.sleep(fault.start_s)
    if fault.target in cluster.links:
        armed = Armed(
            kind=fault.kind,  # type: ignore[arg-type]
            toward=fault.toward,
            after_bytes=fault.after_bytes,
            seconds=fault.seconds,
            size=fault.size,
            bits=fault.bits,
            seed=fault.seed,
        )
        cluster.links[fault.target].armed.append(armed)
        return armed
    if fault.target == "redis":
        if fault.kind == "redis stop":
            cluster.redis.pause()
            await asyncio.sleep(fault.seconds)
            cluster.redis.resume()
        else:
            await asyncio.to_thread(cluster.redis.kill)
            await asyncio.sleep(fault.seconds)
            await asyncio.to_thread(cluster.redis.start)
        return None
    node = cluster.nodes[fault.target]
    if fault.kind == "kill":
        await asyncio.to_thread(node.kill)
        await asyncio.sleep(min(fault.seconds, 1.0))
        node.start()
    else:
        node.stop()
        await asyncio.sleep(fault.seconds)
        node.resume()
    return None
