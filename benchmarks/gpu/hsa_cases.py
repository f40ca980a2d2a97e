"""Rows 2 to 4: hybrid sparse attention, launch by launch and as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from case import Case, Device, Model, attend_all, special_softmax, tolerance_of
from torch import Tensor

from kvferry.kernels.hsa import triton_kernel as hsa
from kvferry.kernels.hsa.batch import HsaScratch, SparseSize
from kvferry.kernels.hsa.page_scores import _score_pages_kernel, _score_rows_kernel
from kvferry.kernels.hsa.token_selection import _gather_attend_kernel, _select_tokens_kernel


@dataclass(frozen=True, kw_only=True)
class HsaSize:
    """One size: B sequences of n rows, pages of P, k1 channels, k2 tokens. Pages of one token have
    no extremes but their keys."""

    batch_size: int
    length: int
    page_size: int
    num_channels: int
    num_tokens: int
    is_special: bool = False
    """Whether logits are capped and there are sinks."""

    def __str__(self) -> str:
        return (
            f"B={self.batch_size} n={self.length} P={self.page_size} k1={self.num_channels} "
            f"k2={self.num_tokens}"
        )


class HsaInputs:
    """Rows and page extremes of a batch in one arena, page scores far apart, and the three launches.

    Each page has a level of its own, so that rounding chooses no other page than the reference does.
    """

    def __init__(self, model: Model, size: HsaSize, device: Device, seed: int) -> None:
        self.model, self.size = model, size
        generator = torch.Generator(device).manual_seed(seed)
        group, head_dim = model.group_size, model.head_dim
        length, page_size = size.length, size.page_size
        flags = {"capped": size.is_special, "sinks": size.is_special}
        self.scaling = special_softmax(model, device, **flags)
        self.num_heads = num_heads = size.batch_size * model.num_kv_heads
        self.num_pages = num_pages = -(-length // page_size)
        padded = -(-num_pages // 8) * 8

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(model.dtype)

        self.queries, rows = random(num_heads, group, head_dim), random(num_heads, 2, length, head_dim)
        direction = self.queries.float().mean(1, keepdim=True)
        levels = torch.rand(num_heads, num_pages, 1, generator=generator, device=device).sort(dim=1).values
        levels = levels.gather(1, torch.rand(levels.shape, generator=generator, device=device).argsort(1))
        apart = (6 * levels * direction).repeat_interleave(page_size, 1)[:, :length]
        rows[:, 0] = (rows[:, 0].float() * 0.05 + apart).to(model.dtype)
        self.rows = rows
        self.highest, self.lowest = page_extremes(rows[:, 0], page_size, padded)
        step, extremes = length * head_dim, head_dim * padded
        whole = [rows.flatten(1)]
        if page_size > 1:
            whole += [each.mT.flatten(1) for each in (self.highest, self.lowest)]
        self.arena = torch.cat([part.to(model.dtype) for part in whole], dim=1)
        places = (0, step, 2 * step, 2 * step + extremes)
        table = [
            (
                *(h * self.arena.shape[1] + place for place in places[:2]), length,
                *(h * self.arena.shape[1] + place for place in places[2:]), padded,
                page_size, size.num_channels, size.num_tokens,
            )
            for h in range(num_heads)
        ]  # fmt: skip
        self.table = torch.tensor(table, device=device)
        launches = SparseSize(
            max_pages=padded,
            max_tokens=min(size.num_tokens, length),
            max_channels=size.num_channels,
            pages_of_one=page_size == 1,
            larger_pages=page_size > 1,
        )
        shape = (size.batch_size, model.num_kv_heads)
        self.batch = self.queries.view(*shape, group, head_dim)
        self.output = torch.full_like(self.batch, torch.nan)
        self.scratch = HsaScratch.of(launches, self.output)
        self.new = tuple(rows[:, i, -1].reshape(*shape, head_dim).contiguous() for i in range(2))
        self._done = 0

    def score(self) -> Tensor:
        """Row 2; returns the pages' logits."""
        self._done = max(self._done, 1)
        hsa.score_pages(
            self.batch,
            self.arena.view(-1),
            self.table,
            self.scratch,
            scaling=self.model.head_dim**-0.5,
            new_keys=self.new[0],
            new_values=self.new[1],
        )
        return self.scratch.scores[:, :, : self.num_pages]

    def select(self) -> Tensor:
        """Row 3; returns the shares of the tokens chosen beside the newest, falling."""
        if self._done < 1:
            self.score()
        self._done = 2
        hsa.select_tokens(self.table, self.scratch)
        return self.scratch.tokens

    def attend(self) -> Tensor:
        """Row 4; returns the output."""
        if self._done < 2:
            self.select()
        hsa.attend_selected(
            self.batch,
            self.arena.view(-1),
            self.table,
            self.scratch,
            scaling=self.scaling,
            output=self.output,
        )
        return self.output.flatten(0, 1)

    def whole(self) -> Tensor:
        """All three; returns the output."""
        self.score()
        self.select()
        return self.attend()

    def expected_logits(self) -> Tensor:
        return page_logits(
            self.queries, self.highest, self.lowest, self.num_pages, self.size.num_channels
        ) / math.log(2)

    def expected_output(self) -> Tensor:
        """Exact attention to the rows that the kernel chose; the choice is compared, too."""
        chosen = self.scratch.tokens.long()
        at = torch.arange(self.num_heads, device=chosen.device)[:, None]
        shares = (self.expected_logits() * math.log(2)).softmax(-1).mean(1)
        check_selection(shares, chosen, length=self.size.length, page_size=self.size.page_size)
        keys, values = self.rows[at, 0, chosen], self.rows[at, 1, chosen]
        shape = self.batch.shape[0], -1, *keys.shape[1:]
        attended = [
            attend_all(queries, *rows, self.scaling)
            for queries, *rows in zip(self.batch, keys.view(shape), values.view(shape), strict=True)
        ]
        return torch.cat(attended)

    def shares_chosen(self) -> Tensor:
        """Of the tokens chosen beside the newest: each one's share by the kernel's own logits, falling."""
        shares = self._token_shares().gather(1, self.scratch.tokens[:, :-1].long())
        return shares.sort(descending=True).values

    def shares_best(self) -> Tensor:
        """The largest of those that could be chosen beside the newest."""
        return self._token_shares().topk(self.scratch.tokens.shape[1] - 1, dim=1).values

    def _token_shares(self) -> Tensor:
        shares = (self.scratch.scores[:, :, : self.num_pages] * math.log(2)).softmax(-1).mean(1)
        return shares.repeat_interleave(self.size.page_size, 1)[:, : self.size.length - 1]


def hsa_cases(
    model: Model, size: HsaSize, *, device: Device, seed: int,
    targets: tuple[float | None, float | None], targets_us: tuple[float, float, float] | None = None,
) -> list[Case]:  # fmt: skip
    """Rows 2, 3 and 4, and the three together.

    Args: targets: of rows 2 and 4; targets_us: of rows 2, 3, and of all together.
    """
    inputs = HsaInputs(model, size, device, seed)
    element, heads = inputs.arena.element_size(), inputs.num_heads
    channels_read = size.num_channels if size.page_size > 1 else model.head_dim
    score_bytes = heads * element * inputs.num_pages * channels_read
    select_bytes = 4 * heads * (model.group_size * inputs.num_pages + size.num_tokens)
    attend_bytes = heads * element * 2 * min(size.num_tokens, size.length) * model.head_dim
    tolerance = tolerance_of(model.dtype)
    score_kernel = _score_rows_kernel if size.page_size == 1 else _score_pages_kernel
    us = targets_us or (None, None, None)

    def selected() -> Tensor:
        inputs.select()
        return inputs.shares_chosen()

    def case(
        row: int, kernel: str, launch: Callable[[], Tensor], expected: Callable[[], Tensor], num_bytes: int,
        kernels: tuple[Any, ...], target: float | None, target_us: float | None,
        checked: Callable[[], Tensor] | None = None,
    ) -> Case:  # fmt: skip
        return Case(
            row=row, kernel=kernel, model=model.name, shape=str(size), num_bytes=num_bytes, launch=launch,
            checked=checked, expected=expected, tolerance=tolerance, kernels=kernels, target=target,
            target_us=target_us, special="cap, sinks" if size.is_special else "",
        )  # fmt: skip

    return [
        case(2, "hsa_score", inputs.score, inputs.expected_logits, score_bytes,
             (score_kernel,), targets[0], us[0]),
        case(3, "hsa_select", inputs.select, inputs.shares_best, select_bytes,
             (_select_tokens_kernel,), None, us[1], checked=selected),
        case(4, "hsa_attend", inputs.attend, inputs.expected_output, attend_bytes,
             (_gather_attend_kernel,), targets[1], None),
        case(4, "hsa", inputs.whole, inputs.expected_output, score_bytes + attend_bytes,
             (score_kernel, _select_tokens_kernel, _gather_attend_kernel), None, us[2]),
    ]  # fmt: skip


def page_extremes(keys: Tensor, page_size: int, num_pages: int) -> tuple[Tensor, Tensor]:
    """Kmax and Kmin of `[H, n, D]`, float32 `[H, num_pages, D]`; infinite in pages without a row."""
    num_heads, length, head_dim = keys.shape
    filled = keys.new_full((num_heads, num_pages * page_size, head_dim), -torch.inf, dtype=torch.float32)
    filled[:, :length] = keys.float()
    highest = filled.view(num_heads, num_pages, page_size, head_dim).amax(2)
    filled[:, length:] = torch.inf
    return highest, filled.view(num_heads, num_pages, page_size, head_dim).amin(2)


def page_logits(
    queries: Tensor, highest: Tensor, lowest: Tensor, num_pages: int, num_channels: int
) -> Tensor:
    """Natural logits of pages, float32 `[H, G, num_pages]`; see RocketKV's Algorithm 1."""
    q = queries.float()
    head_dim = q.shape[2]
    channels = q.abs().sum(1).sort(dim=-1, descending=True, stable=True).indices[:, :num_channels]
    kept = torch.zeros_like(q[:, 0]).scatter_(1, channels, 1.0)[:, None]
    estimate = torch.where(q.sum(1, keepdim=True) >= 0, highest[:, :num_pages], lowest[:, :num_pages])
    temperature = (head_dim * (q * kept).abs().sum(-1) / q.abs().sum(-1)).sqrt()[..., None]
    return ((q * kept) @ estimate.mT) / temperature


def check_selection(scores: Tensor, chosen: Tensor, *, length: int, page_size: int) -> None:
    """Raises AssertionError where a page left out scores clearly higher than one taken."""
    pages = chosen[:, :-1] // page_size
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, pages, True)
    if (length - 1) % page_size == 0:
        scores, inside = (
            scores[:, :-1],
            inside[:, :-1],
        )  # a page of the newest token alone, which is always in
    lowest_in = torch.where(inside, scores, torch.inf).amin(1)
    highest_out = torch.where(inside, -torch.inf, scores).amax(1)
    assert bool((chosen[:, -1] == length - 1).all()), "the newest token is not the last one chosen"
    assert bool((highest_out <= lowest_in * (1 + 2e-2) + 1e-7).all()), "a better page was left out"
