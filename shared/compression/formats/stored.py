"""What the formats of quantised, pruned and ragged rows share: attention reads the prompt as it is stored.

Each tensor of the prompt has a region of the arena; new tokens are plain rows after it. Attention is dense.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.softmax import Scaling, plain
from kvferry.shared.compression.formats.interface import (
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Specs,
    Tensors,
    on_host,
)
from kvferry.shared.compression.interface import Sizing
from kvferry.shared.compression.plan import Budget, CompressionPlan, LayerPlan, Part
from kvferry.shared.errors import InvalidRequest

_PROMPT = "prompt_"
"""Prefix of the regions of the prompt's tensors."""
PromptAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(queries `[H_kv, G, D]`, new keys, new values `[H_kv, m, D]`, scaling) -> `[H_kv, G, D]`, over the prompt
and the new rows."""


class StoredFormat(LayerFormat):
    """A format whose tensor sizes are known from the plan, with dense attention."""

    attentions: ClassVar[tuple[str, ...] | None] = ("dense",)
    takes_measured: ClassVar[bool] = False
    compacts: ClassVar[bool] = True

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        """See `LayerFormat.check`. Without a scorer every row is stored, and a budget is refused."""
        super().check(plan)
        if plan.scorer is None and plan.budget != Budget():
            raise InvalidRequest(
                f"method {plan.method!r} keeps every token and takes no budget; the size of format "
                f"{plan.representation.name!r} follows from its parameters",
                param="kv_compression",
            )

    @classmethod
    @abstractmethod
    def rows_within(
        cls, part: Part, budget_rows: int, *, num_tokens: int, head_dim: int, latent_dim: int = 0
    ) -> int:
        """The most rows, at most T, that fit in the bytes of `budget_rows` plain rows of 16-bit values.

        Scales and channel numbers count; positions do not, on either side.
        """

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        if sizing.rows == sizing.num_prompt_tokens:
            return LayerPlan(rows=sizing.rows)
        within = cls.rows_within(
            plan.representation,
            sizing.rows,
            num_tokens=sizing.num_prompt_tokens,
            head_dim=sizing.head_dim,
            latent_dim=sizing.latent_dim,
        )
        return LayerPlan(rows=max(within, 1), representation=plan.representation)

    @classmethod
    def plan_whole(cls, plan: CompressionPlan, num_prompt_tokens: int) -> LayerPlan:
        if plan.scorer is not None:
            return LayerPlan(rows=num_prompt_tokens)
        return LayerPlan(rows=num_prompt_tokens, representation=plan.representation)

    @abstractmethod
    def check_content(self, tensors: Tensors) -> None:
        """Check received tensors. Raises: InvalidTensors: content that `compress` cannot have made."""

    @abstractmethod
    def attention(self, tensors: Tensors) -> PromptAttention:
        """Attention to the prompt that these tensors are; nothing is copied."""

    def batched(self, prompt: Tensors, keys: Tensor, values: Tensor, *, length: int) -> CachedRows | None:
        """The layer as an argument of a batched kernel; None if it must run alone.

        Args: prompt: the prompt's tensors; keys, values: rows `[H_kv, cap, D]` of new tokens, `length` in
            use.
        """
        return None

    def regions(self) -> Specs:
        prompt = {_PROMPT + name: its for name, its in self.tensors().items()}
        return {**prompt, **self.shape.row_specs(self.shape.num_new_rows)}

    def _receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        return {name: regions[_PROMPT + name] for name in header}

    def open(self, regions: Tensors, tensors: Tensors) -> LayerCache:
        self.check_content(tensors)
        return StoredCache(self, regions)

    def used_bytes(self, num_appended: int, prompt_bytes: int | None = None) -> int:
        return self.read_bytes() + self.shape.rows_bytes(num_appended)

    def kept_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.read_bytes()

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        return sum(its.size_bytes for its in self.tensors().values())

    def naive(self, tensors: Tensors) -> NaiveLayer:
        return NaiveStored(self.attention(tensors))


class StoredCache(LayerCache):
    """A stored prompt in the arena, and rows `[H_kv, cap, D]` of new tokens.

    Attributes:
        prompt: the prompt's tensors.
    """

    format: StoredFormat

    def __init__(self, fmt: StoredFormat, regions: Tensors) -> None:
        super().__init__(fmt, regions)
        self.bind()

    def bind(self) -> None:
        self.keys, self.values = self.format.shape.rows_of(self.regions)
        self.prompt = {name: self.regions[_PROMPT + name] for name in self.format.tensors()}
        self._attend = self.format.attention(self.prompt)

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        self.keys[:, num_appended] = key
        self.values[:, num_appended] = value
        length = num_appended + 1
        return self._attend(queries, self.keys[:, :length], self.values[:, :length], plain(scaling))

    def batched(self, num_appended: int) -> CachedRows | None:
        if num_appended >= self.keys.shape[1]:
            return None  # no room: `append_and_attend` then fails for this sequence only
        return self.format.batched(self.prompt, self.keys, self.values, length=num_appended)

    def new_rows(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def generated_rows(self, num_appended: int) -> tuple[Tensor, Tensor]:
        return on_host(self.keys[:, :num_appended]), on_host(self.values[:, :num_appended])


class NaiveStored(NaiveLayer):
    """The stored prompt, and the new rows by concatenation."""

    def __init__(self, attend: PromptAttention) -> None:
        self._attend = attend
        self._rows: tuple[tuple[Tensor, Tensor], ...] = ()

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        self._rows += ((key, value),)
        keys, values = (torch.stack(its, 1) for its in zip(*self._rows, strict=True))
        return self._attend(queries, keys, values, plain(scaling))

    def replace_new_rows(self, keys: Tensor, values: Tensor) -> None:
        self._rows = tuple(zip(keys.unbind(1), values.unbind(1), strict=True))
