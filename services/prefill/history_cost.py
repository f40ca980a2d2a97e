"""Which way a turn gets at its history: recompute it, fetch it, or fetch it and ship what decode lacks.

Place in the request's path: asked after the turn has begun, when it is known which tier holds which tokens
and what decode holds, and before its pass. The prefill worker decides, because it alone knows the tiers and
measures them, its engine and its transfers; the router is told. Moves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvferry.services.prefill.figures import DecayingFigures
from kvferry.shared.control.messages import HistoryWay

Shipment = Literal["whole", "delta"]

_MIN_RATIO = 2.0
_MIN_SAVING_S = 0.05
"""A way gives way to a later one that takes less than half its time and saves more than this. Figures err,
and running tokens again occupies the engine that every other request waits for."""


@dataclass(frozen=True, kw_only=True)
class TurnOutlook:
    """What is known of a turn before its pass.

    Attributes:
        num_prompt_tokens: P.
        tiers: tier and number of tokens that it holds, in the prompt's order.
        decode_holds: whether decode has rows of the session's last selection that need not come again.
        method: the compression's name.
        row_bytes: of the rows that the plan keeps, were they shipped as rows.
    """

    num_prompt_tokens: int
    tiers: tuple[tuple[str, int], ...]
    decode_holds: bool
    method: str
    row_bytes: int

    @property
    def num_held_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.tiers)

    def used(self, num_tokens: int) -> Iterator[tuple[str, int]]:
        """Of the first `num_tokens` tokens, how many each tier gives."""
        for tier, held in self.tiers:
            yield tier, min(held, num_tokens)
            num_tokens -= min(held, num_tokens)


@dataclass(frozen=True, kw_only=True)
class HistoryChoice:
    """What a turn does.

    Attributes:
        reused_tokens: tokens whose KV is loaded; those after them are run.
        by_cost: whether measured costs led away from the standing order.
    """

    way: HistoryWay
    reused_tokens: int
    by_cost: bool


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """Seconds of what was measured of a way's parts, and whether that was all of them."""

    seconds: float
    is_complete: bool


class HistoryCosts:
    """Measures a worker's turns, and chooses the next one's way by what they took. Thread-safe.

        delta ──► fetch ──► recompute        the standing order; the first that is possible is taken,
                                             until a later one is measured to be much cheaper

    What was not measured lately counts as nothing for a way and rules out the ways after it: without figures
    the order stands, and a tier that was slow is tried again when its figures have decayed. A cost is the sum
    of loading, running the other tokens, serialising and shipping, each of them seconds per byte or token at
    about that size.

    Args:
        token_bytes: KV of one token, in all layers.
        clock: monotonic seconds.
    """

    def __init__(self, *, token_bytes: int, half_life_s: float, clock: Callable[[], float]) -> None:
        self._token_bytes = token_bytes
        self._figures = DecayingFigures(half_life_s=half_life_s, clock=clock)

    # ---- measuring ---------------------------------------------------------------------------------------

    def ran(self, num_tokens: int, *, num_prompt_tokens: int, seconds: float) -> None:
        """The model ran the last `num_tokens` of a prompt."""
        self._figures.add("run", seconds / num_tokens, num_tokens, num_prompt_tokens)

    def loaded(self, tiers: tuple[tuple[str, int], ...], *, seconds: float) -> None:
        """A turn waited so long for its history, or gave up waiting. The slowest tier is held to account:
        the one that comes last."""
        used = [(tier, num_tokens) for tier, num_tokens in tiers if num_tokens]
        if used:
            tier, num_tokens = used[-1]
            size_bytes = num_tokens * self._token_bytes
            self._figures.add(f"load {tier}", seconds / size_bytes, size_bytes)

    def packed(self, row_bytes: int, shipment: Shipment, *, seconds: float) -> None:
        """A selection of so many bytes of rows was serialised."""
        self._figures.add(f"pack {shipment}", seconds, row_bytes)

    def shipped(
        self, method: str, row_bytes: int, shipment: Shipment, *, size_bytes: int, seconds: float
    ) -> None:
        """A selection of `row_bytes` went out as `size_bytes`, and decode has it all."""
        self._figures.add("wire", seconds / size_bytes, size_bytes)
        self._figures.add(f"{shipment} {method}", size_bytes / max(1, row_bytes))

    # ---- choosing ----------------------------------------------------------------------------------------

    def choose(self, outlook: TurnOutlook, *, by_cost: bool = True) -> HistoryChoice:
        """The way of a turn, always one that is possible. Args: by_cost: False for the standing order."""
        first, *others = _ways(outlook)
        if not by_cost:
            others = []
        taken, taken_s = first, self._cost(outlook, *first).seconds
        for other in others:
            cost = self._cost(outlook, *other)
            cheaper = taken_s > _MIN_RATIO * cost.seconds and taken_s - cost.seconds > _MIN_SAVING_S
            if cost.is_complete and cheaper:
                taken, taken_s = other, cost.seconds
        way, reused_tokens = taken
        return HistoryChoice(way=way, reused_tokens=reused_tokens, by_cost=taken != first)

    def _cost(self, outlook: TurnOutlook, way: HistoryWay, reused_tokens: int) -> _Cost:
        parts = list(self._parts(outlook, way, reused_tokens))
        return _Cost(
            seconds=sum(part for part in parts if part is not None),
            is_complete=all(part is not None for part in parts),
        )

    def _parts(self, outlook: TurnOutlook, way: HistoryWay, reused_tokens: int) -> Iterator[float | None]:
        """Seconds of loading, running, serialising and shipping; None where not measured."""
        figures, shipment = self._figures, "delta" if way == "delta" else "whole"
        for tier, num_tokens in outlook.used(reused_tokens):
            size_bytes = num_tokens * self._token_bytes
            yield _times(figures.get(f"load {tier}", size_bytes), size_bytes) if size_bytes else 0.0
        num_run = outlook.num_prompt_tokens - reused_tokens
        yield _times(figures.get("run", num_run, outlook.num_prompt_tokens), num_run)
        yield figures.get(f"pack {shipment}", outlook.row_bytes)
        ratio = figures.get(f"{shipment} {outlook.method}")
        if ratio is None:
            yield None
        else:
            size_bytes = round(ratio * outlook.row_bytes)
            yield _times(figures.get("wire", size_bytes), size_bytes)


def _ways(outlook: TurnOutlook) -> list[tuple[HistoryWay, int]]:
    """The ways that are possible, in the standing order, with the tokens that each reuses. The slowest tier's
    tokens may be run again and the others' loaded."""
    held = outlook.num_held_tokens
    ways: list[tuple[HistoryWay, int]] = []
    if outlook.decode_holds and held:
        ways.append(("delta", held))
    if held:
        ways.append(("fetch", held))
    kept = held
    for _, num_tokens in reversed(outlook.tiers):
        kept -= num_tokens
        if num_tokens:
            ways.append(("recompute", kept))
    return ways or [("recompute", 0)]


def _times(per_unit_s: float | None, count: int) -> float | None:
    return None if per_unit_s is None else per_unit_s * count
