"""Every error class survives the way through a gRPC status."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared import errors
from kvferry.shared.control.seal import Seal
from kvferry.shared.control.status import CLASS_KEY, RETRY_AFTER_KEY, SEAL_KEY, from_status, to_status
from kvferry.shared.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    WorkerUnavailable,
)

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]
KINDS = [value for value in CLASSES if issubclass(value, KvferryError)]


def seal(call_id: str = "call") -> Seal:
    return Seal("/service/Method", call_id)


@given(
    st.sampled_from(KINDS),
    st.text(max_size=300),
    st.none() | st.text(max_size=60),
    st.from_regex(r"[a-z_]{1,20}", fullmatch=True),
    st.none() | st.floats(0, 1e9),
)
def test_class_and_fields_survive(
    kind: type[KvferryError], message: str, param: str | None, reason: str, retry_after_s: float | None
) -> None:
    error = kind(message, param=param, reason=reason, retry_after_s=retry_after_s)
    code, details, metadata = to_status(error, seal())
    assert code.name == kind.grpc_status
    back = from_status(code, details, metadata, peer="worker", seal=seal())
    assert type(back) is kind
    assert (back.message, back.param, back.reason, back.retry_after_s) == (
        message,
        param,
        reason,
        retry_after_s,
    )


def test_long_fields_are_cut_at_whole_characters() -> None:
    code, details, metadata = to_status(CapacityExceeded("é" * 9000, param="ü" * 9000), seal())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == "é" * 1000
    assert sum(len(key) + len(value) for key, value in metadata) < 1000


def test_a_class_outside_the_tree_travels_as_its_base() -> None:
    class ArenaFull(CapacityExceeded):
        pass

    code, details, metadata = to_status(ArenaFull("full"), seal())
    assert type(from_status(code, details, metadata, peer="worker", seal=seal())) is CapacityExceeded


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, WorkerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.INVALID_ARGUMENT, WorkerUnavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, WorkerUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, WorkerUnavailable),
        (grpc.StatusCode.UNKNOWN, WorkerUnavailable),
    ],
)
def test_a_status_of_grpc_itself_blames_no_client(code: grpc.StatusCode, kind: type[KvferryError]) -> None:
    error = from_status(code, "details", (), peer="worker:1", seal=seal())
    assert type(error) is kind
    assert error.message == f"worker:1 answered {code.name}: details"


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-1"])
def test_a_senseless_retry_after_is_dropped(text: str) -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    fields = ((CLASS_KEY, "CapacityExceeded"), (RETRY_AFTER_KEY, text))
    metadata = (*fields, (SEAL_KEY, seal().of_status(code.name, "m", fields)))
    error = from_status(code, "m", metadata, peer="w", seal=seal())
    assert type(error) is CapacityExceeded
    assert error.retry_after_s is None


@pytest.mark.parametrize("what", ["class", "details", "code", "call", "no seal"])
def test_a_status_that_is_not_what_was_sent_blames_nobody(what: str) -> None:
    code, details, metadata = to_status(InvalidRequest("temperature is -1", param="temperature"), seal())
    fields = dict(metadata)
    if what == "class":
        fields[CLASS_KEY] = "SessionNotFound"
    if what == "no seal":
        del fields[SEAL_KEY]
    error = from_status(
        grpc.StatusCode.NOT_FOUND if what == "code" else code,
        "another" if what == "details" else details,
        tuple(fields.items()),
        peer="w:1",
        seal=seal("other") if what == "call" else seal(),
    )
    assert (type(error), error.reason) == (WorkerUnavailable, "damaged")
