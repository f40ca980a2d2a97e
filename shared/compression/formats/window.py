"""Window: the last rows of a layer that attends to a window of tokens; exact, whatever the method.

    sliding   W 4, T 6:   prompt . . . ■ ■ ■   the first new token attends to the last 3 rows and its own
    chunked   W 4, T 6:   prompt . . . . ■ ■   it attends to the rows of its chunk and its own

New rows are appended behind those of the prompt; attention reads the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import WindowRows
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.attention import AttentionKind, Dense
from kvferry.shared.compression.formats.interface import InvalidTensors, Tensors
from kvferry.shared.compression.formats.rows import NaiveRows, Rows, RowsCache
from kvferry.shared.compression.interface import LayerInputs, LayerShape
from kvferry.shared.compression.plan import WINDOW_FORMAT, Allowed, Between, CompressionPlan, LayerPlan
from kvferry.shared.model.spec import LayerSpec


@dataclass(frozen=True, kw_only=True)
class Window(Rows):
    """K and V `[H_kv, n, D]` of the prompt's last n tokens.

    Attributes:
        window, is_chunked: as in `LayerSpec`.
    """

    name: ClassVar[str] = WINDOW_FORMAT
    allowed: ClassVar[Allowed] = {"window": Between(1, 1 << 31), "is_chunked": bool}
    scored: ClassVar[bool | None] = False
    compacts: ClassVar[bool] = False
    attention: AttentionKind = field(default_factory=Dense)
    window: int
    is_chunked: bool

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Window:
        return cls(shape=shape, rows=layer.rows, **cls.params(layer.representation))

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(window=self.window, is_chunked=self.is_chunked)

    def first_row(self, num_appended: int) -> int:
        """Return the first row, of the prompt's and the new ones, that a new token attends to."""
        num_tokens = self.shape.num_prompt_tokens
        return max(0, self.layer.first_visible(num_tokens + num_appended) - (num_tokens - self.rows))

    def selected(
        self, inputs: LayerInputs, scores: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        index = self._index().expand(self.shape.num_kv_heads, -1).contiguous()
        named = {"index": index.to(inputs.keys.device)} if self.shape.index_spec(self.rows) else {}
        return named, inputs.keys[:, -self.rows :], inputs.values[:, -self.rows :]

    def _index(self) -> Tensor:
        """Return the positions of the prompt's rows, int32 `[n]`."""
        num_tokens = self.shape.num_prompt_tokens
        return torch.arange(num_tokens - self.rows, num_tokens, dtype=torch.int32)

    def open(self, regions: Tensors, tensors: Tensors) -> WindowCache:
        index = tensors.get("index")
        if index is not None and not bool((index.cpu() == self._index()).all()):
            raise InvalidTensors(
                f"the positions of a layer with a window must be the last {self.rows} of "
                f"{self.shape.num_prompt_tokens} tokens",
                reason="index",
            )
        return WindowCache(self, regions, index)

    def naive(self, tensors: Tensors) -> NaiveWindow:
        return NaiveWindow(self, *self.shape.rows_of(tensors))


class WindowCache(RowsCache):
    """A layer with a window in the arena."""

    format: Window

    @property
    def name(self) -> str:
        return self.format.name

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        last = self.format.rows + num_appended
        self.keys[:, last], self.values[:, last] = key, value
        seen = slice(self.format.first_row(num_appended), last + 1)
        return dense_decode(queries, self.keys[:, seen], self.values[:, seen], scaling=scaling)

    def batched(self, num_appended: int) -> WindowRows | None:
        fmt, rows = self.format, super().batched(num_appended)
        if rows is None:
            return None
        before = fmt.shape.num_prompt_tokens - fmt.rows if fmt.is_chunked else None
        return WindowRows(
            keys=rows.keys, values=rows.values, length=rows.length, window=fmt.window, rows_before=before
        )


class NaiveWindow(NaiveRows):
    """The prompt's rows and the new ones, of which those in the window are attended."""

    _format: Window

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        keys, values = self._every_row(key, value)
        num_tokens = self._format.shape.num_prompt_tokens + len(self.new_rows)
        last = torch.tensor(num_tokens - 1, device=key.device)
        positions = last - torch.arange(keys.shape[1], device=key.device).flip(0)
        seen = self._format.layer.visible(last, positions)
        return dense_decode(queries, keys[:, seen], values[:, seen], scaling=scaling)
