"""One decode step over buffers with constant addresses, so that it can be captured and replayed as a graph.

    token_ids, positions, active, left, stop_ids, descriptors ──► model ──► sampling ──► next step's values

The host places a batch and launches steps, and may launch the next one before it reads a step's tokens. If
batched kernels run the whole step, it never waits for the device: lengths, positions, finished completions
and sampled tokens stay on it. Requests and their streams are handled in `engine.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import in_buckets
from kvferry.services.decode.attention import BatchAttention, Members
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.sampling.batch import BatchSampler
from kvferry.shared.sampling.sampler import Flavour, SequenceSampler

_NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """State of one sequence when it is placed.

    Attributes:
        token_id: the last sampled token, which runs next at `position`.
        num_left: tokens that may still be sampled, at least 1.
        stop_ids: ids that end the completion.
    """

    token_id: int
    position: int
    num_left: int
    stop_ids: frozenset[int]
    sampler: SequenceSampler


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step's memory and launches depend on. Batches of one shape share a `DecodeStep` and a graph."""

    members: Hashable
    flavour: Flavour
    num_stop_ids: int

    @classmethod
    def of(cls, members: Members, inputs: Sequence[StepInput]) -> StepShape:
        return cls(
            members=members.signature,
            flavour=Flavour.of([given.sampler.params for given in inputs]),
            num_stop_ids=in_buckets(max(len(given.stop_ids) for given in inputs)),
        )


class DecodeStep:
    """The buffers of one shape, and the step over them.

        created, slots empty ──place──► run ──► run ──► ...     a slot whose completion has ended is
                    ▲                                   │       inactive: nothing is written for it
                    └────────────── place ──────────────┘

    Attributes:
        attention: of the placed batch.
        drawn: int64 `[3, S]`, of the last step: the token, whether one could be drawn from the logits, and
            whether the slot was active.
        logits: float32 `[S, V]` of the last step.
    """

    def __init__(self, model: LanguageModel, members: Members, shape: StepShape) -> None:
        num_slots, vocab_size, device = members.shape.num_slots, model.spec.vocab_size, model.device
        self._model = model
        self.attention = BatchAttention(members)
        self._sampler = BatchSampler(num_slots, vocab_size, device, shape.flavour)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self._token_ids, self._positions, self._active, self._left = (zeros(num_slots) for _ in range(4))
        self._stop_ids = zeros(num_slots, shape.num_stop_ids) + _NO_TOKEN
        self.drawn = zeros(3, num_slots)
        self.logits = torch.zeros(num_slots, vocab_size, device=device)

    @property
    def is_launched(self) -> bool:
        """Whether `run` never waits for the device, so that it can be captured and run ahead of the host."""
        return self.attention.is_launched

    def place(self, members: Members, inputs: Sequence[StepInput]) -> None:
        """Place a batch of this shape. Sequences take the first slots."""
        num_slots, width = self._stop_ids.shape
        empty = [0] * (num_slots - len(inputs))
        for buffer, values in (
            (self._token_ids, [given.token_id for given in inputs]),
            (self._positions, [given.position for given in inputs]),
            (self._active, [1] * len(inputs)),
            (self._left, [given.num_left for given in inputs]),
        ):
            buffer.copy_(torch.tensor(values + empty), non_blocking=True)
        stop_ids = torch.full((num_slots, width), _NO_TOKEN)
        for slot, given in enumerate(inputs):
            stop_ids[slot, : len(given.stop_ids)] = torch.tensor(sorted(given.stop_ids))
        self._stop_ids.copy_(stop_ids, non_blocking=True)
        self.attention.place(members)
        self._sampler.place([given.sampler for given in inputs])

    def prepare(self) -> None:
        """Host work before each `run` or replay."""
        self._sampler.refill()
        self._sampler.count()

    def run(self) -> None:
        """Sample a token for every active slot into `drawn`; update the other buffers for the next step."""
        active = self._active
        logits = self._model.decode(self._token_ids, self._positions, attention=self.attention)
        self.logits.copy_(logits)
        tokens, valid = self._sampler.sample(self.logits, active)
        self.drawn[0].copy_(tokens)
        self.drawn[1].copy_(valid)
        self.drawn[2].copy_(active)
        stopped = (tokens[:, None] == self._stop_ids).any(1)
        self._token_ids.copy_(torch.where(active > 0, tokens, self._token_ids))
        self._positions += active
        self._left -= active
        active.mul_(valid & ~stopped & (self._left > 0))
        self.attention.advance(active)
