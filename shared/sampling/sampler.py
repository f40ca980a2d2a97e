"""Draws a completion's tokens from logits according to its `SamplingParams`.

Prefill draws the first token with a `SequenceSampler`. Decode draws the others with a `BatchSampler` on the
model's device and records them in the sequence's sampler. There is one `SequenceSampler` per completion and
process. Results depend only on parameters, token ids and logits, so a replay draws the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.sampling.masks import BatchMasks, Mask
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.sampling.truncation import truncated

if TYPE_CHECKING:
    from kvferry.shared.sampling.grammar import TokenMatcher

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
"""The parameters of a row without a completion."""

_LEAST_MOST = 64
"""Sorting this many weights takes no longer than sorting one."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """Which parts of sampling any completion of a batch needs; the others are skipped.

    Attributes:
        draws: a temperature above 0; truncates: top_k or top_p; penalises: a bias or a penalty.
        masks: there are tokens that may not come next.
        most: at least every top_k of the completions, 0 without any; one of few numbers, so that batches of
            other completions have the same.
        nuclei: a completion has top_p, and no top_k.
    """

    draws: bool
    truncates: bool
    penalises: bool
    masks: bool = False
    most: int = 0
    nuclei: bool = False

    @classmethod
    def of(cls, batch: Sequence[SamplingParams]) -> Flavour:
        drawn = [params for params in batch if params.temperature != 0.0]
        most = max([params.top_k for params in drawn], default=0)
        nuclei = any([params.top_k == 0 and params.top_p < 1.0 for params in drawn])
        return cls(
            draws=bool(drawn),
            truncates=bool(most) or nuclei,
            most=max(_LEAST_MOST, 1 << (most - 1).bit_length()) if most else 0,
            nuclei=nuclei,
            penalises=any(
                [
                    params.logit_bias
                    or params.repetition_penalty != 1.0
                    or params.presence_penalty != 0.0
                    or params.frequency_penalty != 0.0
                    for params in batch
                ]
            ),
        )


NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_numbers_of = attrgetter(*NUMBERS)


def numbers_of(batch: Sequence[SamplingParams]) -> Tensor:
    """Return the parameters used in the arithmetic: float64 `[len(NUMBERS), B]`, on the host."""
    return torch.tensor(list(map(_numbers_of, batch)), dtype=torch.float64).T.contiguous()


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """The state of a batch's penalties.

    Attributes: bias: float64 `[B, V]`; seen: bool `[B, V]`, ids in prompt and completion; counts: float64
    `[B, V]`, in the completion.
    """

    bias: Tensor
    seen: Tensor
    counts: Tensor

    @classmethod
    def zeros(cls, batch_size: int, vocab_size: int, device: torch.device | str) -> Penalties:
        bias, counts = torch.zeros(2, batch_size, vocab_size, dtype=torch.float64, device=device)
        return cls(bias=bias, seen=torch.zeros_like(bias, dtype=torch.bool), counts=counts)

    def first(self, count: int) -> Penalties:
        """View the first rows."""
        return Penalties(bias=self.bias[:count], seen=self.seen[:count], counts=self.counts[:count])

    def apply(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Do steps 2 to 4 of `SequenceSampler`. Args: logits float64 `[B, V]`; numbers: as `numbers_of`."""
        repetition, presence, frequency = numbers[4:, :, None]
        logits = logits + self.bias
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self.seen, penalised, logits)
        logits = logits - presence * (self.counts > 0)
        less_frequent: Tensor = logits - frequency * self.counts
        return less_frequent

    def observe(self, tokens: Tensor, active: Tensor) -> None:
        """Record a token of each row. Args: tokens, active: int64 `[B]`; active is 0 or 1."""
        self.counts.scatter_add_(1, tokens[:, None], active[:, None].to(torch.float64))
        here = self.seen.gather(1, tokens[:, None]) | (active[:, None] > 0)
        self.seen.scatter_(1, tokens[:, None], here)


def draw(logits: Tensor, numbers: Tensor, uniforms: Tensor, flavour: Flavour) -> Tensor:
    """Draw tokens by steps 5 to 9 of `SequenceSampler`.

    Args: logits float64 `[B, V]`, penalised; numbers: as `numbers_of`; uniforms float64 `[B]` in [0, 1).
    Returns: int64 `[B]`; any id for a row whose logits are not finite.
    """
    greedy = logits.argmax(1)
    if not flavour.draws:
        return greedy
    temperature, top_k, top_p, min_p = numbers[:4, :, None]
    # Subtracting the maximum first prevents an overflow with a very small temperature.
    relative = logits - logits.amax(1, keepdim=True)
    weights = (relative / torch.where(temperature > 0, temperature, 1.0)).exp()
    if flavour.truncates:
        weights = truncated(weights, top_k, top_p, most=flavour.most, nuclei=flavour.nuclei)
    weights = torch.where(weights >= min_p * weights.amax(1, keepdim=True), weights, 0.0)
    cumulative = weights.cumsum(1)
    target = uniforms[:, None] * cumulative[:, -1:]
    # right=True: the first id whose cumulative weight is above the target, so never one of weight 0.
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    ids = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(weights > 0, ids, 0).amax(1)
    return torch.where(temperature[:, 0] > 0, torch.minimum(drawn, last), greedy)


class SequenceSampler:
    """The sampling state of one completion. Not thread-safe.

    For each token, in this order:

    1. logprobs are the log_softmax of the raw logits;
    2. `logit_bias` is added;
    3. repetition penalty over prompt and completion: positive logits are divided by it, others multiplied;
    4. presence and frequency penalties over the completion: minus presence * [count > 0], minus
       frequency * count; then the ids that may not come next have no probability: those that the grammar does
       not allow, for `min_tokens` those that end the completion, all but the delivered one, and all but the
       one that ends a thought which has used up the thinking budget;
    5. temperature 0 takes the argmax now, the lowest index of equal ones; else logits / temperature;
    6. `top_k` selects the k most likely tokens;
    7. `top_p` selects, of these, the most likely ones until their probabilities reach top_p, including the
       one that reaches it, so at least one;
    8. `min_p` selects those at least min_p times as likely as the most likely token. The lowest index wins
       ties throughout;
    9. the token is drawn by inverting the cumulative distribution over token ids, in float64, at a uniform
       number that is a hash of (seed, token index).

    Attributes:
        params: the completion's parameters; flavour and numbers: theirs.
        next_index: index of the token to draw next.

    Args:
        prompt_token_ids: the whole prompt, including history. Its last `params.first_index` tokens count as
            completion tokens.
        vocab_size: V.
        eos_token_ids: those that end the completion, beside the parameters' own.
        matcher: at the beginning of the parameters' grammar, where they have one.

    Raises:
        InvalidRequest: a prompt token or a `logit_bias` id is outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int] = (),
        matcher: TokenMatcher | None = None,
    ) -> None:
        assert (matcher is None) == (params.grammar is None), "a grammar has a matcher"
        self.params = params
        self.next_index = params.first_index
        self._vocab_size = vocab_size
        self._check_ids(prompt_token_ids, "a prompt token", "prompt")
        if params.logit_bias:
            self._check_ids(params.logit_bias, "a logit_bias key", "logit_bias")
        if params.delivered:
            self._check_ids(params.delivered, "a delivered token", None)
        self.flavour = Flavour.of([params])
        self.numbers = numbers_of([params])
        self._penalties = self._first_penalties(prompt_token_ids) if self.flavour.penalises else None
        self._mask: Mask | None = None
        if params.thinking is not None:
            self._check_ids((params.thinking.open_id, params.thinking.end_id), "a thinking token", None)
        if params.grammar or params.thinking or params.min_tokens or params.delivered:
            self._mask = Mask(params, vocab_size, [*eos_token_ids, *params.stop_token_ids], matcher)
            for token_id in prompt_token_ids[len(prompt_token_ids) - params.first_index :]:
                self._mask.observe(token_id)

    @property
    def is_masked(self) -> bool:
        """Return whether some ids may not be the next token."""
        return self._mask is not None and self._mask.is_needed(self.next_index)

    def block(self, row: np.ndarray) -> None:
        """See `Mask.block`, of the next token."""
        assert self._mask is not None, "only what is masked is asked"
        self._mask.block(row, self.next_index)

    def sample(self, logits: Tensor) -> SampledToken:
        """Draw the next token and record it.

        Args: logits `[V]`, float32, any device; not changed.

        Raises:
            KvferryError: the logits contain NaN or +inf, or nothing above -inf (reason `invalid_logits`).
        """
        if logits.shape != (self._vocab_size,):
            raise KvferryError(f"logits are {tuple(logits.shape)}; they must be ({self._vocab_size},)")
        raw = logits.detach().to("cpu", torch.float64)
        if not raw.max().isfinite():
            raise self.refusal()
        wide = raw[None]
        if self._penalties is not None:
            wide = self._penalties.apply(wide, self.numbers)
        if self._mask is not None and self.is_masked:
            wide = wide + self._mask.blocked(self.next_index)
            if not wide.max().isfinite():
                raise self.refusal()
        uniforms = torch.tensor(self.uniforms(1, at=self.next_index), dtype=torch.float64)
        return self.accept(int(draw(wide, self.numbers, uniforms, self.flavour)), raw)

    def accept(self, token_id: int, logits: Tensor | None = None) -> SampledToken:
        """Record a token that was drawn for this completion, and return it with its logprobs.

        Args: logits `[V]` on the host that it was drawn from; only needed for logprobs.
        """
        token = SampledToken(token_id=token_id, index=self.next_index)
        count = self.params.logprobs
        if count is not None:
            assert logits is not None, "logprobs need logits"
            logprobs = logits.to(torch.float64).log_softmax(0)
            top = tuple((int(i), float(logprobs[i])) for i in _largest(logprobs, count))
            token = replace(token, logprob=float(logprobs[token_id]), top_logprobs=top)
        self.observe(token_id)
        return token

    def refusal(self) -> KvferryError:
        """Return the error to raise if no token can be drawn."""
        if self._mask is not None and self.params.grammar is not None:
            try:
                if self._mask.blocked(self.next_index).isinf().all():
                    return KvferryError(
                        f"the grammar allows no token at token {self.next_index}", reason="grammar_dead_end"
                    )
            except KvferryError as error:
                return error
        return KvferryError(
            f"the model's logits for token {self.next_index} have no finite maximum", reason="invalid_logits"
        )

    def uniforms(self, count: int, *, at: int) -> list[float]:
        """Return the uniform numbers in [0, 1) of `count` tokens from index `at` on."""
        return [_uniform(self.params.seed, at + i) for i in range(count)]

    def copy_penalties(self, target: Penalties, row: int) -> None:
        """Copy bias, seen ids and counts into one row of a batch's; zeros if there are no penalties."""
        for name in ("bias", "seen", "counts"):
            values = getattr(target, name)[row]
            if self._penalties is None:
                values.zero_()
            else:
                values.copy_(getattr(self._penalties, name)[0], non_blocking=True)

    def observe(self, token_id: int) -> None:
        """Record a completion token that was drawn elsewhere."""
        self._check_ids((token_id,), "a completion token", None)
        self.next_index += 1
        if self._mask is not None:
            self._mask.observe(token_id)
        if self._penalties is not None:
            self._penalties.seen[0, token_id] = True
            self._penalties.counts[0, token_id] += 1

    def _first_penalties(self, prompt_token_ids: Sequence[int]) -> Penalties:
        """Mark the prompt as seen and count the last tokens that a replay has already delivered."""
        penalties = Penalties.zeros(1, self._vocab_size, "cpu")
        for token_id, value in self.params.logit_bias.items():
            penalties.bias[0, token_id] = value
        prompt = torch.tensor(list(prompt_token_ids), dtype=torch.int64)
        penalties.seen[0, prompt] = True
        delivered = prompt[max(len(prompt) - self.params.first_index, 0) :]
        penalties.counts[0] = torch.bincount(delivered, minlength=self._vocab_size)
        return penalties

    def _check_ids(self, token_ids: Sequence[int] | dict[int, float], what: str, param: str | None) -> None:
        if not token_ids:
            return
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"{what} is {token_id}; token ids are 0 to {self._vocab_size - 1}", param=param
                )


def _uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) with 53 random bits that depends only on (seed, index), on every machine."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8, person=b"kvferry-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values, descending; equal values are ordered by index."""
    count = min(count, values.numel())
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    # topk alone does not define which of several equal values it takes.
    candidates = (values >= values.topk(count).values[-1]).nonzero()[:, 0]
    return candidates[values[candidates].sort(descending=True, stable=True).indices[:count]]


AHEAD_TOKENS = 64
"""The number of tokens whose uniform numbers are on the device at a time."""


class BatchSampler:
    """Sampling state of a batch's slots, in buffers with constant addresses. A slot is placed alone.

        __init__ ──► place, remove: one slot ──► refill ──► sample ──► refill ──► sample ──► ...

    Args: num_slots: B, the most; slots without a sequence draw greedily.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._size, self._device = (num_slots, vocab_size), device
        self._numbers = numbers_of([GREEDY] * num_slots).to(device)
        self._uniforms = torch.zeros(num_slots, AHEAD_TOKENS, dtype=torch.float64, device=device)
        self._next = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._penalties: Penalties | None = None
        self._masks: BatchMasks | None = None
        self._params: dict[int, SamplingParams] = {}
        self._flavour = Flavour.of([])
        self._drawing: dict[int, _Drawing] = {}

    @property
    def flavour(self) -> Flavour:
        """The parts of sampling that the placed sequences need."""
        return replace(self._flavour, masks=self.needs_tokens)

    @property
    def needs_tokens(self) -> bool:
        """Return whether a token must be known before the next one can be drawn."""
        return self._masks is not None and bool(self._masks.samplers)

    def place(self, slot: int, sampler: SequenceSampler) -> None:
        """Place a sequence in its current state."""
        self._params[slot] = sampler.params
        self._flavour = Flavour.of(list(self._params.values()))
        self._numbers[:, slot].copy_(sampler.numbers[:, 0], non_blocking=True)
        if sampler.flavour.penalises and self._penalties is None:
            self._penalties = Penalties.zeros(*self._size, self._device)
        if self._penalties is not None:
            sampler.copy_penalties(self._penalties, slot)
        if sampler.flavour.draws:
            self._drawing[slot] = _Drawing(sampler=sampler, next_index=sampler.next_index)
        if sampler.is_masked:
            if self._masks is None:
                self._masks = BatchMasks(*self._size, self._device)
            self._masks.samplers[slot] = sampler

    def remove(self, slot: int) -> None:
        """Empty a slot."""
        del self._params[slot]
        self._flavour = Flavour.of(list(self._params.values()))
        self._drawing.pop(slot, None)
        if self._masks is not None:
            self._masks.remove(slot)
        self._numbers[:, slot].copy_(numbers_of([GREEDY])[:, 0], non_blocking=True)

    def refill(self) -> None:
        """Provide what the next step needs: uniform numbers, and which tokens may come. Called on the host
        before every step."""
        for slot, drawing in self._drawing.items():
            if drawing.num_ahead == 0:
                ahead = drawing.sampler.uniforms(AHEAD_TOKENS, at=drawing.next_index)
                self._uniforms[slot].copy_(torch.tensor(ahead, dtype=torch.float64), non_blocking=True)
                self._next[slot].zero_()
                drawing.next_index += AHEAD_TOKENS
                drawing.num_ahead = AHEAD_TOKENS
            drawing.num_ahead -= 1
        if self._masks is not None:
            self._masks.refill()

    def sample(self, logits: Tensor, active: Tensor, flavour: Flavour) -> tuple[Tensor, Tensor]:
        """Draw a token for each of the first slots, and record those of active slots.

        Args:
            logits: float32 `[S, V]`; active: int64 `[S]`, 0 or 1.
            flavour: the parts of sampling that any of these slots may need.
        Returns: int64 `[S]`; bool `[S]`, whether a token can be drawn from the logits.
        """
        if flavour.masks:
            assert self._masks is not None, "a sequence was masked when the step was made"
            logits = self._masks.apply(logits)
        valid = logits.amax(1).isfinite()
        if not flavour.penalises and not flavour.draws:
            return logits.argmax(1), valid
        count = len(logits)
        wide, numbers = logits.to(torch.float64), self._numbers[:, :count]
        penalties = self._penalties.first(count) if self._penalties is not None else None
        if penalties is not None and flavour.penalises:
            wide = penalties.apply(wide, numbers)
        next_ = self._next[:count]
        uniforms = self._uniforms[:count].gather(1, next_[:, None])[:, 0]
        tokens = draw(wide, numbers, uniforms, flavour).clamp(0, logits.shape[1] - 1)
        next_.add_(active).remainder_(AHEAD_TOKENS)
        if penalties is not None and flavour.penalises:
            penalties.observe(tokens, active)
        return tokens, valid


@dataclass(kw_only=True)
class _Drawing:
    """A sequence that draws: the index of the next token without a uniform number, and how many have one."""

    sampler: SequenceSampler
    next_index: int
    num_ahead: int = 0
