"""What the formats of quantised, pruned and ragged rows share: attention reads the prompt as it is stored.

Each tensor of the prompt has a region of the arena; new tokens are plain rows after it. Attention is dense.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.softmax import Scaling, plain
from kvferry.shared.compression.formats.interface import LayerCache, LayerFormat, NaiveLayer, Specs, Tensors
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
    def rows_within(cls, part: Part, sizing: Sizing) -> int:
        """Return the most rows, at most T, that fit in the bytes of `sizing.rows` plain 16-bit rows.

        Scales and channel numbers count; positions do not, on either side.
        """

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        if sizing.rows == sizing.num_prompt_tokens:
            return LayerPlan(rows=sizing.rows)
        within = cls.rows_within(plan.representation, sizing)
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
        """Return the attention to the prompt that these tensors are; nothing is copied."""

    def batched(self, prompt: Tensors, keys: Tensor, values: Tensor, *, length: int) -> CachedRows | None:
        """Return the layer as an argument of a batched kernel; None if it must run alone.

        Args:
            prompt: the prompt's tensors.
            keys, values: rows `[H_kv, cap, D]` of new tokens, `length` of them in use.
        """
        return None

    def placed(self, num_new: int) -> Specs:
        prompt = {_PROMPT + name: spec for name, spec in self.tensors().items()}
        return {**prompt, **self.shape.row_specs(num_new)}

    def _receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        return {name: regions[_PROMPT + name] for name in header}

    def open(self, regions: Tensors, tensors: Tensors) -> LayerCache:
        self.check_content(tensors)
        return StoredCache(self, regions)

    def kept_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.used_bytes(0)

    def naive(self, tensors: Tensors) -> NaiveLayer:
        return NaiveStored(self.attention(tensors))


class StoredCache(LayerCache):
    """A stored prompt in the arena, and rows `[H_kv, cap, D]` of new tokens.

    Attributes:
        prompt: the prompt's tensors.
    """

    format: StoredFormat

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


class NaiveStored(NaiveLayer):
    """The stored prompt, and the new rows by concatenation."""

    def __init__(self, attend: PromptAttention) -> None:
        self._attend = attend

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        return self._attend(queries, *self.appended(key, value), plain(scaling))
