"""Compression of a prompt in several ranks: each compresses its own heads, and ships them itself.

    every rank    K, V, queries of its heads ──► compress ──► observer in the lead, `PartTaker` in the others

K, V and what is made of them stay in their rank, unless the session's history wants the new tokens' K and V.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvferry.shared.compression.formats import encode_layer, make_formats
from kvferry.shared.compression.formats.interface import Encoded
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.interface import Division


class PartTaker(Protocol):
    """Takes what a rank other than the lead has compressed of its heads."""

    def take(self, layer: int, part: Encoded | Exception) -> None:
        """Called for each layer, in order, and again from the first one if the pass is run again. Raises
        nothing. Args: part: or why the layer cannot be compressed."""
        ...


class _NoTaker:
    def take(self, layer: int, part: Encoded | Exception) -> None:
        pass


NO_TAKER: PartTaker = _NoTaker()
"""For a pass of which nothing is wanted any more."""


class PartCompressor:
    """Compresses one rank's heads of a prompt, layer by layer.

    A rank that cannot compress a layer goes on with the pass, which the others run, too.

    Attributes: with_rows: as of `Division`.
    Args: model: the rank's part; taker: None in the lead.
    """

    def __init__(self, model: TransformersModel, division: Division, taker: PartTaker | None = None) -> None:
        self.with_rows = division.with_rows
        self._model = model
        self._plan = division.plan
        self._formats = make_formats(model.spec, division.plan)
        self._taker = taker

    def compress(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Encoded | Exception:
        """This rank's part of a layer, or why there is none.

        Args: queries `[h, G, T, D]`, keys and values `[h, S, D]`; see `LayerInputs`.
        """
        inputs = LayerInputs.of(self._model.pre_rope_keys, layer, queries, keys, values, scaling)
        try:
            return encode_layer(self._plan, self._formats[layer], inputs)
        except Exception as error:
            return error

    def give(self, layer: int, part: Encoded | Exception) -> None:
        """Give the part to its taker, if there is one."""
        if self._taker is not None:
            self._taker.take(layer, part)
