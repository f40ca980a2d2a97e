"""Every control message survives protobuf; what is incomplete or no protobuf at all is InvalidRequest."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.proto import control_pb2 as pb
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part
from kvferry.shared.control import codec
from kvferry.shared.control.codec import Codec
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryInfo,
    PrefillEvent,
    PrefillRequest,
    SessionKey,
    TransferDone,
    WorkerStatus,
)
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.sampling.params import SamplingParams

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

OWN: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (SamplingParams, "seed"): st.integers(-(2**63), 2**64 - 1),
    (Part, "params"): st.dictionaries(
        st.text(),
        st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans() | st.text(),
        max_size=4,
    ),
}
BUDGETS = (
    st.builds(Budget)
    | st.builds(Budget, tokens=st.integers(1, 2**40))
    | st.builds(Budget, retention=st.floats(0.001, 1.0))
)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of any type that messages use, so that a field added to one is tested without being named."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Budget:
        return BUDGETS
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        fields = {n: OWN[annotation, n] if (annotation, n) in OWN else values(h) for n, h in hints.items()}
        return st.builds(annotation, **fields)
    if origin in (Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values(arguments[0]), max_size=5).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=4)
    leaves: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0, 2**32 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return leaves[annotation]


MESSAGES: dict[str, tuple[Codec[Any], Any]] = {
    "generate request": (codec.GENERATE_REQUEST, GenerateRequest),
    "generate event": (codec.GENERATE_EVENT, GenerateEvent),
    "prefill request": (codec.PREFILL_REQUEST, PrefillRequest),
    "prefill event": (codec.PREFILL_EVENT, PrefillEvent),
    "commit": (codec.COMMIT_TURN_REQUEST, CommitTurnRequest),
    "session": (codec.SESSION_KEY, SessionKey),
    "history": (codec.HISTORY_INFO, HistoryInfo),
    "status": (codec.WORKER_STATUS, WorkerStatus),
    "finish": (codec.FINISH_REQUEST, str),
    "finishing": (codec.FINISH_RESPONSE, type(None)),
    "abort": (codec.ABORT_TURN_REQUEST, str),
    "aborted": (codec.ABORT_TURN_RESPONSE, type(None)),
    "status request": (codec.STATUS_REQUEST, type(None)),
}


@pytest.mark.parametrize("name", MESSAGES)
@settings(UNTIMED, max_examples=60)
@given(data=st.data())
def test_every_message_survives(name: str, data: st.DataObject) -> None:
    message, annotation = MESSAGES[name]
    value = data.draw(values(annotation))
    assert message.decode(message.encode(value)) == value


@UNTIMED
@given(values(CompressionPlan))
def test_parameters_keep_their_types(plan: CompressionPlan) -> None:
    request = dataclasses.replace(REQUEST, plan=plan)
    back = codec.GENERATE_REQUEST.decode(codec.GENERATE_REQUEST.encode(request)).plan
    for before, after in (
        (plan.scorer, back.scorer),
        (plan.attention, back.attention),
        (plan.layer_allocation, back.layer_allocation),
    ):
        if before is not None and after is not None:
            assert {k: type(v) for k, v in before.params.items()} == {
                k: type(v) for k, v in after.params.items()
            }


REQUEST = GenerateRequest(
    request_id="r",
    model_fingerprint="f",
    prompt_token_ids=tuple(range(100_000)),
    plan=CompressionPlan(method="full"),
    sampling=SamplingParams(max_tokens=1),
)


def test_token_ids_are_packed() -> None:
    assert len(codec.GENERATE_REQUEST.encode(REQUEST)) < 3 * 100_000


@pytest.mark.parametrize(
    "request_",
    [
        dataclasses.replace(REQUEST, prompt_token_ids=(-1,)),
        dataclasses.replace(REQUEST, prompt_token_ids=(2**32,)),
        dataclasses.replace(REQUEST, sampling=SamplingParams(max_tokens=1, seed=2**64)),
        dataclasses.replace(REQUEST, request_id="\ud800"),
        dataclasses.replace(
            REQUEST, plan=CompressionPlan(method="m", attention=Part(name="d", params={"n": 2**63}))
        ),
    ],
)
def test_values_that_do_not_fit_are_refused_when_encoding(request_: GenerateRequest) -> None:
    with pytest.raises(InvalidRequest, match="GenerateRequest cannot be encoded"):
        codec.GENERATE_REQUEST.encode(request_)


@pytest.mark.parametrize("name", MESSAGES)
@UNTIMED
@given(data=st.binary(max_size=100))
def test_random_bytes_decode_or_are_refused(name: str, data: bytes) -> None:
    message, _ = MESSAGES[name]
    try:
        value = message.decode(data)
    except InvalidRequest:
        return
    message.encode(value)


@pytest.mark.parametrize(
    ("message", "content", "named"),
    [
        (codec.GENERATE_REQUEST, pb.GenerateRequest(sampling=pb.SamplingParams()), "no plan"),
        (codec.GENERATE_REQUEST, pb.GenerateRequest(plan=pb.CompressionPlan()), "no sampling"),
        (
            codec.GENERATE_REQUEST,
            pb.GenerateRequest(plan=pb.CompressionPlan(), sampling=pb.SamplingParams()),
            "no attention",
        ),
        (codec.PREFILL_REQUEST, pb.PrefillRequest(), "no plan"),
        (codec.COMMIT_TURN_REQUEST, pb.CommitTurnRequest(), "no session"),
        (codec.GENERATE_EVENT, pb.GenerateEvent(), "no event"),
        (codec.GENERATE_EVENT, pb.GenerateEvent(ticket_issued=pb.TicketIssued()), "no ticket"),
        (
            codec.GENERATE_EVENT,
            pb.GenerateEvent(generation_finished=pb.GenerationFinished()),
            "finish_reason is 0; stop, length are allowed",
        ),
        (codec.PREFILL_EVENT, pb.PrefillEvent(), "no event"),
        (codec.PREFILL_EVENT, pb.PrefillEvent(first_token=pb.FirstToken()), "no token"),
        (codec.WORKER_STATUS, pb.WorkerStatus(role=pb.ROLE_DECODE), "no model"),
        (codec.WORKER_STATUS, pb.WorkerStatus(model=pb.ModelSpec(dtype="float32")), "role is 0"),
        (
            codec.WORKER_STATUS,
            pb.WorkerStatus(role=pb.ROLE_DECODE, model=pb.ModelSpec(dtype="int8")),
            "dtype is 'int8'; float32, float16, bfloat16 are allowed",
        ),
    ],
)
def test_incomplete_messages_are_refused(message: Codec[Any], content: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        message.decode(content.SerializeToString())


def test_a_budget_validates_itself() -> None:
    content = pb.GenerateRequest(
        plan=pb.CompressionPlan(
            attention=pb.Part(name="dense"),
            layer_allocation=pb.Part(name="uniform"),
            representation=pb.Part(name="rows"),
            budget=pb.Budget(tokens=0),
        ),
        sampling=pb.SamplingParams(signed_seed=0),
    )
    with pytest.raises(InvalidRequest, match="token_budget is 0"):
        codec.GENERATE_REQUEST.decode(content.SerializeToString())


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    value = TransferDone(bytes_by_kind={"rows": 3}, transfer_s=0.5)
    data = codec.PREFILL_EVENT.encode(value) + b"\xfa\x7f\x01x"
    assert codec.PREFILL_EVENT.decode(data) == value
    finished = GenerationFinished(finish_reason="stop", num_tokens=1, cache_bytes=2)
    assert codec.GENERATE_EVENT.decode(codec.GENERATE_EVENT.encode(finished)) == finished
