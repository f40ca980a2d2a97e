"""What the formats of quantised, pruned and ragged rows share: attention reads the prompt as it is stored.

Each tensor of the prompt has a region of the arena; new tokens are plain rows after it. Attention is dense.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kvferry.shared.compression.formats.interface import (
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Sizing,
    Specs,
    Tensors,
    on_host,
)
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import MEASURED_ALLOCATIONS, Budget, CompressionPlan, LayerPlan, Part
from kvferry.shared.errors import InvalidRequest

_PROMPT = "prompt_"
"""Prefix of the regions that hold the prompt's tensors."""


class StoredPrompt(Protocol):
    """One layer's compressed prompt, which can be attended directly."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Contiguous tensors with the names, shapes and dtypes of `LayerFormat.tensors`."""
        ...

    def check(self, num_tokens: int) -> None:
        """Check the content of received tensors.

        Args: num_tokens: T.
        Raises: InvalidTensors: content that compression cannot have made.
        """
        ...

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor, *, scaling: float) -> Tensor:
        """Attention of one token to the prompt and the new rows.

        Args: queries: `[H_kv, G, D]`; new_keys, new_values: `[H_kv, m, D]`.
        Returns: `[H_kv, G, D]`.
        """
        ...


class StoredFormat(LayerFormat):
    """A format whose tensor sizes are known from the plan, with dense attention."""

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        """See `LayerFormat.check`. Without a scorer every row is stored, and a budget is refused."""
        name = plan.representation.name
        cls._params(plan.representation)
        if plan.attention.name != "dense":
            raise InvalidRequest(
                f"representation {name!r} does not go with attention {plan.attention.name!r}; it takes "
                "'dense' only",
                param="kv_compression",
            )
        if plan.layer_allocation.name in MEASURED_ALLOCATIONS:
            raise InvalidRequest(
                f"representation {name!r} does not go with layer_allocation {plan.layer_allocation.name!r}; "
                "its sizes must be known before the prompt is run",
                param="kv_compression",
            )
        if plan.scorer is None and plan.budget != Budget():
            raise InvalidRequest(
                f"method {plan.method!r} keeps every token and takes no budget; the size of representation "
                f"{name!r} follows from its parameters",
                param="kv_compression",
            )

    @classmethod
    @abstractmethod
    def _params(cls, part: Part) -> object:
        """The part's parameters, checked. Raises: InvalidRequest: one is missing, unknown or out of range."""

    @classmethod
    @abstractmethod
    def rows_within(cls, part: Part, budget_rows: int, *, num_tokens: int, head_dim: int) -> int:
        """The most rows, at most T, that fit in the bytes of `budget_rows` plain rows of 16-bit values.

        Scales and channel numbers count; positions do not, on either side.
        """

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        if sizing.rows == sizing.num_prompt_tokens:
            return LayerPlan(rows=sizing.rows)
        within = cls.rows_within(
            plan.representation, sizing.rows, num_tokens=sizing.num_prompt_tokens, head_dim=sizing.head_dim
        )
        return LayerPlan(rows=max(within, 1), representation=plan.representation)

    @classmethod
    def plan_whole(cls, plan: CompressionPlan, num_prompt_tokens: int) -> LayerPlan:
        if plan.scorer is not None:
            return LayerPlan(rows=num_prompt_tokens)
        return LayerPlan(rows=num_prompt_tokens, representation=plan.representation)

    @abstractmethod
    def store(self, inputs: LayerInputs, scores: Tensor | None) -> StoredPrompt:
        """As `LayerFormat.compress`, but returns the prompt as an object."""

    @abstractmethod
    def prompt(self, tensors: Tensors) -> StoredPrompt:
        """The prompt whose tensors these are; nothing is copied."""

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        return self.store(inputs, scores).tensors

    def regions(self) -> Specs:
        rows = self.shape.row_spec(self.shape.num_new_rows)
        prompt = {_PROMPT + name: its for name, its in self.tensors().items()}
        return {**prompt, "keys": rows, "values": rows}

    def _receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        return {name: regions[_PROMPT + name] for name in header}

    def open(self, regions: Tensors, tensors: Tensors) -> LayerCache:
        prompt = self.prompt(tensors)
        prompt.check(self.shape.num_prompt_tokens)
        return StoredCache(self, regions, prompt)

    def used_bytes(self, num_appended: int, prompt_bytes: int | None = None) -> int:
        return self._prompt_bytes + 2 * self.shape.row_spec(num_appended).size_bytes

    def kept_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.used_bytes(0)

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        return self._prompt_bytes

    def naive(self, tensors: Tensors) -> NaiveLayer:
        return NaiveStored(self.prompt(tensors))

    @property
    def _prompt_bytes(self) -> int:
        return sum(its.size_bytes for its in self.tensors().values())


class StoredCache(LayerCache):
    """A stored prompt in the arena, and rows `[H_kv, cap, D]` of new tokens."""

    def __init__(self, fmt: StoredFormat, regions: Tensors, prompt: StoredPrompt) -> None:
        super().__init__(fmt, regions)
        self.prompt = prompt
        self.keys, self.values = regions["keys"], regions["values"]

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: float
    ) -> Tensor:
        self.keys[:, num_appended] = key
        self.values[:, num_appended] = value
        length = num_appended + 1
        return self.prompt.attend(queries, self.keys[:, :length], self.values[:, :length], scaling=scaling)

    def generated_rows(self, num_appended: int) -> tuple[Tensor, Tensor]:
        return on_host(self.keys[:, :num_appended]), on_host(self.values[:, :num_appended])


class NaiveStored(NaiveLayer):
    """The stored prompt, and the new rows by concatenation."""

    def __init__(self, prompt: StoredPrompt) -> None:
        self._prompt = prompt
        self._rows: tuple[Tensor, Tensor] | None = None

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: float, dense: bool = False
    ) -> Tensor:
        new = (key[:, None], value[:, None])
        self._rows = new if self._rows is None else _joined(self._rows, new)
        return self._prompt.attend(queries, *self._rows, scaling=scaling)

    def fork(self) -> NaiveStored:
        return copy.copy(self)


def _joined(rows: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([rows[0], new[0]], 1), torch.cat([rows[1], new[1]], 1)
