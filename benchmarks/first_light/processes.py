"""Runs stages in processes of their own, each until its limit, and gathers what they write."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from stages import GPU, Stage
from summary import summary

sys.path.append(str(GPU))

from record import write_whole
from report import as_json

ROOT = Path(__file__).parents[2]
MARK = "FIRST_LIGHT_STAGE"
"""A variable that every process of a stage inherits, whatever session it is in."""
_POLL_S = 0.2
_ABORT_S, _KILL_S = 1.0, 10.0
"""How long a process may take to say where it is, and the kernel to end one."""


class Results:
    """What all stages have written, in `results.json` and `summary.txt` of a folder.

    Args: command: that runs them.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self._folder = folder
        self._command = list(command)
        self._stages: dict[str, dict[str, Any]] = {}

    @property
    def failed(self) -> bool:
        return any(result["failures"] for result in self._stages.values())

    def update(self, stage: str, result: dict[str, Any]) -> None:
        """Write a stage's result so far, if it is new."""
        if self._stages.get(stage) != result:
            self._stages[stage] = result
            write_whole(self._folder / "results.json", as_json({"command": self._command, **self._stages}))

    def write_summary(self) -> str:
        """Write the summary of what there is. Returns it."""
        text = summary(self._stages)
        write_whole(self._folder / "summary.txt", text)
        return text


class RunningStage:
    """The processes of a stage.

    running ──all have ended──► ended
       └────its limit is over──► killed, with all that they have started
    """

    def __init__(self, stage: Stage, environment: Mapping[str, str], work: Path, log: IO[str]) -> None:
        """Start it. Args: work: a folder for what it writes; log: gets what it prints."""
        self.stage = stage
        self._began_s = time.monotonic()
        self._mark = f"{stage.name}-{secrets.token_hex(8)}"
        self._outputs = [work / f"{stage.name}-{number}.json" for number in range(len(stage.commands))]
        self._end = ""
        # of this session, so that they do not outlive it; a group each, which is killed at once
        self._processes = [
            subprocess.Popen(
                [*command, "--limit-s", f"{stage.limit_s:g}", "--output", str(output)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
                env={**environment, MARK: self._mark}, process_group=0,
            )
            for command, output in zip(stage.commands, self._outputs, strict=True)
        ]  # fmt: skip

    @property
    def has_ended(self) -> bool:
        return bool(self._end)

    def poll(self) -> dict[str, Any]:
        """End what is over. Returns what has been written so far."""
        codes = [process.poll() for process in self._processes]
        seconds = time.monotonic() - self._began_s
        if None not in codes:
            self._end = f"ended with status {', '.join(map(str, codes))} after {seconds:.0f} s"
        elif seconds > self.stage.limit_s:
            self._end = f"killed: it had not ended after {seconds:.0f} s"
        if self._end:
            self.kill()
        result = merged(_read(path) for path in self._outputs)
        if self._end:
            result["end"] = self._end
            # a process that failed without a word: a crash, an import
            if None in codes or (any(codes) and not result["failures"]):
                result["failures"].append(f"{self._end}; see log.txt")
        return result

    def kill(self) -> None:
        """Kill what is left of it: its groups, after they have said where they are, and all with its mark."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, signal.SIGABRT)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ABORT_S)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        end_s = time.monotonic() + _KILL_S
        while (marked := _marked(self._mark)) and time.monotonic() < end_s:
            for pid in marked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        for process in running:
            process.poll()


def run_group(
    stages: Sequence[Stage], environment: Mapping[str, str], work: Path, log: IO[str], results: Results
) -> None:
    """Run stages side by side until all have ended."""
    running: list[RunningStage] = []
    try:
        for stage in stages:
            sys.stdout.write(f"==== {stage.name}, at most {stage.limit_s:g} s\n")
            running.append(RunningStage(stage, environment, work, log))
        sys.stdout.flush()
        while running:
            for one in list(running):
                name, result = one.stage.name, one.poll()
                results.update(name, result)
                if one.has_ended:
                    running.remove(one)
                    sys.stdout.write(f"{name} {result['end']}, {len(result['failures'])} failures\n")
                    sys.stdout.flush()
            time.sleep(_POLL_S)
    finally:
        for one in running:
            one.kill()


def merged(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one result of several: tables one after another, of single values the first."""
    whole: dict[str, Any] = {"failures": []}
    for result in results:
        for name, value in result.items():
            if isinstance(value, list):
                whole[name] = [*whole.get(name, ()), *value]
            else:
                whole.setdefault(name, value)
    return whole


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _marked(mark: str) -> list[int]:
    """Return the processes that have inherited a stage's mark and run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
