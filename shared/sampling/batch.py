"""Draws the next token of every sequence of a running batch on the model's device.

A decode step calls it with the logits. The host gets the tokens afterwards and records each in its sequence's
own sampler. The host computes the uniform numbers in advance as hashes, so a seed gives the same tokens
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.shared.sampling.sampler import GREEDY, Flavour, Penalties, SequenceSampler, draw, numbers_of

AHEAD_TOKENS = 64
"""The number of tokens whose uniform numbers are on the device at a time."""


class BatchSampler:
    """Sampling state of a batch's slots, in buffers with constant addresses.

        __init__ ──► place ──► sample ──► sample ──► ... ──after AHEAD_TOKENS──► refill ──► sample ...

    Args:
        num_slots: B; slots without a sequence draw greedily.
        flavour: the parts of sampling that any placed batch may need.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, flavour: Flavour) -> None:
        self._num_slots = num_slots
        self._flavour = flavour
        self._first: list[tuple[SequenceSampler, int]] = []
        self._num_drawn = 0
        self._num_passed = 0
        size = (num_slots, vocab_size)
        self._numbers = numbers_of([GREEDY] * num_slots).to(device)
        self._uniforms = torch.zeros(num_slots, AHEAD_TOKENS, dtype=torch.float64, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self._penalties = (
            Penalties(
                bias=torch.zeros(size, dtype=torch.float64, device=device),
                seen=torch.zeros(size, dtype=torch.bool, device=device),
                counts=torch.zeros(size, dtype=torch.float64, device=device),
            )
            if flavour.penalises
            else None
        )

    def place(self, samplers: Sequence[SequenceSampler]) -> None:
        """Place sequences in their current state into the slots. Args: samplers: at most B."""
        self._first = [(sampler, sampler.next_index) for sampler in samplers]
        self._num_passed = 0
        params = [sampler.params for sampler in samplers]
        params += [GREEDY] * (self._num_slots - len(params))
        self._numbers.copy_(numbers_of(params), non_blocking=True)
        if self._penalties is not None:
            for slot, sampler in enumerate(samplers):
                sampler.copy_penalties(self._penalties, slot)
        self._fill()

    def refill(self) -> None:
        """Compute the next uniform numbers if all are used. Called on the host before a step."""
        if self._num_drawn == AHEAD_TOKENS:
            self._num_passed += AHEAD_TOKENS
            self._fill()

    def sample(self, logits: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token for every slot, and record those of active slots.

        Args: logits float32 `[B, V]`; active: int64 `[B]`, 0 or 1.
        Returns: int64 `[B]`; bool `[B]`, whether a token can be drawn from the logits.
        """
        valid = logits.amax(1).isfinite()
        if self._penalties is None and not self._flavour.draws:
            return logits.argmax(1), valid
        wide = logits.to(torch.float64)
        if self._penalties is not None:
            wide = self._penalties.apply(wide, self._numbers)
        uniforms = self._uniforms.gather(1, self._next.expand(self._num_slots)[:, None])[:, 0]
        tokens = draw(wide, self._numbers, uniforms, self._flavour).clamp(0, logits.shape[1] - 1)
        self._next += 1
        if self._penalties is not None:
            self._penalties.observe(tokens, active)
        return tokens, valid

    def count(self) -> None:
        """Count a launched step, which uses one uniform number per sequence."""
        self._num_drawn += 1

    def _fill(self) -> None:
        if self._flavour.draws:
            ahead = [s.uniforms(AHEAD_TOKENS, at=i + self._num_passed) for s, i in self._first]
            ahead += [[0.0] * AHEAD_TOKENS] * (self._num_slots - len(ahead))
            self._uniforms.copy_(torch.tensor(ahead, dtype=torch.float64), non_blocking=True)
        self._next.zero_()
        self._num_drawn = 0
