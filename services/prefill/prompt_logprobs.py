"""The log-probabilities of a prompt's own tokens, from the logits of its pass.

Called by the model on the engine thread, after the last layer of a request that asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.shared.sampling.params import SampledToken


class PromptLogprobs:
    """Each token after the first with its log-probability given those before it.

    Args: count: how many alternatives each token gets.
    Attributes: tokens: so far.
    """

    def __init__(self, token_ids: Sequence[int], count: int) -> None:
        self.tokens: list[SampledToken] = []
        self._token_ids = token_ids
        self._count = count

    def add(self, first: int, logits: Tensor) -> None:
        """Args: logits `[t, V]` of the tokens at positions `first` and after; they predict the next ones."""
        following = self._token_ids[first + 1 : first + 1 + logits.shape[0]]
        logprobs = logits[: len(following)].to(torch.float64).log_softmax(-1)
        own = logprobs[range(len(following)), list(following)].tolist()
        values, ids = (its.tolist() for its in logprobs.topk(min(self._count, logprobs.shape[1])))
        for i, token_id in enumerate(following):
            self.tokens.append(
                SampledToken(
                    token_id=token_id,
                    index=first + 1 + i,
                    logprob=own[i],
                    top_logprobs=tuple(zip(ids[i], values[i], strict=True)),
                )
            )
