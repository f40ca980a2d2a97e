"""From a request's fields to sampling parameters: defaults, the length, ids within the vocabulary.

Needs the prompt's length and the model; ranges that need neither are checked in `schemas.py`.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from kvferry.services.router.schemas import ChatRequest, TextRequest
from kvferry.shared.errors import ContextLengthExceeded, InvalidRequest
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SamplingParams

_TEXT_MAX_TOKENS = 16


def sampling_params(
    request: ChatRequest | TextRequest, num_prompt_tokens: int, model: ModelSpec, default_max_tokens: int
) -> SamplingParams:
    """The request's sampling, with its length made exact and a seed drawn where there is none.

    Raises: ContextLengthExceeded; InvalidRequest where an id is not of the vocabulary.
    """
    window = model.max_model_len
    room = window - num_prompt_tokens
    limit = request.token_limit
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens; the context of {window} tokens must hold it and at "
            "least one more",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
        )
    if limit is not None and limit[1] > room:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens and {limit[0]} is {limit[1]}; together they exceed "
            f"the context of {window} tokens",
            param=limit[0],
        )
    default = default_max_tokens if isinstance(request, ChatRequest) else _TEXT_MAX_TOKENS
    bias = {int(token_id): value for token_id, value in (request.logit_bias or {}).items()}
    stop_ids = tuple(request.stop_token_ids or ())
    for param, ids in (("logit_bias", tuple(bias)), ("stop_token_ids", stop_ids)):
        wrong = [token_id for token_id in ids if token_id >= model.vocab_size]
        if wrong:
            raise InvalidRequest(
                f"{param} names token {wrong[0]}; the vocabulary has ids 0 to {model.vocab_size - 1}",
                param=param,
            )
    return SamplingParams(
        max_tokens=limit[1] if limit is not None else min(default, room),
        temperature=_given(request.temperature, 1.0),
        top_p=_given(request.top_p, 1.0),
        top_k=request.top_k or 0,
        min_p=_given(request.min_p, 0.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        seed=request.seed if request.seed is not None else secrets.randbits(63),
        logprobs=request.num_alternatives,
        stop=request.stop_strings,
        stop_token_ids=stop_ids,
        logit_bias=bias,
        ignore_eos=bool(request.ignore_eos),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def with_seed_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choice i draws with seed + i, wrapped into 64 bits."""
    seed = (sampling.seed + index + 2**63) % 2**64 - 2**63
    return replace(sampling, seed=seed)
