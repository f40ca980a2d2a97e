"""Predicts a load's costs with one method: times and number of workers, with and without disaggregation.

Requests come at random moments (Poisson). Prompts queue for prefill workers (an M/D/c queue, approximated as
half the wait of M/M/c). A decode step has as many sequences as arrive while one is answered (Little's law).
Without disaggregation every worker does both, and prompts stop its streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvferry.shared.compression.plan import CompressionPlan
from kvferry.tools.plan.machine import USABLE_MEMORY, Machine
from kvferry.tools.plan.model import ModelCost
from kvferry.tools.plan.sizes import Sizes, sizes_of

MAX_UTILISATION = 0.7
"""Of a worker; above it waits grow fast."""
MAX_WORKERS = 4096
_ROUNDS = 200


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What clients send.

    Attributes:
        rate: requests a second; first_token_bound_s, per_token_bound_s: 0 is no bound.
    """

    prompt_tokens: int
    answer_tokens: int
    rate: float
    first_token_bound_s: float = 0.0
    per_token_bound_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One method's costs under a load.

    Attributes:
        prefill_s, compress_s: of one prompt; wait_s: for a prefill worker, on average.
        transfer_s: from the first token to decode's first step.
        step_s: one decode step, and how much longer prompts make it.
        stall_s: how long a prompt stops the streams of its worker; 0 with disaggregation.
        prefill_workers, decode_workers: without disaggregation all are decode workers; None: no number up to
            `MAX_WORKERS` meets the bounds.
        batch: sequences in a step.
    """

    load: Workload
    sizes: Sizes
    prefill_s: float
    compress_s: float
    wait_s: float
    transfer_s: float
    step_s: float
    stall_s: float
    prefill_workers: int | None
    decode_workers: int | None
    batch: float

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.prefill_s + self.compress_s

    @property
    def after_first_s(self) -> float:
        """The time from the first to the last token."""
        further = self.load.answer_tokens - 1
        return self.transfer_s + further * self.step_s if further else 0.0

    @property
    def per_token_s(self) -> float:
        """The mean time of the tokens after the first, the transfer included."""
        return self.after_first_s / max(1, self.load.answer_tokens - 1)

    @property
    def total_s(self) -> float:
        return self.first_token_s + self.after_first_s

    @property
    def workers(self) -> int | None:
        if self.prefill_workers is None or self.decode_workers is None:
            return None
        return self.prefill_workers + self.decode_workers


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Where a load runs.

    Attributes:
        link_bytes_per_s: between a prefill and a decode worker; link_latency_s: of one message.
        max_batch: sequences in one step.
    """

    machine: Machine
    model: ModelCost
    link_bytes_per_s: float
    link_latency_s: float
    max_batch: int

    def arena_bytes(self) -> float:
        """Return the bytes for KV in one worker's memory."""
        return USABLE_MEMORY * self.machine.memory_bytes - self.model.weights_bytes


def disaggregated(deployment: Deployment, plan: CompressionPlan, load: Workload) -> Prediction:
    """Predict prefill and decode on workers of their own.

    Raises: InvalidRequest, ConfigurationError: the method does not go with the model or the machine.
    """
    alone = _alone(deployment, plan, load)
    prefill_workers, wait_s = _prefill_workers(alone.pass_s, load)
    decode_workers, batch, step_s = _decode_workers(deployment, plan, alone.sizes, load, alone.transfer_s)
    return Prediction(
        load=load,
        sizes=alone.sizes,
        prefill_s=alone.prefill_s,
        compress_s=alone.compress_s,
        wait_s=wait_s,
        transfer_s=alone.transfer_s,
        step_s=step_s,
        stall_s=0.0,
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        batch=batch,
    )


def together(
    deployment: Deployment, plan: CompressionPlan, load: Workload, *, least_workers: int = 1
) -> Prediction:
    """Predict workers that compute prompts and answers; nothing is shipped, a prompt stops the streams."""
    alone = _alone(deployment, plan, load)
    sizes, pass_s = alone.sizes, alone.pass_s
    room = deployment.arena_bytes() / sizes.arena
    found: tuple[int, float, float, float] | None = None
    for workers in _numbers(least_workers):
        busy = load.rate / workers * pass_s
        if busy >= MAX_UTILISATION:
            continue
        batch, step_s = _batch(deployment, plan, sizes, load, workers, slowed=1 / (1 - busy))
        wait_s = _wait_s(pass_s, load.rate, workers)
        fits = batch <= min(room, deployment.max_batch)
        first_ok = not load.first_token_bound_s or wait_s + pass_s <= load.first_token_bound_s
        token_ok = not load.per_token_bound_s or step_s / (1 - busy) <= load.per_token_bound_s
        if fits and first_ok and token_ok:
            found = workers, batch, step_s / (1 - busy), wait_s
            break
    workers_needed, batch, step_s, wait_s = found or (None, math.nan, math.nan, 0.0)
    return Prediction(
        load=load,
        sizes=sizes,
        prefill_s=alone.prefill_s,
        compress_s=alone.compress_s,
        wait_s=wait_s,
        transfer_s=0.0,
        step_s=step_s,
        stall_s=pass_s,
        prefill_workers=0,
        decode_workers=workers_needed,
        batch=batch,
    )


@dataclass(frozen=True, kw_only=True)
class _RequestTimes:
    """How long one request takes, on a prefill and a decode worker that do nothing else.

    Attributes:
        prefill_s, compress_s: before the first token.
        transfer_s: from the first token to decode's first step.
    """

    sizes: Sizes
    prefill_s: float
    compress_s: float
    transfer_s: float

    @property
    def pass_s(self) -> float:
        """The time for which the prompt keeps a worker busy."""
        return self.prefill_s + self.compress_s


def _alone(deployment: Deployment, plan: CompressionPlan, load: Workload) -> _RequestTimes:
    """Predict one request alone. Raises: InvalidRequest, ConfigurationError: the method does not fit."""
    machine, model = deployment.machine, deployment.model
    machine.check(model, plan.method)
    sizes = sizes_of(
        model.spec, plan, num_prompt_tokens=load.prompt_tokens, max_new_tokens=load.answer_tokens
    )
    prefill_s = machine.prefill_s(model, load.prompt_tokens)
    compress_s = machine.compress_s(plan, sizes, load.prompt_tokens)
    if plan.repeats_prompt and sizes.method != "full" and machine.is_modelled:
        compress_s += prefill_s  # the prompt is run once more
    s_per_byte = max(1 / deployment.link_bytes_per_s, machine.wire_s_per_byte)
    on_link_s = deployment.link_latency_s + sizes.shipped * s_per_byte
    # Layers are sent while later ones are computed: only what the link cannot keep up with, and the last
    # layer, come after the pass.
    layers = model.spec.num_layers
    overlap_s = (prefill_s + compress_s) * (layers - 1) / layers
    return _RequestTimes(
        sizes=sizes,
        prefill_s=prefill_s,
        compress_s=compress_s,
        transfer_s=machine.handover_s(plan, sizes) + max(on_link_s / layers, on_link_s - overlap_s),
    )


def _prefill_workers(pass_s: float, load: Workload) -> tuple[int | None, float]:
    """Return the fewest workers that are not too busy and meet the bound; and the mean wait for one."""
    least = max(1, math.ceil(load.rate * pass_s / MAX_UTILISATION))
    if load.first_token_bound_s and pass_s > load.first_token_bound_s:
        return None, _wait_s(pass_s, load.rate, least)
    workers = least
    while (
        load.first_token_bound_s and _wait_s(pass_s, load.rate, workers) + pass_s > load.first_token_bound_s
    ):
        workers += 1
    return workers, _wait_s(pass_s, load.rate, workers)


def _wait_s(service_s: float, rate: float, workers: int) -> float:
    """Return the mean wait in a queue with constant service times: half of M/M/c's (Erlang's C formula)."""
    offered = rate * service_s
    if offered >= workers:
        return math.inf
    blocked = 1.0  # Erlang's B, by its recursion
    for number in range(1, workers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    waits = blocked / (1 - offered / workers * (1 - blocked))
    return 0.5 * waits * service_s / (workers - offered)


def _decode_workers(
    deployment: Deployment, plan: CompressionPlan, sizes: Sizes, load: Workload, transfer_s: float
) -> tuple[int | None, float, float]:
    """Return the fewest workers whose batches fit and meet the bound; one's batch and its step's time."""
    room = deployment.arena_bytes() / sizes.arena
    further = max(1, load.answer_tokens - 1)
    for workers in _numbers():
        batch, step_s = _batch(deployment, plan, sizes, load, workers)
        token_ok = not load.per_token_bound_s or step_s + transfer_s / further <= load.per_token_bound_s
        if batch <= min(room, deployment.max_batch) and token_ok:
            return workers, batch, step_s
    return None, math.nan, math.nan


def _batch(
    deployment: Deployment,
    plan: CompressionPlan,
    sizes: Sizes,
    load: Workload,
    workers: int,
    *,
    slowed: float = 1.0,
) -> tuple[float, float]:
    """Return the sequences in a step as a running one sees it, itself included, and the step's time: by
    Little's law. Infinite if a worker cannot keep up.

    Args: slowed: how many times longer a step takes, since prompts stop it.
    """
    batch = 1.0
    for _ in range(_ROUNDS):
        step_s = deployment.machine.step_s(deployment.model, plan, sizes, batch)
        following = 1.0 + load.rate / workers * load.answer_tokens * step_s * slowed
        if following > 1e6:
            break
        if abs(following - batch) < 1e-6 * batch:
            return following, step_s
        batch = following
    return math.inf, math.inf


def _numbers(first: int = 1) -> list[int]:
    """Return the numbers of workers to try: each of the small ones, then in steps of about 2 %."""
    numbers, number = [], first
    while number <= MAX_WORKERS:
        numbers.append(number)
        number = max(number + 1, math.ceil(number * 1.02))
    return numbers
