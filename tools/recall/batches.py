"""The batch of each training step, drawn in this process or ahead of time in worker processes.

A step's length and rows depend only on the stage's seed and the step's number; its phase depends on the
tokens planned before it. With a token budget, the number of workers therefore does not change the data, and
a resumed run sees the same data.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvferry.tools.recall.conversations import Mixture, draw_batch
from kvferry.tools.recall.recipe import Stage

_DRAW_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What a step draws."""

    seed: str
    num_rows: int
    num_tokens: int
    mixture: Mixture

    def draw(self) -> tuple[Tensor, Tensor]:
        return draw_batch(self.seed, self.num_rows, self.num_tokens, self.mixture)


_Arrays = tuple[NDArray[np.int64], NDArray[np.bool_]]


def _draw_arrays(plan: BatchPlan) -> _Arrays:
    """Draw in a worker. Arrays are sent as bytes; tensors need shared memory, which containers lack."""
    token_ids, is_answer = plan.draw()
    return token_ids.numpy(), is_answer.numpy()


class BatchSource:
    """Batches of one stage in order, from a given step on.

    Args:
        step, num_tokens: finished steps and tokens of the stage.
        num_workers: processes that draw ahead; 0 draws in this process.
    """

    def __init__(self, stage: Stage, *, step: int = 0, num_tokens: int = 0, num_workers: int = 0) -> None:
        self._stage = stage
        self._step, self._num_tokens = step, num_tokens
        self._depth = 2 * num_workers
        self._pending: deque[tuple[BatchPlan, Future[_Arrays]]] = deque()
        self._pool: ProcessPoolExecutor | None = None
        if num_workers:
            # Forking a process that has used CUDA or a thread pool breaks both.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(num_workers, mp_context=context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def next(self, elapsed_s: float) -> tuple[BatchPlan, Tensor, Tensor]:
        """Return the next step's plan, token ids and answer marks; elapsed_s is the stage's time so far."""
        if self._pool is None:
            plan = self._plan(elapsed_s)
            return plan, *plan.draw()
        while len(self._pending) <= self._depth:
            plan = self._plan(elapsed_s)
            self._pending.append((plan, self._pool.submit(_draw_arrays, plan)))
        plan, future = self._pending.popleft()
        token_ids, is_answer = future.result(timeout=_DRAW_TIMEOUT_S)
        return plan, torch.from_numpy(token_ids), torch.from_numpy(is_answer)

    def _plan(self, elapsed_s: float) -> BatchPlan:
        stage = self._stage
        phase = stage.phase_at(stage.progress(self._num_tokens, elapsed_s))
        lengths, weights = zip(*phase.lengths, strict=True)
        rng = random.Random(f"length/{stage.seed}/{self._step}")
        (num_tokens,) = rng.choices(lengths, weights)
        plan = BatchPlan(
            seed=f"{stage.seed}/{self._step}",
            num_rows=max(1, stage.tokens_per_step // num_tokens),
            num_tokens=num_tokens,
            mixture=phase.mixture,
        )
        self._step += 1
        self._num_tokens += plan.num_rows * plan.num_tokens
        return plan
