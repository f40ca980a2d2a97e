"""What several control messages hold: plans, sampling, tokens, tickets, sessions."""

from __future__ import annotations

from typing import cast

from kvferry.proto import control_pb2 as pb
from kvferry.shared.compression.plan import Budget, CompressionPlan, ParamValue, Part
from kvferry.shared.control.codec.message import oneof, require
from kvferry.shared.control.messages import SessionKey, Ticket
from kvferry.shared.sampling.params import SampledToken, SamplingParams

_MAX_SIGNED = 2**63 - 1


def _write_param(value: ParamValue) -> pb.ParamValue:
    match value:
        case bool():
            return pb.ParamValue(bool_value=value)
        case int():
            return pb.ParamValue(int_value=value)
        case float():
            return pb.ParamValue(float_value=value)
        case _:
            return pb.ParamValue(string_value=value)


def _read_param(message: pb.ParamValue) -> ParamValue:
    return cast(ParamValue, getattr(message, oneof(message, "value")))


def _write_part(part: Part) -> pb.Part:
    return pb.Part(name=part.name, params={key: _write_param(value) for key, value in part.params.items()})


def _read_part(message: pb.Part) -> Part:
    return Part(name=message.name, params={key: _read_param(value) for key, value in message.params.items()})


def write_plan(plan: CompressionPlan) -> pb.CompressionPlan:
    return pb.CompressionPlan(
        method=plan.method,
        scorer=None if plan.scorer is None else _write_part(plan.scorer),
        attention=_write_part(plan.attention),
        budget=pb.Budget(tokens=plan.budget.tokens, retention=plan.budget.retention),
        skip_layers=plan.skip_layers,
        layer_allocation=_write_part(plan.layer_allocation),
        representation=_write_part(plan.representation),
    )


def read_plan(message: pb.CompressionPlan) -> CompressionPlan:
    require(message, "attention", "budget", "layer_allocation", "representation")
    budget = message.budget
    return CompressionPlan(
        method=message.method,
        scorer=_read_part(message.scorer) if message.HasField("scorer") else None,
        attention=_read_part(message.attention),
        budget=Budget(
            tokens=budget.tokens if budget.HasField("tokens") else None,
            retention=budget.retention if budget.HasField("retention") else None,
        ),
        skip_layers=tuple(message.skip_layers),
        layer_allocation=_read_part(message.layer_allocation),
        representation=_read_part(message.representation),
    )


def write_sampling(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=sampling.logprobs,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=sampling.logit_bias,
        ignore_eos=sampling.ignore_eos,
        first_index=sampling.first_index,
    )
    if sampling.seed > _MAX_SIGNED:
        message.unsigned_seed = sampling.seed
    else:
        message.signed_seed = sampling.seed
    return message


def read_sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=cast(int, getattr(message, oneof(message, "seed"))),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        ignore_eos=message.ignore_eos,
        first_index=message.first_index,
    )


def write_token(token: SampledToken) -> pb.SampledToken:
    return pb.SampledToken(
        token_id=token.token_id,
        index=token.index,
        logprob=token.logprob,
        top_logprobs=[pb.TopLogprob(token_id=top, logprob=logprob) for top, logprob in token.top_logprobs],
    )


def read_token(message: pb.SampledToken) -> SampledToken:
    return SampledToken(
        token_id=message.token_id,
        index=message.index,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


def write_ticket(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        endpoint=ticket.endpoint,
        transfer_id=ticket.transfer_id,
        generation=ticket.generation,
        credit_bytes=ticket.credit_bytes,
        lease_s=ticket.lease_s,
        reserved_bytes=ticket.reserved_bytes,
        held_transfer_id=ticket.held_transfer_id,
        held_tokens=ticket.held_tokens,
        held_depth=ticket.held_depth,
    )


def read_ticket(message: pb.Ticket) -> Ticket:
    return Ticket(
        endpoint=message.endpoint,
        transfer_id=message.transfer_id,
        generation=message.generation,
        credit_bytes=message.credit_bytes,
        lease_s=message.lease_s,
        reserved_bytes=message.reserved_bytes,
        held_transfer_id=message.held_transfer_id,
        held_tokens=message.held_tokens,
        held_depth=message.held_depth,
    )


def write_session(session: SessionKey) -> pb.SessionKey:
    return pb.SessionKey(owner=session.owner, session_id=session.session_id)


def read_session(message: pb.SessionKey) -> SessionKey:
    return SessionKey(owner=message.owner, session_id=message.session_id)
