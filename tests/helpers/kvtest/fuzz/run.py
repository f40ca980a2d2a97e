"""Runs a target's cases, and measures each one's memory and time."""

from __future__ import annotations

import base64
import faulthandler
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Case = tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader of bytes from outside.

    Attributes:
        make: a case, of one or more messages.
        read: reads it, and returns what came of it in a few words. It raises whatever is a mistake.
        max_bytes: how much memory one case may take beside its own, for every byte of it and besides.
        close: what ends it.
    """

    name: str
    make: Callable[[Random], Case]
    read: Callable[[Case], str]
    max_bytes: tuple[int, int]
    close: Callable[[], None] = lambda: None


MAX_CASE_S = 2.0
HANG_S = 60.0
"""A case that takes as long ends the process with its traceback."""
_MAX_FINDINGS = 20


@dataclass
class Report:
    """Attributes:
    num_messages: of all cases.
    findings: cases that are mistakes: what happened, and the case.
    smallest: the shortest case with each outcome.
    """

    seed: int
    num_cases: int = 0
    num_messages: int = 0
    largest_case_bytes: int = 0
    largest_allocation_bytes: int = 0
    longest_s: float = 0.0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    smallest: dict[str, Case] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        names = ("seed", "num_cases", "num_messages", "largest_case_bytes", "largest_allocation_bytes")
        numbers = {name: getattr(self, name) for name in names}
        times = {"longest_s": round(self.longest_s, 4), "seconds": round(self.seconds, 1)}
        return {**numbers, **times, "outcomes": dict(self.outcomes.most_common()), "findings": self.findings}


def case_of(target: Target, seed: int, number: int) -> Case:
    return target.make(Random(f"{target.name} {seed} {number}"))


def run(
    target: Target, *, seed: int, num_messages: int, progress: Callable[[int], None] = lambda _: None
) -> Report:
    """Cases of a target until they have so many messages."""
    report = Report(seed)
    began_s = time.perf_counter()
    tracemalloc.start(1)
    try:
        while report.num_messages < num_messages and len(report.findings) < _MAX_FINDINGS:
            case = case_of(target, seed, report.num_cases)
            judge(target, case, report, f"{target.name} {seed} {report.num_cases}")
            report.num_cases += 1
            report.num_messages += len(case)
            progress(report.num_messages)
    finally:
        tracemalloc.stop()
        faulthandler.cancel_dump_traceback_later()
        target.close()
    report.seconds = time.perf_counter() - began_s
    return report


def _read(target: Target, case: Case) -> tuple[str, str, float, int]:
    """What came of a case, what is wrong with that, and the seconds and bytes that it took."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    began_s = time.perf_counter()
    try:
        outcome, wrong = target.read(case), ""
    except Exception:
        outcome, wrong = "crash", traceback.format_exc(limit=-4)
    elapsed_s = time.perf_counter() - began_s
    return outcome, wrong, elapsed_s, max(0, tracemalloc.get_traced_memory()[1] - before)


def judge(target: Target, case: Case, report: Report, where: str) -> None:
    """Read one case under tracemalloc, and note what is wrong with it."""
    if report.num_cases % 256 == 0:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
    size_bytes = sum(map(len, case))
    outcome, wrong, elapsed_s, allocated = _read(target, case)
    per_byte, base = target.max_bytes
    if allocated > per_byte * size_bytes + base:
        # The interpreter's own tables grow in whichever case fills them: that of interned strings, of which
        # pathlib makes many, by megabytes. What a reader takes, it takes again.
        allocated = min(allocated, _read(target, case)[3])
    if not wrong and allocated > per_byte * size_bytes + base:
        wrong = f"{allocated} bytes for a case of {size_bytes}; {per_byte} a byte and {base} are allowed"
    if not wrong and elapsed_s > MAX_CASE_S:
        wrong = f"{elapsed_s:.1f} s; {MAX_CASE_S} are allowed"
    if wrong:
        text = [base64.b64encode(part).decode() for part in case]
        report.findings.append({"where": where, "what": wrong, "case": text if size_bytes < 65_536 else []})
    report.outcomes[outcome] += 1
    report.largest_case_bytes = max(report.largest_case_bytes, size_bytes)
    report.largest_allocation_bytes = max(report.largest_allocation_bytes, allocated)
    report.longest_s = max(report.longest_s, elapsed_s)
    known = report.smallest.get(outcome)
    if known is None or size_bytes < sum(map(len, known)):
        report.smallest[outcome] = case
