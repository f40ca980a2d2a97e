"""A simulation of decode memory under mixed load: how much of the arena is free but of no use to who waits.

    python benchmarks/fragmentation.py [--requests 400] [--arena-mib 4] [--seed 0] [--output FILE]

The arena, the admission queue and the growth of sequences are the decode service's own; time is counted in
decode steps, and nothing is computed. Requests of several methods arrive faster than they can be served.
Their prompts have 64 to 4096 tokens and their answers 16 to 2048, which nobody knows beforehand. A transfer
takes some steps, in which a sequence cannot be moved, and the KV of some answers is retained for a while.

In a step in which the first waiting request needs no more bytes than are free and still has no range, the
free bytes are lost to external fragmentation; in every other step none are. The result is the mean and the
largest share of the arena that is lost, over the steps in which a request waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from kvferry.services.decode.events import EventStream
from kvferry.services.decode.memory import Scheduler, SequenceMemory
from kvferry.services.decode.parts import Parts
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.shared.cache.arena import Allocation, ByteArena
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.control.messages import GenerateRequest
from kvferry.shared.model.ending import Ending
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.shared.telemetry.metrics import DecodeMetrics
from kvferry.shared.wire.messages import TransferKey

LIMIT = 0.05
"""The largest mean share of the arena that may be lost."""
SPEC = ModelSpec(
    name="simulated",
    fingerprint="simulated",
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=64,
    max_model_len=8192,
    dtype="float16",
    eos_token_ids=(2,),
)
METHODS = (("full", None), ("rocketkv", 256), ("rocketkv", 512), ("snapkv", 384), ("rdkv", 192))
PROMPT_TOKENS, ANSWER_TOKENS = (64, 4096), (16, 2048)
TRANSFER_STEPS, RETAINED_STEPS = (1, 20), (50, 400)
RETAINED_SHARE = 0.2
ARRIVALS_PER_STEP = 0.08
MAX_WAITING, LONG_S = 10_000, 1e9


def _no_tokenizer() -> ChatTokenizer:
    raise AssertionError("the requests have no stop strings")


class _Layer:
    """A layer without content, so that moving it costs nothing."""

    def move(self, fmt: object, regions: object) -> None:
        pass


@dataclass
class Load:
    """The requests, and what happens to each. Lengths are log-uniform."""

    draw: random.Random
    num_requests: int

    def between(self, least: int, most: int) -> int:
        return int(least * (most / least) ** self.draw.random())

    def request(self, number: int) -> tuple[GenerateRequest, int]:
        """A request, and the length of its answer."""
        method, tokens = self.draw.choice(METHODS)
        prompt = self.between(*PROMPT_TOKENS)
        answer = self.between(*ANSWER_TOKENS)
        plan = plan_for(method, budget=None if tokens is None else Budget(tokens=tokens))
        params = SamplingParams(max_tokens=ANSWER_TOKENS[1], temperature=0.0)
        request = GenerateRequest(
            request_id=str(number),
            model_fingerprint=SPEC.fingerprint,
            prompt_token_ids=(1,) * prompt,
            plan=plan,
            sampling=params,
        )
        return request, answer


@dataclass
class Simulation:
    """One decode worker's memory, step by step."""

    load: Load
    arena_bytes: int
    step: int = 0
    tokens: int = 0
    swaps: int = 0
    arriving: list[tuple[int, Sequence, int]] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[Sequence, int] = field(default_factory=dict)
    retained: list[tuple[int, Allocation]] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = ByteArena(self.arena_bytes, torch.device("cpu"))
        self.scheduler = Scheduler(
            self.arena,
            max_waiting=MAX_WAITING,
            admission_wait_s=LONG_S,
            evict=self._evict,
        )
        model = cast(LanguageModel, SimpleNamespace(num_ranks=1, spec=SPEC))
        self.parts = Parts(model, self.arena.memory)
        self.memory = SequenceMemory(self.parts, self.arena, self.scheduler, on_swapped_out=self._count_swap)
        self.metrics = DecodeMetrics()
        self.left: dict[Sequence, int] = {}

    async def run(self) -> dict[str, Any]:
        """Serve all requests. Returns the figures."""
        admissions: set[asyncio.Task[None]] = set()
        number = 0
        while number < self.load.num_requests or admissions or self.left:
            if number < self.load.num_requests and self.load.draw.random() < ARRIVALS_PER_STEP:
                admissions.add(asyncio.create_task(self._admit(*self.load.request(number))))
                number += 1
            await asyncio.sleep(0)
            admissions = {task for task in admissions if not task.done() or task.result()}
            self._step()
        for _, allocation in self.retained:
            self.scheduler.release(allocation)
        self.arena.check_integrity()
        assert self.arena.free_bytes == self.arena.size_bytes, "memory has been lost"
        return {
            "steps": self.step,
            "steps_with_a_waiting_request": len(self.lost),
            "generated_tokens": self.tokens,
            "swapped_to_the_host": self.swaps,
            "mean_lost_share": round(sum(self.lost) / max(len(self.lost), 1), 4),
            "largest_lost_share": round(max(self.lost, default=0.0), 4),
            "mean_used_share_while_a_request_waits": round(sum(self.used) / max(len(self.used), 1), 4),
        }

    async def _admit(self, request: GenerateRequest, answer: int) -> None:
        resolved = resolve_plan(
            request.plan,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_new_tokens=request.sampling.max_tokens,
            num_layers=SPEC.num_layers,
            head_dim=SPEC.head_dim,
        )
        room = self.memory.first_room(resolved.max_new_tokens)
        layout = self.memory.layout(resolved, room, returns_generated=False)
        allocation = await self.scheduler.reserve(
            layout.size_bytes, owner=request.request_id, timeout_s=LONG_S
        )
        key = TransferKey(transfer_id=int(request.request_id), generation=allocation.generation)
        part = self.parts.call("begin", key, allocation, layout, None)
        part.caches = tuple(cast(LayerCache, _Layer()) for _ in layout.layers)
        sequence = Sequence(
            request=request,
            resolved=resolved,
            part=part,
            room=room,
            key=key,
            allocation=allocation,
            router="",
            lease_until_s=math.inf,
            events=EventStream(),
            sampler=SequenceSampler(request.sampling, (1,), SPEC.vocab_size),
            ending=Ending(request.sampling, (1,), SPEC, _no_tokenizer),
            release=self.scheduler.release,
            forget=lambda sequence: None,
            metrics=self.metrics,
            lengths=self.memory.lengths,
        )
        self.left[sequence] = answer
        self.arena.advance(allocation, "in_transfer")
        self.arriving.append((self.step + self.load.between(*TRANSFER_STEPS), sequence, answer))

    def _step(self) -> None:
        """One pass of the engine's loop: arrivals, room, a token for every running sequence, ends."""
        self.step += 1
        for due, sequence, answer in list(self.arriving):
            if due <= self.step:
                self.arriving.remove((due, sequence, answer))
                self.arena.advance(sequence.allocation, "running")
                sequence.arrival = len(self.left) + self.step
                self.waiting.append(sequence)
        while self.waiting and self.memory.make_room(self.waiting[0], self._others(self.waiting[0])):
            self.running[self.waiting.popleft()] = self.step
        for sequence in sorted(self.running, key=lambda each: each.arrival):
            if sequence.is_in_arena:
                self.memory.make_room(sequence, self._others(sequence))
        swapped = [sequence for sequence in self.running if not sequence.is_in_arena]
        for sequence in swapped:
            del self.running[sequence]
        self.waiting = deque(sorted((*self.waiting, *swapped), key=lambda each: each.arrival))
        for sequence in list(self.running):
            sequence.num_appended += 1
            self.tokens += 1
            self.left[sequence] -= 1
            if self.left[sequence] == 0:
                self._end(sequence)
        for due, allocation in list(self.retained):
            if due <= self.step:
                self.retained.remove((due, allocation))
                self.scheduler.release(allocation)
        self.memory.admit_again(self.waiting)
        if self.memory.wants_compaction(self._others):
            self.memory.compact_for_queue(self._others())
        self._measure()

    def _end(self, sequence: Sequence) -> None:
        sequence.lengths.append(sequence.num_appended)
        del self.running[sequence], self.left[sequence]
        if self.load.draw.random() < RETAINED_SHARE:
            self.arena.advance(sequence.allocation, "retained")
            self.retained.append((self.step + self.load.between(*RETAINED_STEPS), sequence.hand_over_bytes()))
        sequence.state = SequenceState.CLOSED
        self.parts.drop_sequence(sequence.name)
        sequence.release_bytes()

    def _evict(self, wanted_bytes: int) -> bool:
        spare = sum(allocation.size_bytes for _, allocation in self.retained)
        if not self.retained or self.arena.free_bytes + spare < wanted_bytes:
            return False
        self.arena.free(self.retained.pop(0)[1])
        return True

    def _measure(self) -> None:
        wanted_bytes = self.scheduler.wanted_bytes
        if wanted_bytes:
            is_lost = wanted_bytes <= self.arena.free_bytes
            self.lost.append(self.arena.free_bytes / self.arena.size_bytes if is_lost else 0.0)
            self.used.append(1 - self.arena.free_bytes / self.arena.size_bytes)

    def _others(self, sequence: Sequence | None = None) -> list[Sequence]:
        return [
            other for other in (*self.waiting, *self.running) if other is not sequence and other.is_in_arena
        ]

    def _count_swap(self) -> None:
        self.swaps += 1


def simulate(*, num_requests: int, arena_bytes: int, seed: int) -> dict[str, Any]:
    load = Load(draw=random.Random(seed), num_requests=num_requests)

    async def run() -> dict[str, Any]:
        return await Simulation(load=load, arena_bytes=arena_bytes).run()

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--arena-mib", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    figures = simulate(num_requests=given.requests, arena_bytes=given.arena_mib << 20, seed=given.seed)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    if given.output:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        run = {
            "commit": commit.stdout.strip(),
            "requests": given.requests,
            "arena_mib": given.arena_mib,
            "seed": given.seed,
            "limit": LIMIT,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(run | {"figures": figures}, indent=1) + "\n")
    if figures["mean_lost_share"] > LIMIT:
        raise SystemExit(f"{figures['mean_lost_share']:.1%} of the arena is lost; {LIMIT:.0%} is allowed")


if __name__ == "__main__":
    main()
