"""Manifest, layer, end, nack and abort payloads: strict, bounded, and never another exception."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.shared.errors import (
    CapacityExceeded,
    KvferryError,
    LeaseExpired,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.frames import (
    decode_abort,
    decode_end,
    decode_layer,
    decode_manifest,
    decode_nack,
    encode_abort,
    encode_end,
    encode_layer,
    encode_manifest,
    encode_nack,
)
from kvferry.shared.wire.messages import (
    MAX_LAYER_TENSORS,
    MAX_MANIFEST_BYTES,
    TENSOR_DTYPE_BYTES,
    EndRecord,
    LayerHeader,
    Manifest,
    TensorHeader,
    TransferKey,
)

KEY = TransferKey(transfer_id=2**64 - 1, generation=2**32 - 1)
MANIFEST = Manifest(
    purpose="cache",
    key=KEY,
    request_id="r-1",
    model_fingerprint="f" * 64,
    dtype="bfloat16",
    num_layers=2,
    num_kv_heads=8,
    head_dim=128,
    start=0,
    num_tokens=70_000,
    plan_digest="0123456789abcdef" * 4,
    layer_rows=(1024, 0),
    history_endpoint="tcp://prefill:5000",
    history_credit_bytes=1 << 20,
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    retained_transfer_id=2**64 - 1,
    retained_tokens=512,
    retained_depth=8,
)
LAYER = LayerHeader(
    layer=1023,
    tensors=(
        TensorHeader(name="index", dtype="int32", shape=(8, 1024)),
        TensorHeader(name="keys", dtype="bfloat16", shape=(8, 1024, 128)),
        TensorHeader(name="values", dtype="bfloat16", shape=(8, 1024, 128)),
        TensorHeader(name="state", dtype="float32", shape=(0,)),
    ),
)
END = EndRecord(
    key=KEY,
    num_blocks=9,
    payload_bytes=2**40,
    first_token=SampledToken(token_id=3, index=0, logprob=-0.5, top_logprobs=((3, -0.5), (9, -math.inf))),
)
names = st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True)
layers = st.builds(
    lambda layer, tensors: LayerHeader(
        layer=layer,
        tensors=tuple(
            TensorHeader(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in tensors.items()
        ),
    ),
    st.integers(0, 1023),
    st.dictionaries(
        names,
        st.tuples(
            st.sampled_from(list(TENSOR_DTYPE_BYTES)),
            st.lists(st.integers(0, 2**11), max_size=4).map(tuple),
        ),
        max_size=MAX_LAYER_TENSORS,
    ),
)


def as_dict(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)


@pytest.mark.parametrize("layer_rows", [(), (0, 0), (4096, 0), (1, 2**31 - 1)])
@pytest.mark.parametrize("plan_digest", ["", "0af9" * 32])
def test_manifest_survives_the_wire(layer_rows: tuple[int, ...], plan_digest: str) -> None:
    manifest = replace(MANIFEST, layer_rows=layer_rows, plan_digest=plan_digest)
    assert decode_manifest(memoryview(encode_manifest(manifest))) == manifest


@pytest.mark.parametrize("transfer_id", [0, 1])
def test_a_delta_names_the_transfer_whose_rows_it_leaves_out(transfer_id: int) -> None:
    manifest = replace(MANIFEST, retained_transfer_id=transfer_id)
    assert decode_manifest(encode_manifest(manifest)).retained_transfer_id == transfer_id


@given(layers)
def test_any_layer_header_survives_the_wire(layer: LayerHeader) -> None:
    assert decode_layer(memoryview(encode_layer(layer))) == layer


def test_the_longest_layer_header_fits() -> None:
    tensors = tuple(
        TensorHeader(name=f"{number:a>32}", dtype="bfloat16", shape=(2**31 - 1, 2**16, 1, 0))
        for number in "abcdefghijklmnop"
    )
    layer = LayerHeader(layer=1023, tensors=tensors)
    assert len(tensors) == MAX_LAYER_TENSORS
    assert decode_layer(encode_layer(layer)) == layer


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
        ("num_layers", 0),
        ("num_layers", 1),
        ("num_layers", 1025),
        ("num_layers", True),
        ("layer_rows", [1]),
        ("layer_rows", [1, -1]),
        ("layer_rows", [1, 2**31]),
        ("layer_rows", [1] * 1025),
        ("layer_rows", "11"),
        ("plan_digest", "xyz"),
        ("plan_digest", "ABCDEF"),
        ("plan_digest", "0" * 129),
        ("plan_digest", None),
        ("retained_transfer_id", -1),
        ("retained_tokens", -1),
        ("retained_depth", 33),
        ("retained_depth", -1),
        ("traceparent", "0" * 1025),
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
    body = as_dict(encode_manifest(MANIFEST)) | {field: value}
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
    body["key"]["weights"] = b"x"
    with pytest.raises(ProtocolMismatch, match="does not know"):
        decode_manifest(msgspec.msgpack.encode(body))
    body = as_dict(encode_layer(LAYER))
    body["tensors"][1]["kind"] = "rows"
    with pytest.raises(ProtocolMismatch, match="does not know"):
        decode_layer(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "Keys"),
        ("name", "1st"),
        ("name", "a\n"),
        ("name", "a" * 33),
        ("name", None),
        ("dtype", "float64"),
        ("dtype", "torch.int32"),
        ("dtype", 4),
        ("shape", [8, -1]),
        ("shape", [2**31]),
        ("shape", [1, 1, 1, 1, 1]),
        ("shape", [2.0]),
        ("shape", [True]),
        ("shape", "8"),
        ("unknown", 1),
    ],
)
def test_a_wrong_tensor_header_is_refused(field: str, value: Any) -> None:
    body = as_dict(encode_layer(LAYER))
    body["tensors"][1][field] = value
    with pytest.raises(ProtocolMismatch) as refused:
        decode_layer(msgspec.msgpack.encode(body))
    assert refused.value.reason == "malformed"


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer", -1), ("layer", 1024), ("layer", None), ("tensors", None), ("tensors", [[]]), ("rows", 3)],
)
def test_a_wrong_layer_header_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ProtocolMismatch) as refused:
        decode_layer(msgspec.msgpack.encode(as_dict(encode_layer(LAYER)) | {field: value}))
    assert refused.value.reason == "malformed"


@pytest.mark.parametrize(
    "layer",
    [
        replace(LAYER, layer=1024),
        replace(
            LAYER,
            tensors=tuple(
                TensorHeader(name=f"t{n}", dtype="uint8", shape=(1,)) for n in range(MAX_LAYER_TENSORS + 1)
            ),
        ),
        replace(LAYER, tensors=(replace(LAYER.tensors[0], name="no name"),)),
    ],
)
def test_a_layer_header_out_of_range_is_refused_at_both_ends(layer: LayerHeader) -> None:
    with pytest.raises(ProtocolMismatch) as refused:
        encode_layer(layer)
    assert refused.value.reason == "malformed"
    with pytest.raises(ProtocolMismatch):
        decode_layer(msgspec.msgpack.encode(layer))


@pytest.mark.parametrize("field", ["layer", "tensors"])
def test_a_missing_layer_field_is_refused(field: str) -> None:
    body = as_dict(encode_layer(LAYER))
    del body[field]
    with pytest.raises(ProtocolMismatch):
        decode_layer(msgspec.msgpack.encode(body))


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 0}, r"num_kv_heads is 0; Expected `int` >= 1"),
        ({"head_dim": 4097}, r"head_dim is 4097; Expected `int` <= 4096"),
        ({"purpose": "weights"}, r"purpose is 'weights'; Invalid enum value"),
        ({"layer_rows": [1, -1]}, r"layer_rows is \[1, -1\]; Expected `int` >= 0"),
        (
            {"key": {"transfer_id": 1, "generation": 2**32}},
            r"key.generation is 4294967296; Expected `int` <=",
        ),
    ],
)
def test_a_refusal_names_the_field_its_value_and_what_is_allowed(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProtocolMismatch, match=message):
        decode_manifest(msgspec.msgpack.encode(as_dict(encode_manifest(MANIFEST)) | changes))


def test_records_too_large_are_refused() -> None:
    with pytest.raises(ProtocolMismatch, match="at most"):
        decode_manifest(bytes(MAX_MANIFEST_BYTES + 1))
    with pytest.raises(ProtocolMismatch, match="at most"):
        decode_layer(bytes(4097))
    assert END.first_token is not None
    huge = replace(END.first_token, top_logprobs=((2**20, -0.5),) * (MAX_MANIFEST_BYTES // 8))
    with pytest.raises(ProtocolMismatch, match="at most"):
        encode_end(replace(END, first_token=huge))


@given(st.binary(max_size=200))
@example(b"\x91" * 100_000)
@example(b"\x81\xa1a" * 50_000 + b"\xc0")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\x81\xa1\xff\xc0")
@example(b"\x81\x91\x01\xc0")
def test_random_bytes_raise_nothing_but_mismatches(payload: bytes) -> None:
    for decode in (decode_manifest, decode_layer, decode_end, decode_nack, decode_abort):
        with pytest.raises(ProtocolMismatch):
            decode(payload)


@given(st.data())
def test_damaged_records_decode_or_are_refused(data: st.DataObject) -> None:
    def damaged(payload: bytes) -> bytes:
        raw = bytearray(payload)
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        return bytes(raw)

    with contextlib.suppress(ProtocolMismatch):
        manifest = decode_manifest(damaged(encode_manifest(MANIFEST)))
        assert decode_manifest(encode_manifest(manifest)) == manifest
    with contextlib.suppress(ProtocolMismatch):
        layer = decode_layer(damaged(encode_layer(LAYER)))
        assert decode_layer(encode_layer(layer)) == layer


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
