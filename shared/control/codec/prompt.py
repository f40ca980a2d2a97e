"""Messages between router and prefill."""

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
    CommitTurnRequest,
    FirstToken,
    HistoryInfo,
    HistoryWay,
    PrefillEvent,
    PrefillRequest,
    ReuseSource,
    TransferDone,
)

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


def _write_prefill_request(request: PrefillRequest) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        request_id=request.request_id,
        model_fingerprint=request.model_fingerprint,
        prompt_token_ids=request.prompt_token_ids,
        plan=write_plan(request.plan),
        sampling=write_sampling(request.sampling),
        ticket=write_ticket(request.ticket),
        session=None if request.session is None else write_session(request.session),
        document=None if request.document is None else write_session(request.document),
        probe=request.probe,
        kept_bins=request.kept_bins,
        has_history=request.has_history,
    )


def _read_prefill_request(message: pb.PrefillRequest) -> PrefillRequest:
    require(message, "plan", "sampling", "ticket")
    return PrefillRequest(
        request_id=message.request_id,
        model_fingerprint=message.model_fingerprint,
        prompt_token_ids=tuple(message.prompt_token_ids),
        plan=read_plan(message.plan),
        sampling=read_sampling(message.sampling),
        ticket=read_ticket(message.ticket),
        session=read_session(message.session) if message.HasField("session") else None,
        document=read_session(message.document) if message.HasField("document") else None,
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
        token=write_token(event.token),
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
    if oneof(message, "event") == "transfer_done":
        done = message.transfer_done
        return TransferDone(
            bytes_by_kind=dict(done.bytes_by_kind),
            transfer_s=done.transfer_s,
            delta_bytes=done.delta_bytes if done.HasField("delta_bytes") else None,
        )
    first = message.first_token
    require(first, "token")
    return FirstToken(
        token=read_token(first.token),
        method=first.method,
        reused_tokens=first.reused_tokens,
        full_bytes=first.full_bytes,
        prefill_s=first.prefill_s,
        compress_s=first.compress_s,
        queue_s=first.queue_s,
        reuse_source=read_choice(first.reuse_source, _REUSE_SOURCES, "reuse_source"),
        kept=tuple(first.kept),
        history_way=read_choice(first.history_way, _HISTORY_WAYS, "history_way")
        if first.history_way
        else None,
        history_tier=first.history_tier,
    )


def _write_commit(request: CommitTurnRequest) -> pb.CommitTurnRequest:
    return pb.CommitTurnRequest(
        request_id=request.request_id, session=write_session(request.session), token_ids=request.token_ids
    )


def _read_commit(message: pb.CommitTurnRequest) -> CommitTurnRequest:
    require(message, "session")
    return CommitTurnRequest(
        request_id=message.request_id,
        session=read_session(message.session),
        token_ids=tuple(message.token_ids),
    )


def _write_history(info: HistoryInfo) -> pb.HistoryInfo:
    return pb.HistoryInfo(num_tokens=info.num_tokens, size_bytes=info.size_bytes, tier=info.tier)


def _read_history(message: pb.HistoryInfo) -> HistoryInfo:
    return HistoryInfo(num_tokens=message.num_tokens, size_bytes=message.size_bytes, tier=message.tier)


PREFILL_REQUEST = make_codec(pb.PrefillRequest, _write_prefill_request, _read_prefill_request)
PREFILL_EVENT = make_codec(pb.PrefillEvent, _write_prefill_event, _read_prefill_event)
COMMIT_TURN_REQUEST = make_codec(pb.CommitTurnRequest, _write_commit, _read_commit)
ABORT_TURN_REQUEST: Codec[str] = make_codec(
    pb.AbortTurnRequest, lambda request_id: pb.AbortTurnRequest(request_id=request_id), lambda m: m.request_id
)
ABORT_TURN_RESPONSE: Codec[None] = make_codec(
    pb.AbortTurnResponse, lambda _: pb.AbortTurnResponse(), lambda _: None
)
SESSION_KEY = make_codec(pb.SessionKey, write_session, read_session)
HISTORY_INFO = make_codec(pb.HistoryInfo, _write_history, _read_history)
