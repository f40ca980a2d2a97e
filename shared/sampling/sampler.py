"""Draws tokens from logits as a completion's `SamplingParams` say.

Prefill draws the first token with it, decode all others. One instance per completion and process; results
depend on parameters, token ids and logits alone, so a replay elsewhere draws the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.sampling.params import SampledToken, SamplingParams


class SequenceSampler:
    """The sampling state of one completion. Not thread-safe.

    For each token, in this order:

    1. logprobs are taken from log_softmax of the raw logits;
    2. `logit_bias` is added;
    3. repetition penalty over prompt and completion: positive logits are divided by it, others multiplied;
    4. presence and frequency penalties over the completion: minus presence * [count > 0], minus
       frequency * count;
    5. temperature 0 takes the argmax here, the lowest index among equals; else logits / temperature;
    6. `top_k` keeps the k most likely; 7. `top_p` keeps, of what is left, the most likely tokens until their
       probabilities reach top_p, the one that reaches it included, so at least one; 8. `min_p` keeps what is
       at least min_p times as likely as the most likely token. The lowest index wins ties throughout;
    9. the token is drawn by the inverse of the cumulative distribution over token ids, in float64, at a
       uniform number that is a hash of (seed, token index).

    Args:
        prompt_token_ids: all of the prompt, history included. Its last `params.first_index` tokens count as
            completion tokens.
        vocab_size: V.

    Raises:
        InvalidRequest: a prompt token or a `logit_bias` id is outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._next_index = params.first_index
        self._check_ids(prompt_token_ids, "a prompt token", "prompt")
        self._check_ids(params.logit_bias, "a logit_bias key", "logit_bias")
        self._bias = _bias(params.logit_bias, vocab_size) if params.logit_bias else None
        self._seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(list(prompt_token_ids), dtype=torch.int64)] = True
        self._counts: Tensor | None = None
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            delivered = prompt_token_ids[max(len(prompt_token_ids) - params.first_index, 0) :]
            ids = torch.tensor(list(delivered), dtype=torch.int64)
            self._counts = torch.bincount(ids, minlength=vocab_size).to(torch.float64)

    def sample(self, logits: Tensor) -> SampledToken:
        """Draw the next token and record it.

        Args: logits `[V]`, float32, any device; left as they are.

        Raises:
            KvferryError: the logits hold NaN or +inf, or nothing above -inf (reason `invalid_logits`).
        """
        if logits.shape != (self._vocab_size,):
            raise KvferryError(f"logits are {tuple(logits.shape)}; they must be ({self._vocab_size},)")
        raw = logits.detach().to("cpu", torch.float64)
        if not raw.max().isfinite():
            raise KvferryError(
                f"the model's logits for token {self._next_index} have maximum {float(raw.max())}; it must "
                "be finite",
                reason="invalid_logits",
            )
        token_id = self._draw(self._penalised(raw))
        token = self._describe(token_id, raw)
        self.observe(token_id)
        return token

    def observe(self, token_id: int) -> None:
        """Record a completion token that was drawn elsewhere."""
        self._check_ids((token_id,), "a completion token", None)
        self._next_index += 1
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    def _penalised(self, raw: Tensor) -> Tensor:
        params, logits = self._params, raw
        if self._bias is not None:
            logits = logits + self._bias
        if self._seen is not None:
            penalty = params.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._seen, penalised, logits)
        if self._counts is not None:
            logits = logits - params.presence_penalty * (self._counts > 0)
            logits = logits - params.frequency_penalty * self._counts
        return logits

    def _draw(self, logits: Tensor) -> int:
        params = self._params
        if params.temperature == 0.0:
            return int(logits.argmax())
        # the maximum goes first, so that a tiny temperature cannot overflow
        weights = ((logits - logits.max()) / params.temperature).exp()
        weights = _truncated(weights, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        cumulative = weights.cumsum(0)
        target = _uniform(params.seed, self._next_index) * cumulative[-1]
        # right: the first id whose cumulative weight is above the target; ids of no weight are never that
        drawn = int(torch.searchsorted(cumulative, target, right=True))
        return min(drawn, int(weights.nonzero()[-1]))

    def _describe(self, token_id: int, raw: Tensor) -> SampledToken:
        count = self._params.logprobs
        if count is None:
            return SampledToken(token_id=token_id, index=self._next_index)
        logprobs = raw.log_softmax(0)
        best = _largest(logprobs, count)
        return SampledToken(
            token_id=token_id,
            index=self._next_index,
            logprob=float(logprobs[token_id]),
            top_logprobs=tuple((int(i), float(logprobs[i])) for i in best),
        )

    def _check_ids(self, token_ids: Sequence[int] | dict[int, float], what: str, param: str | None) -> None:
        if not token_ids:
            return
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"{what} is {token_id}; token ids are 0 to {self._vocab_size - 1}", param=param
                )


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on (seed, index) alone, on every machine."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8, person=b"kvferry-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _bias(logit_bias: dict[int, float], vocab_size: int) -> Tensor:
    bias = torch.zeros(vocab_size, dtype=torch.float64)
    bias[torch.tensor(list(logit_bias))] = torch.tensor(list(logit_bias.values()), dtype=torch.float64)
    return bias


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values, falling, the lowest index first among equals."""
    count = min(count, values.numel())
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    # topk alone leaves open which of several equals it takes
    candidates = (values >= values.topk(count).values[-1]).nonzero()[:, 0]
    return candidates[values[candidates].sort(descending=True, stable=True).indices[:count]]


def _truncated(weights: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Weights with those that top_k, top_p and min_p exclude set to zero; the largest always stays.

    Args: weights float64 `[V]`, not normalised.
    """
    if top_k > 0 or top_p < 1.0:
        order = _largest(weights, top_k or weights.numel())
        kept = weights[order]
        if top_p < 1.0:
            before = kept.cumsum(0) - kept
            inside = before < top_p * kept.sum()
            inside[0] = True
            order = order[inside]
        weights = torch.zeros_like(weights).index_put((order,), weights[order])
    if min_p > 0.0:
        weights = torch.where(weights >= min_p * weights.max(), weights, 0.0)
    return weights
