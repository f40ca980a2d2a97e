"""Compression of a prompt in several ranks: each compresses its own heads, and the lead gets what they made.

    every rank    K, V, queries of its heads ──► compress ──► sizes to all, bytes to the lead
    lead          the parts of all ranks ──► observer, which joins and ships them

K and V themselves stay in their rank, unless the session's history wants their new rows.
"""

from __future__ import annotations

import structlog
from torch import Tensor

from kvferry.shared.compression.formats import compress_layer, make_formats
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.interface import Division
from kvferry.shared.model.parallel.ranks import Ranks

_log = structlog.get_logger(__name__)


class PartCompressor:
    """Compresses one rank's heads of a prompt, layer by layer.

    A rank that cannot compress a layer says so to the others in place of the sizes, so that all go on
    together, and the lead raises the error.

    Attributes: with_rows: as of `Division`.
    Args: model: the rank's part.
    """

    def __init__(self, ranks: Ranks, model: TransformersModel, division: Division) -> None:
        self.with_rows = division.with_rows
        self._ranks = ranks
        self._model = model
        self._plan = division.plan
        self._formats = make_formats(model.spec, division.plan)
        self._error: Exception | None = None

    def compress(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensors | None:
        """This rank's part of a layer; None if there is an error.

        Args: queries `[h, G, T, D]`, keys and values `[h, S, D]`; see `LayerInputs`.
        """
        inputs = LayerInputs(
            layer=layer,
            queries=queries,
            keys=keys,
            values=values,
            scaling=scaling,
            unrotate=lambda rows: self._model.pre_rope_keys(layer, rows),
        )
        self._error = None
        try:
            return compress_layer(self._plan, self._formats[layer], inputs)
        except Exception as error:
            self._error = error
            if self._ranks.rank:  # the lead raises its own
                _log.warning("a rank cannot compress", rank=self._ranks.rank, layer=layer, exc_info=error)
            return None

    def gather(self, part: Tensors | None) -> list[Tensors] | None:
        """The parts of all ranks, of use in the lead; None if a rank has none."""
        found = self._ranks.gather_tensors(None if part is None else list(part.values()))
        return None if found is None else [dict(zip(part or {}, its, strict=True)) for its in found]

    def checked(self, layer: int, parts: list[Tensors] | None) -> list[Tensors]:
        """The parts. Raises: this rank's error, or another's."""
        if self._error is not None:
            raise self._error
        if parts is None:
            raise KvferryError(f"layer {layer} cannot be compressed in another rank", reason="packing")
        return parts


def compressor_of(ranks: Ranks, model: TransformersModel, division: Division | None) -> PartCompressor | None:
    """What compresses a rank's heads; None if they are not compressed apart."""
    return None if division is None else PartCompressor(ranks, model, division)
