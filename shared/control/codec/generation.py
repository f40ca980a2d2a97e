"""Messages between router and decode."""

from __future__ import annotations

from kvferry.proto import control_pb2 as pb
from kvferry.shared.control.codec.message import Codec, make_codec, oneof, read_choice, require
from kvferry.shared.control.codec.parts import (
    read_plan,
    read_sampling,
    read_session,
    read_ticket,
    read_token,
    write_plan,
    write_sampling,
    write_session,
    write_ticket,
    write_token,
)
from kvferry.shared.control.messages import (
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryReturned,
    TicketIssued,
    TokenGenerated,
    TransferAccepted,
)

_FINISH_REASONS: dict[FinishReason, pb.FinishReason.ValueType] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}


def _write_generate_request(request: GenerateRequest) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request.request_id,
        model_fingerprint=request.model_fingerprint,
        prompt_token_ids=request.prompt_token_ids,
        plan=write_plan(request.plan),
        sampling=write_sampling(request.sampling),
        store_history=request.store_history,
        probe=request.probe,
        session=None if request.session is None else write_session(request.session),
    )


def _read_generate_request(message: pb.GenerateRequest) -> GenerateRequest:
    require(message, "plan", "sampling")
    return GenerateRequest(
        request_id=message.request_id,
        model_fingerprint=message.model_fingerprint,
        prompt_token_ids=tuple(message.prompt_token_ids),
        plan=read_plan(message.plan),
        sampling=read_sampling(message.sampling),
        store_history=message.store_history,
        probe=message.probe,
        session=read_session(message.session) if message.HasField("session") else None,
    )


def _write_generate_event(event: GenerateEvent) -> pb.GenerateEvent:
    match event:
        case TicketIssued():
            return pb.GenerateEvent(ticket_issued=pb.TicketIssued(ticket=write_ticket(event.ticket)))
        case TransferAccepted():
            return pb.GenerateEvent(transfer_accepted=pb.TransferAccepted(transfer_s=event.transfer_s))
        case TokenGenerated():
            return pb.GenerateEvent(token_generated=pb.TokenGenerated(token=write_token(event.token)))
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
    match oneof(message, "event"):
        case "ticket_issued":
            require(message.ticket_issued, "ticket")
            return TicketIssued(ticket=read_ticket(message.ticket_issued.ticket))
        case "transfer_accepted":
            return TransferAccepted(transfer_s=message.transfer_accepted.transfer_s)
        case "token_generated":
            require(message.token_generated, "token")
            return TokenGenerated(token=read_token(message.token_generated.token))
        case "generation_finished":
            finished = message.generation_finished
            return GenerationFinished(
                finish_reason=read_choice(finished.finish_reason, _FINISH_REASONS, "finish_reason"),
                num_tokens=finished.num_tokens,
                cache_bytes=finished.cache_bytes,
            )
        case _:
            return HistoryReturned(num_tokens=message.history_returned.num_tokens)


GENERATE_REQUEST = make_codec(pb.GenerateRequest, _write_generate_request, _read_generate_request)
GENERATE_EVENT = make_codec(pb.GenerateEvent, _write_generate_event, _read_generate_event)
FINISH_REQUEST: Codec[str] = make_codec(
    pb.FinishRequest, lambda request_id: pb.FinishRequest(request_id=request_id), lambda m: m.request_id
)
FINISH_RESPONSE: Codec[None] = make_codec(pb.FinishResponse, lambda _: pb.FinishResponse(), lambda _: None)
