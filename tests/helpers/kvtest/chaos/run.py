"""Rounds of chaos: several conversations at once while several faults strike, then a look at what is left."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvtest.chaos.cluster import Cluster
from kvtest.chaos.conversation import LIMIT_S, PATIENCE_S, Conversation, Outcome
from kvtest.chaos.faults import Fault, Only, draw, strike
from kvtest.chaos.script import Script

HEAL_AFTER_S = 8.0
"""Faults that have not struck so long after the last was armed are taken back."""


@dataclass(kw_only=True)
class Report:
    """What some rounds were, and what came of them.

    Attributes:
        struck: faults that did strike, by kind and phase.
        outcome: of all conversations.
        seeds_of_violations: rounds to run again.
    """

    rounds: int = 0
    conversations: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    outcome: Outcome = field(default_factory=Outcome)
    seeds_of_violations: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_faults(self) -> int:
        return sum(self.struck.values())

    def as_json(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "rounds": self.rounds,
            "faults_that_struck": self.num_faults,
            "faults": dict(sorted(self.struck.items())),
            "conversations": self.conversations,
            "requests_with_the_oracle_s_tokens": outcome.right,
            "of_these_with_fewer_reused_tokens": outcome.reused_less,
            "requests_with_a_named_error": dict(sorted(outcome.errors.items())),
            "violations": outcome.violations,
            "seeds_of_violations": self.seeds_of_violations,
            "longest_request_s": round(outcome.longest_s, 1),
            "seconds": round(self.seconds, 1),
        }


async def run_round(
    cluster: Cluster,
    scripts: list[Script],
    seed: int,
    report: Report,
    *,
    num_faults: int = 20,
    num_conversations: int = 8,
    only: Only | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """One round, drawn from its seed and added to the report."""
    begin_s, rng = time.monotonic(), random.Random(seed)
    conversations = [
        Conversation(
            rng.choice(scripts),
            f"round-{seed}-{number}",
            cluster.urls[:: rng.choice((1, -1))],
            changes_router=rng.random() < 0.5,
            patience_s=patience_s,
        )
        for number in range(num_conversations)
    ]
    faults = draw(rng, cluster, num_faults, only=only)
    striking = [asyncio.create_task(strike(fault, cluster)) for fault in faults]
    healing = asyncio.create_task(_heal(cluster, striking))
    outcomes = await asyncio.gather(*(conversation.run() for conversation in conversations))
    await asyncio.gather(*striking)
    healing.cancel()
    await asyncio.gather(healing, return_exceptions=True)
    cluster.heal()
    outcome = Outcome()
    for result in outcomes:
        outcome.add(result)
    healed_s = time.monotonic()
    await cluster.listening()
    if (took_s := time.monotonic() - healed_s) > LIMIT_S:
        outcome.violations.append(f"round {seed}: the cluster was ready {took_s:.0f} s after the faults")
    outcome.violations += [
        f"round {seed}: {size:.0f} bytes of {name}'s arena are not free"
        for name, size in (await cluster.leaked_bytes()).items()
    ]
    report.rounds += 1
    report.conversations += num_conversations
    report.struck += Counter(
        _name(struck) for struck, task in zip(faults, striking, strict=True) if _did(task)
    )
    report.outcome.add(outcome)
    if outcome.violations:
        report.seeds_of_violations.append(seed)
    report.seconds += time.monotonic() - begin_s


async def _heal(cluster: Cluster, striking: list[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*striking)
    await asyncio.sleep(HEAL_AFTER_S)
    cluster.heal()


def _did(task: asyncio.Task[Any]) -> bool:
    """Whether a fault struck: one of a process always does."""
    armed = task.result()
    return armed is None or bool(armed.struck)


def _name(fault: Fault) -> str:
    return f"{fault.phase}: {fault.kind}"
