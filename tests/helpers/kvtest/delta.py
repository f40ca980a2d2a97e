"""Deltas of one layer: what a worker retains of earlier turns, and what is sent of the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from kvferry.shared.cache.delta import Positions, RetainedChain, RetainedRows, delta_tensors
from kvferry.shared.compression.formats.rows import RowsCache

DIM = 3
FOUR_TOKENS = RetainedChain(
    selections=(RetainedRows(transfer_id=7, num_prompt_tokens=4, num_tokens=4, layers=(None,)),)
)
"""A prompt of four tokens, all of them retained."""


def selection(data: st.DataObject, *, heads: int, num_tokens: int) -> Positions | None:
    """Positions `[H_kv, n]`; None where all are kept."""
    num_rows = data.draw(st.integers(1, num_tokens))
    if num_rows == num_tokens and data.draw(st.booleans()):
        return None
    draw = st.permutations(range(num_tokens)).map(lambda order: sorted(order[:num_rows]))
    return np.array([data.draw(draw) for _ in range(heads)], np.int32)


def rows_of(tokens: Tensor, positions: Positions | None) -> Tensor:
    """K or V rows of `[H_kv, T, D]` at these positions."""
    if positions is None:
        return tokens.clone()
    return torch.stack(
        [rows[torch.from_numpy(kept).long()] for rows, kept in zip(tokens, positions, strict=True)]
    )


def retained_rows(
    tokens: Sequence[Tensor], positions: Positions | None, *, prompt: int, generated: int
) -> tuple[Tensor, Tensor]:
    """As the arena has them: the prompt's rows, generated ones after them, the rest never written."""
    keys, values = (
        torch.cat(
            [
                rows_of(tensor[:, :prompt], positions),
                tensor[:, prompt : prompt + generated],
                torch.full((len(tensor), 2, DIM), torch.nan),
            ],
            1,
        )
        for tensor in tokens
    )
    return keys, values


@dataclass(kw_only=True)
class Delta:
    """A layer's next turn.

    Attributes:
        retained: what the worker has of earlier turns.
        rows: K and V of each of them there.
        positions: `[H_kv, n]` of the tokens that the turn keeps; None: all.
        whole: K and V rows of the turn.
        sent: the tensors of its delta.
        num_new: rows that each head lacks.
    """

    heads: int
    num_tokens: int
    retained: RetainedChain
    rows: list[tuple[Tensor, Tensor]]
    positions: Positions | None
    whole: dict[str, Tensor]
    sent: dict[str, Tensor]
    num_new: list[int]

    def assert_received(self, cache: RowsCache) -> None:
        """Check that a cache has the whole layer, and has written nothing else."""
        for target, expected in zip((cache.keys, cache.values), self.whole.values(), strict=True):
            assert torch.equal(target[:, : expected.shape[1]], expected)
            assert target[:, expected.shape[1] :].isnan().all()
        assert (cache.positions is None) == (self.positions is None)
        assert self.positions is None or np.array_equal(cache.positions, self.positions)


def draw_delta(data: st.DataObject) -> Delta:
    """Draw any turn after one to four others."""
    heads = data.draw(st.sampled_from([1, 2, 3]))
    # the prompts of earlier turns, the newest first, each a part of the one before it
    prompts = sorted(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)), reverse=True)
    generated, more = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
    total = prompts[0] + generated + more
    tokens = [torch.randn(heads, total, DIM, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    before = [selection(data, heads=heads, num_tokens=prompt) for prompt in prompts]
    after = selection(data, heads=heads, num_tokens=total)
    if after is not None and after.shape[1] == total:
        after = None  # a layer that keeps all has no index
    num_shared = data.draw(st.integers(1, prompts[0] + generated))
    depth = data.draw(st.integers(1, len(prompts)))
    retained = RetainedChain(
        selections=tuple(
            RetainedRows(transfer_id=7, num_prompt_tokens=prompt, num_tokens=total, layers=(positions,))
            for prompt, positions in zip(prompts, before, strict=True)
        )
    ).first(depth, num_shared)
    rows = [
        # nothing generated after an earlier prompt is counted on
        retained_rows(tokens, positions, prompt=prompt, generated=0 if number else generated)
        for number, (prompt, positions) in enumerate(zip(prompts, before, strict=True))
    ][:depth]
    whole = dict(zip(("keys", "values"), (rows_of(tensor, after) for tensor in tokens), strict=True))
    index = {} if after is None else {"index": torch.from_numpy(after)}
    wanted = after if after is not None else np.tile(np.arange(total, dtype=np.int32), (heads, 1))

    def is_retained(head: int, token: int) -> bool:
        generated_last = prompts[0] <= token
        kept_once = any(
            token < prompt and (positions is None or token in positions[head])
            for prompt, positions in zip(prompts[:depth], before[:depth], strict=True)
        )
        return token < num_shared and (generated_last or kept_once)

    return Delta(
        heads=heads,
        num_tokens=total,
        retained=retained,
        rows=rows,
        positions=after,
        whole=whole,
        sent=delta_tensors({**index, **whole}, 0, retained),
        num_new=[sum(not is_retained(head, token) for token in wanted[head]) for head in range(heads)],
    )
