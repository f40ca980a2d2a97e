"""Every control message survives protobuf; incomplete messages and other bytes are InvalidRequest.

A field added to a dataclass and to control.proto needs no code; one that is missing in either is refused.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from kvtest.control import PREFILL_REQUEST, TICKET

from kvferry.proto import control_pb2 as pb
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part, ResolvedPlan, plan_digest
from kvferry.shared.control import codec, messages
from kvferry.shared.control.codec import Codec
from kvferry.shared.control.messages import (
    GenerateRequest,
    GenerationFinished,
    TicketIssued,
    TransferDone,
)
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.sampling.params import SamplingParams

OWN: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (SamplingParams, "seed"): st.integers(-(2**63), 2**63 - 1),
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


ANNOTATIONS: dict[str, Any] = {
    "EventsRequest": str,
    "FinishRequest": str,
    "FinishResponse": type(None),
    "AbortTurnRequest": str,
    "AbortTurnResponse": type(None),
    "RedirectResponse": type(None),
    "StatusRequest": type(None),
}
"""Of messages that have no class of their own."""


@pytest.mark.parametrize("name", codec.CODECS)
@given(data=st.data())
def test_every_message_survives(name: str, data: st.DataObject) -> None:
    message = codec.CODECS[name]
    value = data.draw(values(ANNOTATIONS.get(name) or getattr(messages, name)))
    assert message.decode(message.encode(value)) == value


def same_types(before: Part | None, after: Part | None) -> bool:
    if before is None or after is None:
        return before is after
    return {k: type(v) for k, v in before.params.items()} == {k: type(v) for k, v in after.params.items()}


@given(values(CompressionPlan))
def test_parameters_keep_their_types(plan: CompressionPlan) -> None:
    request = dataclasses.replace(REQUEST, plan=plan)
    back = codec.CODECS["GenerateRequest"].decode(codec.CODECS["GenerateRequest"].encode(request)).plan
    assert same_types(plan.scorer, back.scorer)
    assert same_types(plan.attention, back.attention)
    assert same_types(plan.layer_allocation, back.layer_allocation)
    assert same_types(plan.representation, back.representation)


@given(values(ResolvedPlan))
def test_any_plan_survives_inside_a_ticket(plan: ResolvedPlan) -> None:
    """On its way to the router and from there to prefill: parameters with their types, and its digest."""
    ticket = dataclasses.replace(TICKET, plan=plan)
    issued, events = TicketIssued(ticket=ticket), codec.CODECS["GenerateEvent"]
    request, requests = dataclasses.replace(PREFILL_REQUEST, ticket=ticket), codec.CODECS["PrefillRequest"]
    assert events.decode(events.encode(issued)) == issued
    received = requests.decode(requests.encode(request))
    assert received == request
    back = received.ticket.plan
    assert back is not None
    for before, after in zip(plan.layers, back.layers, strict=True):
        assert same_types(before.attention, after.attention)
        assert same_types(before.representation, after.representation)
    assert plan_digest(back) == plan_digest(plan)


def test_a_ticket_without_a_plan_survives_as_such() -> None:
    """It names where generated rows are returned; prefill refuses to ship a prompt to it."""
    request = dataclasses.replace(PREFILL_REQUEST, ticket=dataclasses.replace(TICKET, plan=None))
    requests = codec.CODECS["PrefillRequest"]
    assert requests.decode(requests.encode(request)) == request


REQUEST = GenerateRequest(
    request_id="r",
    model_fingerprint="f",
    prompt_token_ids=tuple(range(100_000)),
    plan=CompressionPlan(method="full"),
    sampling=SamplingParams(max_tokens=1),
)


def test_token_ids_are_packed() -> None:
    assert len(codec.CODECS["GenerateRequest"].encode(REQUEST)) < 3 * 100_000


@pytest.mark.parametrize(
    "request_",
    [
        dataclasses.replace(REQUEST, prompt_token_ids=(-1,)),
        dataclasses.replace(REQUEST, prompt_token_ids=(2**32,)),
        dataclasses.replace(REQUEST, sampling=SamplingParams(max_tokens=1, seed=2**63)),
        dataclasses.replace(REQUEST, request_id="\ud800"),
        dataclasses.replace(
            REQUEST, plan=CompressionPlan(method="m", attention=Part(name="d", params={"n": 2**63}))
        ),
    ],
)
def test_values_that_do_not_fit_are_refused_when_encoding(request_: GenerateRequest) -> None:
    with pytest.raises(InvalidRequest, match="GenerateRequest cannot be encoded"):
        codec.CODECS["GenerateRequest"].encode(request_)


@pytest.mark.parametrize("name", codec.CODECS)
@given(data=st.binary(max_size=100))
def test_random_bytes_decode_or_are_refused(name: str, data: bytes) -> None:
    message = codec.CODECS[name]
    try:
        value = message.decode(data)
    except InvalidRequest:
        return
    message.encode(value)


@pytest.mark.parametrize(
    ("message", "content", "named"),
    [
        (codec.CODECS["GenerateRequest"], pb.GenerateRequest(sampling=pb.SamplingParams()), "no plan"),
        (codec.CODECS["GenerateRequest"], pb.GenerateRequest(plan=pb.CompressionPlan()), "no sampling"),
        (
            codec.CODECS["GenerateRequest"],
            pb.GenerateRequest(plan=pb.CompressionPlan(), sampling=pb.SamplingParams()),
            "no attention",
        ),
        (codec.CODECS["PrefillRequest"], pb.PrefillRequest(), "no sampling"),
        (codec.CODECS["PrefillRequest"], pb.PrefillRequest(sampling=pb.SamplingParams()), "no ticket"),
        (
            codec.CODECS["PrefillRequest"],
            pb.PrefillRequest(sampling=pb.SamplingParams(), ticket=pb.Ticket(plan=pb.ResolvedPlan())),
            "no plan",
        ),
        (codec.CODECS["CommitTurnRequest"], pb.CommitTurnRequest(), "no session"),
        (codec.CODECS["GenerateEvent"], pb.GenerateEvent(), "no event"),
        (codec.CODECS["GenerateEvent"], pb.GenerateEvent(ticket_issued=pb.TicketIssued()), "no ticket"),
        (
            codec.CODECS["GenerateEvent"],
            pb.GenerateEvent(generation_finished=pb.GenerationFinished()),
            "finish_reason is 0; stop, length are allowed",
        ),
        (codec.CODECS["PrefillEvent"], pb.PrefillEvent(), "no event"),
        (codec.CODECS["PrefillEvent"], pb.PrefillEvent(first_token=pb.FirstToken()), "no token"),
        (codec.CODECS["WorkerStatus"], pb.WorkerStatus(role=pb.ROLE_DECODE), "no model"),
        (codec.CODECS["WorkerStatus"], pb.WorkerStatus(model=pb.ModelSpec(dtype="float32")), "role is 0"),
        (
            codec.CODECS["WorkerStatus"],
            pb.WorkerStatus(role=pb.ROLE_DECODE, model=pb.ModelSpec(dtype="int8")),
            "dtype is 'int8'; float32, float16, bfloat16 are allowed",
        ),
    ],
)
def test_incomplete_messages_are_refused(message: Codec, content: Any, named: str) -> None:
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
        sampling=pb.SamplingParams(),
    )
    with pytest.raises(InvalidRequest, match="token_budget is 0"):
        codec.CODECS["GenerateRequest"].decode(content.SerializeToString())


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    value = TransferDone(bytes_by_kind={"rows": 3}, transfer_s=0.5)
    data = codec.CODECS["PrefillEvent"].encode(value) + b"\xfa\x7f\x01x"
    assert codec.CODECS["PrefillEvent"].decode(data) == value
    finished = GenerationFinished(finish_reason="stop", num_tokens=1, cache_bytes=2)
    assert codec.CODECS["GenerateEvent"].decode(codec.CODECS["GenerateEvent"].encode(finished)) == finished


# ---- dataclasses and control.proto -----------------------------------------------------------------------

PACKAGE = text_format.Parse(
    """
    name: "later.proto" package: "later" syntax: "proto3"
    enum_type {
      name: "Tier"
      value { name: "TIER_UNSPECIFIED" number: 0 } value { name: "TIER_MEMORY" number: 1 }
      value { name: "TIER_REDIS" number: 2 }
    }
    message_type {
      name: "Layer"
      field { name: "rows" number: 1 type: TYPE_UINT32 label: LABEL_OPTIONAL }
      field { name: "name" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
    }
    message_type {
      name: "Plan"
      field { name: "layers" number: 1 type: TYPE_MESSAGE type_name: ".later.Layer" label: LABEL_REPEATED }
      field { name: "spans" number: 2 type: TYPE_MESSAGE type_name: ".later.Layer" label: LABEL_REPEATED }
      field { name: "tier" number: 3 type: TYPE_ENUM type_name: ".later.Tier" label: LABEL_OPTIONAL }
      field { name: "last" number: 4 type: TYPE_MESSAGE type_name: ".later.Layer" label: LABEL_OPTIONAL }
      field { name: "digest" number: 5 type: TYPE_BYTES label: LABEL_OPTIONAL }
    }
    """,
    descriptor_pb2.FileDescriptorProto(),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    rows: int
    name: str = "rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    layers: tuple[Layer, ...]
    spans: tuple[tuple[int, str], ...] = ()
    tier: Literal["memory", "redis"] | None = None
    last: Layer | None = None
    digest: bytes = b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanWithoutDigest:
    layers: tuple[Layer, ...]
    spans: tuple[tuple[int, str], ...] = ()
    tier: Literal["memory", "redis"] | None = None
    last: Layer | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOfAnotherTier(PlanWithoutDigest):
    tier: Literal["memory", "disk"] | None = None  # type: ignore[assignment]
    digest: bytes = b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanWithOptionalDigest(PlanWithoutDigest):
    digest: bytes | None = None


@pytest.fixture(scope="module")
def later() -> type[Message]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(PACKAGE)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("later.Plan"))


@pytest.mark.parametrize(
    "value",
    [
        Plan(layers=()),
        Plan(
            layers=(Layer(rows=1), Layer(rows=2, name="kivi")),
            spans=((3, "a"), (4, "")),
            tier="redis",
            last=Layer(rows=0, name=""),
            digest=b"\x00\xff",
        ),
    ],
)
def test_a_new_field_needs_only_its_two_lines(later: type[Message], value: Plan) -> None:
    message = codec.make_codec(Plan, later)
    assert message.decode(message.encode(value)) == value


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (PlanWithoutDigest, "PlanWithoutDigest and control.proto differ in digest"),
        (PlanOfAnotherTier, "later.Plan.tier allows memory, redis; its class memory, disk"),
        (PlanWithOptionalDigest, "later.Plan.digest must be optional in control.proto"),
    ],
)
def test_a_class_and_a_message_that_differ_are_refused(later: type[Message], kind: type, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        codec.make_codec(kind, later)


def test_a_choice_outside_its_literal_is_refused_when_encoding(later: type[Message]) -> None:
    message = codec.make_codec(Plan, later)
    with pytest.raises(InvalidRequest, match="tier is 'disk'; memory, redis are allowed"):
        message.encode(dataclasses.replace(Plan(layers=()), tier="disk"))  # type: ignore[arg-type]
