"""The first tokens of a completion, which prefill draws from the full KV: one, or a draft's and one more.

logits ──draw──► token ──► told at once ──► run by the draft ──► logits ──► ...
                   └── ends the completion, or is the draft's last: decode goes on from it
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvferry.shared.model.ending import Ending
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.sampling.sampler import SequenceSampler


class Opening:
    """Draws as decode would, which continues in the same way.

    Attributes:
        tokens: so far.
        tell: called with each.

    Args: most: tokens of a draft at most; the completion has at least one more.
    """

    def __init__(self, sampler: SequenceSampler, ending: Ending, *, most: int) -> None:
        self.tokens: list[SampledToken] = []
        self.tell: Callable[[SampledToken], None] = lambda token: None
        self._sampler = sampler
        self._ending = ending
        self._most = most

    def draw(self, logits: Tensor) -> int | None:
        """Draw a token. Returns its id if another one is to be drawn after it, else None.

        Args: logits: float32 `[V]`. Raises: KvferryError: as `SequenceSampler.sample`.
        """
        token = self._sampler.sample(logits)
        self.tokens.append(token)
        self.tell(token)
        is_last = self._ending.stops(token.token_id) or len(self.tokens) > self._most
        return None if is_last else token.token_id
