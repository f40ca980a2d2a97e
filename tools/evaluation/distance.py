"""A model in which tokens from one position on are as far from those before as if there were more between.

The runner uses it for `--gap`, which measures what distance alone costs.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.shared.model.bridge import AttentionPass, TransformersModel
from kvferry.shared.model.interface import LayerStates


class DistantModel(TransformersModel):
    """A model over another one's modules. Positions are skipped in its passes alone."""

    def __init__(self, model: TransformersModel) -> None:
        vars(self).update(vars(model))
        self._own_fused = self._fused
        self._skipped = (0, 0)

    def skip_positions(self, first: int, number: int) -> None:
        """Rotate tokens from position `first` on, in later passes, as if they were `number` positions
        later."""
        self._skipped = (first, number)
        self._fused = None if number else self._own_fused  # it does not call `run`

    def run(
        self, token_ids: Tensor, positions: Tensor, current: AttentionPass, states: LayerStates | None = None
    ) -> Tensor:
        """See `TransformersModel.run`."""
        first, number = self._skipped
        return super().run(token_ids, positions + number * (positions >= first), current, states)
