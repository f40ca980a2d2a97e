"""Which tokens may come next: those that a grammar allows, none that end a completion too early, only the end
of thoughts that have used up their budget, or those that a replay draws again.

Used by the samplers (`sampler.py`) of completions that need it. Does not draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvferry.shared.errors import KvferryError
from kvferry.shared.sampling.params import SamplingParams

if TYPE_CHECKING:
    from kvferry.shared.sampling.grammar import TokenMatcher
    from kvferry.shared.sampling.sampler import SequenceSampler


def mask_rows(num_rows: int, vocab_size: int) -> np.ndarray:
    """Allocate what is added to logits: zeros, float32 `[num_rows, V rounded up to a multiple of 32]`."""
    return np.zeros((num_rows, -(-vocab_size // 32) * 32), dtype=np.float32)


class Mask:
    """One completion's mask. Not thread-safe.

    Args: end_ids: ids that end it; matcher: of its grammar, at the beginning.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, end_ids: Sequence[int], matcher: TokenMatcher | None
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._matcher = matcher
        self._is_thinking = params.thinking is not None and params.thinking.is_open
        self._num_thought = 0
        """Tokens of thoughts."""

    def is_needed(self, index: int) -> bool:
        """Return whether some ids may not be the token of this index, which is the next one."""
        if self._matcher is not None or self._params.thinking is not None:
            return True
        return index < max(self._params.min_tokens, len(self._params.delivered))

    def block(self, row: np.ndarray, index: int) -> None:
        """Write what to add to the logits: 0 for ids that may be the token of this index and -inf for others.

        Args: row: float32 `[V]`, and as many more as `mask_rows` has.
        Raises: KvferryError: the grammar takes too much time or memory here.
        """
        params, budget = self._params, self._params.thinking
        only: int | None = None
        if index < len(params.delivered):
            only = params.delivered[index]
        elif budget is not None and self._is_thinking and self._num_thought >= budget.max_tokens:
            only = budget.end_id
        if only is not None:
            row.fill(-np.inf)
            row[only] = 0.0
            return
        if self._matcher is not None:
            self._matcher.block(row)
        else:
            row.fill(0.0)
        if index < params.min_tokens:
            row[self._end_ids] = -np.inf

    def blocked(self, index: int) -> Tensor:
        """Return what `block` writes, float32 `[1, V]`."""
        rows = mask_rows(1, self._vocab_size)
        self.block(rows[0], index)
        return torch.from_numpy(rows)[:, : self._vocab_size]

    def observe(self, token_id: int) -> None:
        """Go on with a token. Raises: InvalidRequest, KvferryError: see `TokenMatcher.accept`."""
        if self._matcher is not None:
            self._matcher.accept(token_id)
        if (budget := self._params.thinking) is not None:
            if token_id == budget.end_id:
                self._is_thinking = False
            elif self._is_thinking:
                self._num_thought += 1
            else:
                self._is_thinking = token_id == budget.open_id


class BatchMasks:
    """What is added to a batch's logits, in buffers with constant addresses.

    Attributes: samplers: those of slots that have a mask.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._rows = mask_rows(num_slots, vocab_size)
        # on a CPU, this is the same memory
        self._blocked = torch.from_numpy(self._rows)[:, :vocab_size].to(device)
        self._allowed_logits = torch.zeros(num_slots, vocab_size, device=device)
        self.samplers: dict[int, SequenceSampler] = {}

    def refill(self) -> None:
        """Show which tokens may come next, and remove masks that are no longer needed."""
        for slot, sampler in list(self.samplers.items()):
            if not sampler.is_masked:
                self.remove(slot)
                continue
            try:
                sampler.block(self._rows[slot])
            except KvferryError:
                # the host asks again, and ends the completion with the error
                self._rows[slot].fill(-np.inf)
            self._show(slot)

    def remove(self, slot: int) -> None:
        """Remove a slot's mask, if it has one."""
        if self.samplers.pop(slot, None) is not None:
            self._rows[slot].fill(0.0)
            self._show(slot)

    def apply(self, logits: Tensor) -> Tensor:
        """Mask the logits of the first slots. Args: float32 `[S, V]`."""
        # Reuse memory: a new tensor of this size costs more than the arithmetic.
        allowed = self._allowed_logits[: len(logits)]
        return torch.add(logits, self._blocked[: len(logits)], out=allowed)

    def _show(self, slot: int) -> None:
        if not self._blocked.is_cpu:
            row = torch.from_numpy(self._rows[slot, : self._blocked.shape[1]])
            self._blocked[slot].copy_(row, non_blocking=True)
