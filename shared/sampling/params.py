"""Sampling parameters of one completion. The router validates them; prefill and decode both apply them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MAX_PROMPT_ALTERNATIVES = 20
"""The most alternatives for each token of a prompt whose log-probabilities are reported."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A constraint on a completion's text.

    Attributes: text: a JSON schema, a regular expression, a JSON list of texts, or a grammar in Lark's or
        GBNF's syntax ("lark" is certainly Lark's).
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "lark"]
    text: str


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """How long a completion may think.

    Attributes:
        max_tokens: of all its thoughts together, without the tokens around them; the next token then ends the
            thought.
        open_id, end_id: the tokens around a thought.
        is_open: whether the prompt has opened a thought.
    """

    max_tokens: int
    open_id: int
    end_id: int
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop.

    Attributes:
        max_tokens: N, at least 1; includes the first token, which prefill samples.
        temperature: 0 is greedy (the lowest index wins a tie).
        min_tokens: how many tokens come before an id or a text may end the completion.
        top_k: 0 is off.
        seed: a signed 64-bit integer; the router draws one if the client gives none, so a replay is exact.
        logprobs: how many alternatives to report per token; None reports no logprobs at all.
        stop: stop strings, searched in the completion's decoded text.
        stop_token_ids: ids that end the completion, in addition to the model's own.
        logit_bias: token id to additive bias.
        grammar: tokens that it does not allow are not drawn, and it decides where the completion may end.
        thinking: bounds the thoughts; not with a grammar.
        first_index: index of the first token to draw. It is above 0 when a request is replayed after losing a
            worker: the prompt's last `first_index` tokens are then completion tokens already delivered.
            Penalties, stop strings, the grammar and the thoughts treat them as such; `max_tokens` counts only
            the remaining ones.
        delivered: the completion's first tokens, which a replay draws again as they are. Decode then has the
            KV that the lost worker had, also where a method does not compute it as prefill would.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    first_index: int = 0
    delivered: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """One drawn token.

    Attributes:
        index: 0 for the token that prefill sampled.
        logprob: of the raw distribution, before bias, penalties and temperature; None unless asked for.
        top_logprobs: the most likely alternatives, best first: (token id, logprob).
    """

    token_id: int
    index: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
