"""Control messages to protobuf bytes and back: the only module that touches the generated code.

Place in the request's path: under the gRPC client and server, which see dataclasses and bytes alone. Checks
that what came is complete and typed (InvalidRequest if not); does not check ranges that a service knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast, get_args

from google.protobuf.message import DecodeError, Message

from kvferry.proto import control_pb2 as pb
from kvferry.shared.compression.plan import Budget, CompressionPlan, ParamValue, Part
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    FinishReason,
    FirstToken,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryInfo,
    HistoryReturned,
    HistoryWay,
    PrefillEvent,
    PrefillRequest,
    ReuseSource,
    SessionKey,
    Ticket,
    TicketIssued,
    TokenGenerated,
    TransferAccepted,
    TransferDone,
    WorkerStatus,
)
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import DTypeName, ModelSpec
from kvferry.shared.sampling.params import SampledToken, SamplingParams

DECODE_SERVICE = pb.DESCRIPTOR.services_by_name["Decode"].full_name
PREFILL_SERVICE = pb.DESCRIPTOR.services_by_name["Prefill"].full_name

_Value = TypeVar("_Value")
_Proto = TypeVar("_Proto", bound=Message)
_Choice = TypeVar("_Choice", bound=str)

_MAX_SIGNED = 2**63 - 1
_FINISH_REASONS: dict[FinishReason, pb.FinishReason.ValueType] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}
_REUSE_SOURCES: dict[ReuseSource, pb.ReuseSource.ValueType] = {
    "session": pb.REUSE_SOURCE_SESSION,
    "document": pb.REUSE_SOURCE_DOCUMENT,
    "prefix": pb.REUSE_SOURCE_PREFIX,
}
_HISTORY_WAYS: dict[HistoryWay, pb.HistoryWay.ValueType] = {
    "recompute": pb.HISTORY_WAY_RECOMPUTE,
    "fetch": pb.HISTORY_WAY_FETCH,
    "delta": pb.HISTORY_WAY_DELTA,
}
_ROLES: dict[Literal["prefill", "decode"], pb.Role.ValueType] = {
    "prefill": pb.ROLE_PREFILL,
    "decode": pb.ROLE_DECODE,
}


@dataclass(frozen=True, kw_only=True)
class Codec(Generic[_Value]):
    """Both directions of one message. Both raise InvalidRequest on what does not fit the message's type."""

    encode: Callable[[_Value], bytes]
    decode: Callable[[bytes], _Value]


def _codec(
    proto: type[_Proto], write: Callable[[_Value], _Proto], read: Callable[[_Proto], _Value]
) -> Codec[_Value]:
    name = proto.DESCRIPTOR.name

    def encode(value: _Value) -> bytes:
        try:
            return write(value).SerializeToString()
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{name} cannot be encoded: {error}") from error

    def decode(data: bytes) -> _Value:
        try:
            message = proto.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"{name} cannot be decoded: {error}") from error
        return read(message)

    return Codec(encode=encode, decode=decode)


def _require(message: Message, *fields: str) -> None:
    for name in fields:
        if not message.HasField(name):
            raise InvalidRequest(f"{message.DESCRIPTOR.name} has no {name}; it is required", param=name)


def _oneof(message: Message, group: str) -> str:
    chosen: str | None = message.WhichOneof(group)
    if chosen is None:
        raise InvalidRequest(f"{message.DESCRIPTOR.name} has no {group} that this version knows", param=group)
    return chosen


def _read_choice(number: int, choices: Mapping[_Choice, int], name: str) -> _Choice:
    for choice, its_number in choices.items():
        if its_number == number:
            return choice
    raise InvalidRequest(f"{name} is {number}; {', '.join(choices)} are allowed", param=name)


# ---- parts of messages -----------------------------------------------------------------------------------


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
    return cast(ParamValue, getattr(message, _oneof(message, "value")))


def _write_part(part: Part) -> pb.Part:
    return pb.Part(name=part.name, params={key: _write_param(value) for key, value in part.params.items()})


def _read_part(message: pb.Part) -> Part:
    return Part(name=message.name, params={key: _read_param(value) for key, value in message.params.items()})


def _write_plan(plan: CompressionPlan) -> pb.CompressionPlan:
    return pb.CompressionPlan(
        method=plan.method,
        scorer=None if plan.scorer is None else _write_part(plan.scorer),
        attention=_write_part(plan.attention),
        budget=pb.Budget(tokens=plan.budget.tokens, retention=plan.budget.retention),
        skip_layers=plan.skip_layers,
        layer_allocation=_write_part(plan.layer_allocation),
        representation=_write_part(plan.representation),
    )


def _read_plan(message: pb.CompressionPlan) -> CompressionPlan:
    _require(message, "attention", "budget", "layer_allocation", "representation")
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


def _write_sampling(sampling: SamplingParams) -> pb.SamplingParams:
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


def _read_sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=cast(int, getattr(message, _oneof(message, "seed"))),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        ignore_eos=message.ignore_eos,
        first_index=message.first_index,
    )


def _write_token(token: SampledToken) -> pb.SampledToken:
    return pb.SampledToken(
        token_id=token.token_id,
        index=token.index,
        logprob=token.logprob,
        top_logprobs=[pb.TopLogprob(token_id=top, logprob=logprob) for top, logprob in token.top_logprobs],
    )


def _read_token(message: pb.SampledToken) -> SampledToken:
    return SampledToken(
        token_id=message.token_id,
        index=message.index,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


def _write_ticket(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        endpoint=ticket.endpoint,
        transfer_id=ticket.transfer_id,
        generation=ticket.generation,
        credit_bytes=ticket.credit_bytes,
        lease_s=ticket.lease_s,
        reserved_bytes=ticket.reserved_bytes,
        held_transfer_id=ticket.held_transfer_id,
        held_tokens=ticket.held_tokens,
    )


def _read_ticket(message: pb.Ticket) -> Ticket:
    return Ticket(
        endpoint=message.endpoint,
        transfer_id=message.transfer_id,
        generation=message.generation,
        credit_bytes=message.credit_bytes,
        lease_s=message.lease_s,
        reserved_bytes=message.reserved_bytes,
        held_transfer_id=message.held_transfer_id,
        held_tokens=message.held_tokens,
    )


def _write_session(session: SessionKey) -> pb.SessionKey:
    return pb.SessionKey(owner=session.owner, session_id=session.session_id)


def _read_session(message: pb.SessionKey) -> SessionKey:
    return SessionKey(owner=message.owner, session_id=message.session_id)


# ---- decode ----------------------------------------------------------------------------------------------


def _write_generate_request(request: GenerateRequest) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request.request_id,
        model_fingerprint=request.model_fingerprint,
        prompt_token_ids=request.prompt_token_ids,
        plan=_write_plan(request.plan),
        sampling=_write_sampling(request.sampling),
        store_history=request.store_history,
        probe=request.probe,
        session=None if request.session is None else _write_session(request.session),
    )


def _read_generate_request(message: pb.GenerateRequest) -> GenerateRequest:
    _require(message, "plan", "sampling")
    return GenerateRequest(
        request_id=message.request_id,
        model_fingerprint=message.model_fingerprint,
        prompt_token_ids=tuple(message.prompt_token_ids),
        plan=_read_plan(message.plan),
        sampling=_read_sampling(message.sampling),
        store_history=message.store_history,
        probe=message.probe,
        session=_read_session(message.session) if message.HasField("session") else None,
    )


def _write_generate_event(event: GenerateEvent) -> pb.GenerateEvent:
    match event:
        case TicketIssued():
            return pb.GenerateEvent(ticket_issued=pb.TicketIssued(ticket=_write_ticket(event.ticket)))
        case TransferAccepted():
            return pb.GenerateEvent(transfer_accepted=pb.TransferAccepted(transfer_s=event.transfer_s))
        case TokenGenerated():
            return pb.GenerateEvent(token_generated=pb.TokenGenerated(token=_write_token(event.token)))
        case GenerationFinished():
            finished = pb.GenerationFinished(
                finish_reason=_FINISH_REASONS[event.finish_reason],
                num_tokens=event.num_tokens,
                cache_bytes=event.cache_bytes,
            )
            return pb.GenerateEvent(generation_finished=finished)
        case HistoryReturned():
            return pb.GenerateEvent(history_returned=pb.HistoryReturned(num_tokens=event.num_tokens))


def _read_generate_event(message: pb.GenerateEvent) -> GenerateEvent:
    match _oneof(message, "event"):
        case "ticket_issued":
            _require(message.ticket_issued, "ticket")
            return TicketIssued(ticket=_read_ticket(message.ticket_issued.ticket))
        case "transfer_accepted":
            return TransferAccepted(transfer_s=message.transfer_accepted.transfer_s)
        case "token_generated":
            _require(message.token_generated, "token")
            return TokenGenerated(token=_read_token(message.token_generated.token))
        case "generation_finished":
            finished = message.generation_finished
            return GenerationFinished(
                finish_reason=_read_choice(finished.finish_reason, _FINISH_REASONS, "finish_reason"),
                num_tokens=finished.num_tokens,
                cache_bytes=finished.cache_bytes,
            )
        case _:
            return HistoryReturned(num_tokens=message.history_returned.num_tokens)


# ---- prefill ---------------------------------------------------------------------------------------------


def _write_prefill_request(request: PrefillRequest) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        request_id=request.request_id,
        model_fingerprint=request.model_fingerprint,
        prompt_token_ids=request.prompt_token_ids,
        plan=_write_plan(request.plan),
        sampling=_write_sampling(request.sampling),
        ticket=_write_ticket(request.ticket),
        session=None if request.session is None else _write_session(request.session),
        document=None if request.document is None else _write_session(request.document),
        probe=request.probe,
        kept_bins=request.kept_bins,
        has_history=request.has_history,
    )


def _read_prefill_request(message: pb.PrefillRequest) -> PrefillRequest:
    _require(message, "plan", "sampling", "ticket")
    return PrefillRequest(
        request_id=message.request_id,
        model_fingerprint=message.model_fingerprint,
        prompt_token_ids=tuple(message.prompt_token_ids),
        plan=_read_plan(message.plan),
        sampling=_read_sampling(message.sampling),
        ticket=_read_ticket(message.ticket),
        session=_read_session(message.session) if message.HasField("session") else None,
        document=_read_session(message.document) if message.HasField("document") else None,
        probe=message.probe,
        kept_bins=message.kept_bins,
        has_history=message.has_history,
    )


def _write_prefill_event(event: PrefillEvent) -> pb.PrefillEvent:
    if isinstance(event, TransferDone):
        done = pb.TransferDone(
            bytes_by_kind=event.bytes_by_kind, transfer_s=event.transfer_s, delta_bytes=event.delta_bytes
        )
        return pb.PrefillEvent(transfer_done=done)
    first = pb.FirstToken(
        token=_write_token(event.token),
        method=event.method,
        reused_tokens=event.reused_tokens,
        full_bytes=event.full_bytes,
        prefill_s=event.prefill_s,
        compress_s=event.compress_s,
        queue_s=event.queue_s,
        reuse_source=_REUSE_SOURCES[event.reuse_source],
        kept=event.kept,
        history_way=(
            pb.HISTORY_WAY_UNSPECIFIED if event.history_way is None else _HISTORY_WAYS[event.history_way]
        ),
        history_tier=event.history_tier,
    )
    return pb.PrefillEvent(first_token=first)


def _read_prefill_event(message: pb.PrefillEvent) -> PrefillEvent:
    if _oneof(message, "event") == "transfer_done":
        done = message.transfer_done
        return TransferDone(
            bytes_by_kind=dict(done.bytes_by_kind),
            transfer_s=done.transfer_s,
            delta_bytes=done.delta_bytes if done.HasField("delta_bytes") else None,
        )
    first = message.first_token
    _require(first, "token")
    return FirstToken(
        token=_read_token(first.token),
        method=first.method,
        reused_tokens=first.reused_tokens,
        full_bytes=first.full_bytes,
        prefill_s=first.prefill_s,
        compress_s=first.compress_s,
        queue_s=first.queue_s,
        reuse_source=_read_choice(first.reuse_source, _REUSE_SOURCES, "reuse_source"),
        kept=tuple(first.kept),
        history_way=_read_choice(first.history_way, _HISTORY_WAYS, "history_way")
        if first.history_way
        else None,
        history_tier=first.history_tier,
    )


def _write_commit(request: CommitTurnRequest) -> pb.CommitTurnRequest:
    return pb.CommitTurnRequest(
        request_id=request.request_id, session=_write_session(request.session), token_ids=request.token_ids
    )


def _read_commit(message: pb.CommitTurnRequest) -> CommitTurnRequest:
    _require(message, "session")
    return CommitTurnRequest(
        request_id=message.request_id,
        session=_read_session(message.session),
        token_ids=tuple(message.token_ids),
    )


def _write_history(info: HistoryInfo) -> pb.HistoryInfo:
    return pb.HistoryInfo(num_tokens=info.num_tokens, size_bytes=info.size_bytes, tier=info.tier)


def _read_history(message: pb.HistoryInfo) -> HistoryInfo:
    return HistoryInfo(num_tokens=message.num_tokens, size_bytes=message.size_bytes, tier=message.tier)


# ---- both ------------------------------------------------------------------------------------------------


def _write_model(spec: ModelSpec) -> pb.ModelSpec:
    return pb.ModelSpec(
        name=spec.name,
        fingerprint=spec.fingerprint,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        dtype=spec.dtype,
        eos_token_ids=spec.eos_token_ids,
    )


def _read_model(message: pb.ModelSpec) -> ModelSpec:
    allowed = get_args(DTypeName)
    if message.dtype not in allowed:
        raise InvalidRequest(
            f"dtype is {message.dtype!r}; {', '.join(allowed)} are allowed", param="model.dtype"
        )
    return ModelSpec(
        name=message.name,
        fingerprint=message.fingerprint,
        num_layers=message.num_layers,
        num_heads=message.num_heads,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        dtype=cast(DTypeName, message.dtype),
        eos_token_ids=tuple(message.eos_token_ids),
    )


def _write_status(status: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        role=_ROLES[status.role],
        instance_id=status.instance_id,
        protocol_version=status.protocol_version,
        ready=status.ready,
        running=status.running,
        waiting=status.waiting,
        free_bytes=status.free_bytes,
        total_bytes=status.total_bytes,
        model=_write_model(status.model),
        methods=status.methods,
        kernel_paths=status.kernel_paths,
    )


def _read_status(message: pb.WorkerStatus) -> WorkerStatus:
    _require(message, "model")
    return WorkerStatus(
        role=_read_choice(message.role, _ROLES, "role"),
        instance_id=message.instance_id,
        protocol_version=message.protocol_version,
        ready=message.ready,
        running=message.running,
        waiting=message.waiting,
        free_bytes=message.free_bytes,
        total_bytes=message.total_bytes,
        model=_read_model(message.model),
        methods=tuple(message.methods),
        kernel_paths=dict(message.kernel_paths),
    )


GENERATE_REQUEST = _codec(pb.GenerateRequest, _write_generate_request, _read_generate_request)
GENERATE_EVENT = _codec(pb.GenerateEvent, _write_generate_event, _read_generate_event)
PREFILL_REQUEST = _codec(pb.PrefillRequest, _write_prefill_request, _read_prefill_request)
PREFILL_EVENT = _codec(pb.PrefillEvent, _write_prefill_event, _read_prefill_event)
COMMIT_TURN_REQUEST = _codec(pb.CommitTurnRequest, _write_commit, _read_commit)
ABORT_TURN_REQUEST: Codec[str] = _codec(
    pb.AbortTurnRequest, lambda request_id: pb.AbortTurnRequest(request_id=request_id), lambda m: m.request_id
)
ABORT_TURN_RESPONSE: Codec[None] = _codec(
    pb.AbortTurnResponse, lambda _: pb.AbortTurnResponse(), lambda _: None
)
SESSION_KEY = _codec(pb.SessionKey, _write_session, _read_session)
HISTORY_INFO = _codec(pb.HistoryInfo, _write_history, _read_history)
STATUS_REQUEST: Codec[None] = _codec(pb.StatusRequest, lambda _: pb.StatusRequest(), lambda _: None)
WORKER_STATUS = _codec(pb.WorkerStatus, _write_status, _read_status)
