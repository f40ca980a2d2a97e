"""Manifest, end, nack and abort payloads: strict, bounded, and never another exception."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvferry.shared.compression.plan import Budget, CompressionPlan, LayerPlan, Part, ResolvedPlan
from kvferry.shared.errors import (
    CapacityExceeded,
    KvferryError,
    LeaseExpired,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.messages import MAX_MANIFEST_BYTES, EndRecord, Manifest, TransferKey
from kvferry.shared.wire.records import (
    decode_abort,
    decode_end,
    decode_manifest,
    decode_nack,
    encode_abort,
    encode_end,
    encode_manifest,
    encode_nack,
)

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

KEY = TransferKey(transfer_id=2**64 - 1, generation=2**32 - 1)
PLAN = CompressionPlan(
    method="rocketkv",
    scorer=Part(name="snapkv", params={"window": 32, "share": 0.5, "pool": True, "kernel": "max"}),
    attention=Part(name="hsa", params={}),
    budget=Budget(tokens=512),
    skip_layers=(0,),
)
MANIFEST = Manifest(
    purpose="cache",
    key=KEY,
    request_id="r-1",
    model_fingerprint="f" * 64,
    dtype="bfloat16",
    num_kv_heads=8,
    head_dim=128,
    start=0,
    num_tokens=70_000,
    layer_rows=(1024, 0),
    resolved=ResolvedPlan(
        plan=PLAN,
        method="rocketkv",
        num_prompt_tokens=70_000,
        max_new_tokens=64,
        layers=(
            LayerPlan(
                rows=1024,
                attention=Part(name="hsa", params={"page_size": 4, "num_channels": 32, "num_tokens": 256}),
            ),
            LayerPlan(rows=0),
        ),
    ),
    history_endpoint="tcp://prefill:5000",
    history_credit_bytes=1 << 20,
)
END = EndRecord(
    key=KEY,
    num_blocks=9,
    payload_bytes=2**40,
    first_token=SampledToken(token_id=3, index=0, logprob=-0.5, top_logprobs=((3, -0.5), (9, -math.inf))),
)
params = st.dictionaries(
    st.text(max_size=8),
    st.one_of(
        st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans(), st.text(max_size=8)
    ),
    max_size=4,
)


def as_dict(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)


@pytest.mark.parametrize("layer_packed_bytes", [(), (0, 0), (4096, 0), (1, 2**40)])
def test_manifest_survives_the_wire(layer_packed_bytes: tuple[int, ...]) -> None:
    manifest = replace(MANIFEST, layer_packed_bytes=layer_packed_bytes)
    assert decode_manifest(memoryview(encode_manifest(manifest))) == manifest


@UNTIMED
@given(params, st.integers(0, 2**64 - 1), st.lists(st.integers(0, 1 << 20), min_size=1, max_size=80))
def test_any_plan_parameters_survive_the_wire(
    values: dict[str, Any], transfer_id: int, rows: list[int]
) -> None:
    plan = CompressionPlan(method="m", scorer=Part(name="s", params=values), budget=Budget(retention=1))
    resolved = ResolvedPlan(
        plan=plan,
        method="m",
        num_prompt_tokens=1,
        max_new_tokens=1,
        layers=tuple(LayerPlan(rows=count) for count in rows),
    )
    key = TransferKey(transfer_id=transfer_id, generation=0)
    manifest = replace(MANIFEST, key=key, layer_rows=tuple(rows), resolved=resolved)
    back = decode_manifest(encode_manifest(manifest))
    assert back == manifest
    assert back.resolved is not None
    assert back.resolved.plan.scorer is not None
    assert [type(value) for value in back.resolved.plan.scorer.params.values()] == [
        type(value) for value in values.values()
    ]


@pytest.mark.parametrize("token", [None, SampledToken(token_id=0, index=0, logprob=0), END.first_token])
def test_end_record_survives_the_wire(token: SampledToken | None) -> None:
    end = replace(END, first_token=token)
    assert decode_end(encode_end(end)) == end


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("purpose", "weights"),
        ("dtype", "int8"),
        ("num_kv_heads", 0),
        ("num_kv_heads", 2**40),
        ("num_kv_heads", True),
        ("num_kv_heads", 8.0),
        ("head_dim", -1),
        ("start", -1),
        ("num_tokens", 2**31),
        ("layer_rows", []),
        ("layer_rows", [1, -1]),
        ("layer_rows", [1] * 1025),
        ("layer_rows", [2**31 - 1] * 1024),
        ("layer_rows", "11"),
        ("layer_packed_bytes", [1]),
        ("layer_packed_bytes", [1, -1]),
        ("layer_packed_bytes", [1, 2**48]),
        ("layer_packed_bytes", "11"),
        ("resolved", {"plan": None}),
        ("key", {"transfer_id": 2**64 - 1, "generation": 2**32}),
        ("key", {"transfer_id": -1, "generation": 0}),
        ("request_id", "r" * 1025),
        ("request_id", None),
        ("history_endpoint", 5),
        ("history_credit_bytes", -1),
        ("unknown", 1),
    ],
)
def test_a_wrong_manifest_field_is_refused(field: str, value: Any) -> None:
    body = as_dict(encode_manifest(replace(MANIFEST, resolved=None))) | {field: value}
    with pytest.raises(ProtocolMismatch) as refused:
        decode_manifest(msgspec.msgpack.encode(body))
    assert refused.value.reason == "malformed"


@pytest.mark.parametrize("field", [*as_dict(encode_manifest(MANIFEST))])
def test_a_missing_manifest_field_is_refused(field: str) -> None:
    body = as_dict(encode_manifest(MANIFEST))
    del body[field]
    with pytest.raises(ProtocolMismatch):
        decode_manifest(msgspec.msgpack.encode(body))


def test_unknown_fields_are_refused_at_every_depth() -> None:
    body = as_dict(encode_manifest(MANIFEST))
    body["resolved"]["plan"]["scorer"]["weights"] = b"x"
    with pytest.raises(ProtocolMismatch, match="does not know"):
        decode_manifest(msgspec.msgpack.encode(body))


def test_a_plan_that_validates_itself_is_refused_as_a_mismatch() -> None:
    body = as_dict(encode_manifest(MANIFEST))
    body["resolved"]["plan"]["budget"] = {"tokens": 0, "retention": None}
    with pytest.raises(ProtocolMismatch, match="token_budget is 0"):
        decode_manifest(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "token",
    [
        {"token_id": -1, "index": 0, "logprob": None, "top_logprobs": []},
        {"token_id": 1, "index": 0, "logprob": math.nan, "top_logprobs": []},
        {"token_id": 1, "index": 0, "logprob": None, "top_logprobs": [[1, math.nan]]},
        {"token_id": 1, "index": 0, "logprob": None, "top_logprobs": [[1]]},
    ],
)
def test_a_wrong_first_token_is_refused(token: dict[str, Any]) -> None:
    body = as_dict(encode_end(END)) | {"first_token": token}
    with pytest.raises(ProtocolMismatch):
        decode_end(msgspec.msgpack.encode(body))


def test_records_too_large_are_refused() -> None:
    with pytest.raises(ProtocolMismatch, match="at most"):
        decode_manifest(bytes(MAX_MANIFEST_BYTES + 1))
    huge = replace(PLAN, method="m" * MAX_MANIFEST_BYTES)
    assert MANIFEST.resolved is not None
    with pytest.raises(ProtocolMismatch, match="at most"):
        encode_manifest(replace(MANIFEST, resolved=replace(MANIFEST.resolved, plan=huge)))


@UNTIMED
@given(st.binary(max_size=200))
@example(b"\x91" * 100_000)
@example(b"\x81\xa1a" * 50_000 + b"\xc0")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\x81\xa1\xff\xc0")
@example(b"\x81\x91\x01\xc0")
def test_random_bytes_raise_nothing_but_mismatches(payload: bytes) -> None:
    for decode in (decode_manifest, decode_end, decode_nack, decode_abort):
        with pytest.raises(ProtocolMismatch):
            decode(payload)


@UNTIMED
@given(st.data())
def test_damaged_manifests_decode_or_are_refused(data: st.DataObject) -> None:
    raw = bytearray(encode_manifest(MANIFEST))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        manifest = decode_manifest(bytes(raw))
    except ProtocolMismatch:
        return
    assert decode_manifest(encode_manifest(manifest)) == manifest


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (LeaseExpired("m", reason="lease"), LeaseExpired, "lease"),
        (ProtocolMismatch("m", reason="fingerprint"), ProtocolMismatch, "fingerprint"),
        (CapacityExceeded("m", reason="arena_full"), TransferFailed, "arena_full"),
        (TransferFailed("m" * 10_000, reason="Not A Label"), TransferFailed, "other"),
    ],
)
def test_nack_carries_class_and_reason(error: KvferryError, kind: type[KvferryError], reason: str) -> None:
    back = decode_nack(encode_nack(error))
    assert type(back) is kind
    assert back.reason == reason
    assert error.message.startswith(back.message)


def test_nack_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProtocolMismatch, match="kind is 'SystemExit'"):
        decode_nack(msgspec.msgpack.encode({"kind": "SystemExit", "reason": "x", "message": ""}))


def test_abort_carries_its_reason() -> None:
    assert decode_abort(encode_abort("client_left")) == "client_left"
    assert decode_abort(encode_abort("\n" * 9000)) == "other"
