"""Runs units of work in this process or in several, each with a model of its own.

Yields results as they are measured, in any order; `command.py` writes them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.experiment import Experiment
from kvferry.tools.evaluation.records import Record
from kvferry.tools.evaluation.runner import Job, UnitRunner

_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a process needs to make its runner.

    Attributes:
        threads: 0 divides the processors among the processes.
        batch: the units that are measured together.
    """

    model: str
    device: str
    dtype: str
    threads: int
    epsilon_tables: str
    calibration: str
    num_processes: int
    batch: int
    experiment: Experiment

    def make_runner(self) -> UnitRunner:
        threads = self.threads or max(1, (os.cpu_count() or 1) // self.num_processes)
        torch.set_num_threads(threads)
        install_tables(self.epsilon_tables, calibration=self.calibration)
        model = load_model(self.model, device=self.device, dtype=self.dtype)
        return UnitRunner(model, ChatTokenizer.load(self.model), self.experiment)


def run_jobs(jobs: Sequence[Job], options: WorkerOptions) -> Iterator[list[Record]]:
    """Yield the records of each batch of units as soon as it is measured.

    Raises:
        KvferryError: a process died.
        Whatever a runner raises; units that have not started are dropped.
    """
    batches = [jobs[start : start + options.batch] for start in range(0, len(jobs), options.batch)]
    num_processes = min(options.num_processes, len(batches))
    if num_processes <= 1:
        runner = options.make_runner()
        yield from map(runner.run, batches)
        return
    with ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(options,),
    ) as pool:
        pending: set[Future[list[Record]]] = {pool.submit(_run, batch) for batch in batches}
        try:
            while pending:
                done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise KvferryError("a process of the evaluation died; run the command again to resume") from error
        finally:
            for future in pending:
                future.cancel()


_runner: UnitRunner | None = None
"""Each process of the pool has one runner."""


def _start_worker(options: WorkerOptions) -> None:
    global _runner
    _runner = options.make_runner()


def _run(batch: Sequence[Job]) -> list[Record]:
    assert _runner is not None
    return _runner.run(batch)
