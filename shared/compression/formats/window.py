"""Window: the last rows of a layer that attends to a window of tokens; exact, whatever the method.

    sliding   W 4, T 6:   prompt . . . ■ ■ ■   the first new token attends to the last 3 rows and its own
    chunked   W 4, T 6:   prompt . . . . ■ ■   it attends to the rows of its chunk and its own

New rows are appended behind those of the prompt; attention reads the last ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvferry.kernels.decode_batch import WindowRows
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Specs,
    Tensors,
    on_host,
)
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import (
    WINDOW_FORMAT,
    Allowed,
    Between,
    CompressionPlan,
    LayerPlan,
    Part,
)
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import LayerSpec


@dataclass(frozen=True, kw_only=True)
class Window(LayerFormat):
    """K and V `[H_kv, n, D]` of the prompt's last n tokens.

    Attributes:
        window, is_chunked: as of `LayerSpec`.
    """

    name: ClassVar[str] = WINDOW_FORMAT
    heads_apart: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, str]] = {"index": "index", "keys": "rows", "values": "rows"}
    is_plain: ClassVar[bool] = True
    allowed: ClassVar[Allowed] = {"window": Between(1, 1 << 31), "is_chunked": bool}
    scored: ClassVar[bool | None] = False
    window: int
    is_chunked: bool

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        raise InvalidRequest(
            f"format {cls.name!r} belongs to layers in which the model has a window; no method can name it",
            param="kv_compression",
        )

    @classmethod
    def plan_window(cls, layer: LayerSpec, num_prompt_tokens: int) -> LayerPlan:
        """The plan of a layer with a window."""
        part = Part(name=cls.name, params={"window": layer.window, "is_chunked": layer.is_chunked})
        return LayerPlan(rows=layer.num_needed(num_prompt_tokens), representation=part)

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(window=self.window, is_chunked=self.is_chunked)

    def first_row(self, num_appended: int) -> int:
        """The first row, of the prompt's and the new ones, that a new token attends to."""
        num_tokens = self.shape.num_prompt_tokens
        return max(0, self.layer.first_visible(num_tokens + num_appended) - (num_tokens - self.rows))

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        index = self._index().expand(self.shape.num_kv_heads, -1).contiguous()
        return {
            **({"index": index.to(inputs.keys.device)} if self.shape.index_spec(self.rows) else {}),
            **self.shape.row_tensors(inputs.keys[:, -self.rows :], inputs.values[:, -self.rows :]),
        }

    def _index(self) -> Tensor:
        """The positions of the prompt's rows, int32 `[n]`."""
        num_tokens = self.shape.num_prompt_tokens
        return torch.arange(num_tokens - self.rows, num_tokens, dtype=torch.int32)

    def tensors(self) -> Specs:
        return {**self.shape.index_spec(self.rows), **self.shape.row_specs(self.rows)}

    def regions(self) -> Specs:
        return self.shape.row_specs(self.rows + self.shape.num_new_rows)

    def open(self, regions: Tensors, tensors: Tensors) -> WindowCache:
        index = tensors.get("index")
        if index is not None and not bool((index.cpu() == self._index()).all()):
            raise InvalidTensors(
                f"the positions of a layer with a window must be the last {self.rows} of "
                f"{self.shape.num_prompt_tokens} tokens",
                reason="index",
            )
        return WindowCache(self, regions, positions=None if index is None else index.cpu().numpy())

    def used_bytes(self, num_appended: int, prompt_bytes: int | None = None) -> int:
        return self.shape.rows_bytes(self.rows + num_appended)

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.shape.rows_bytes(self.rows)

    def naive(self, tensors: Tensors) -> NaiveWindow:
        return NaiveWindow(self, *self.shape.rows_of(tensors))


class WindowCache(LayerCache):
    """A layer with a window in the arena; `positions` as of `LayerCache`."""

    format: Window

    def __init__(self, fmt: Window, regions: Tensors, *, positions: npt.NDArray[np.int32] | None) -> None:
        super().__init__(fmt, regions)
        self.positions = positions

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        (keys, values), last = self.format.shape.rows_of(self.regions), self.format.rows + num_appended
        keys[:, last], values[:, last] = key, value
        seen = slice(self.format.first_row(num_appended), last + 1)
        return dense_decode(queries, keys[:, seen], values[:, seen], scaling=scaling)

    def batched(self, num_appended: int) -> WindowRows | None:
        fmt, length = self.format, self.format.rows + num_appended
        keys, values = fmt.shape.rows_of(self.regions)
        if length >= keys.shape[1] or fmt.shape.latent_dim:
            return None
        before = fmt.shape.num_prompt_tokens - fmt.rows if fmt.is_chunked else None
        return WindowRows(keys=keys, values=values, length=length, window=fmt.window, rows_before=before)

    def generated_rows(self, num_appended: int) -> tuple[Tensor, Tensor]:
        new = slice(self.format.rows, self.format.rows + num_appended)
        keys, values = self.format.shape.rows_of(self.regions)
        return on_host(keys[:, new]), on_host(values[:, new])


class NaiveWindow(NaiveLayer):
    """K and V by concatenation, and the position of the last row."""

    def __init__(self, fmt: Window, keys: Tensor, values: Tensor) -> None:
        self._layer = fmt.layer
        self._keys, self._values = keys, values
        self._position = fmt.shape.num_prompt_tokens - 1

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        self._keys = torch.cat([self._keys, key[:, None]], 1)
        self._values = torch.cat([self._values, value[:, None]], 1)
        self._position += 1
        last = torch.tensor(self._position, device=key.device)
        positions = last - torch.arange(self._keys.shape[1], device=key.device).flip(0)
        seen = self._layer.visible(last, positions)
        return dense_decode(queries, self._keys[:, seen], self._values[:, seen], scaling=scaling)

    def fork(self) -> NaiveWindow:
        return copy.copy(self)
