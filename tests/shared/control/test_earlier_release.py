"""An upgrade across one release, workers first: what each end meets of the other's control protocol.

`earlier.binpb` is the earlier release's descriptor of `control.proto`, recorded from its generated code.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import grpc
import kvtest.control as kit
import pytest
import xxhash
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor

from kvferry.proto import control_pb2
from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.codec import DECODE, PREFILL
from kvferry.shared.control.server import REQUEST_ID_KEY, ControlServer
from kvferry.shared.errors import WorkerUnavailable

EARLIER = Path(__file__).parent / "earlier.binpb"


class EarlierSeal:
    """As that release computed seals."""

    def __init__(self, request_id: str) -> None:
        self.seed = xxhash.xxh3_64_intdigest(request_id.encode()) if request_id else 0

    def tag(self, message: bytes) -> bytes:
        checksum = xxhash.xxh3_64_intdigest(message, self.seed)
        self.seed = (self.seed + 1) % (1 << 64)
        return b"\xf9\x7f" + struct.pack("<Q", checksum)

    def close(self, message: bytes) -> bytes:
        return message + self.tag(message)

    def open(self, sealed: bytes) -> bytes:
        message = sealed[:-10]
        assert sealed[-10:] == self.tag(message)
        return message


@pytest.fixture(scope="module")
def earlier() -> Any:
    """The earlier release's messages, by name."""
    file = descriptor_pb2.FileDescriptorProto.FromString(EARLIER.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


def metadata(request_id: str = "") -> tuple[tuple[str, str], ...]:
    named = ((REQUEST_ID_KEY, request_id),) if request_id else ()
    return (*named, ("kvferry-sealed", "1"))


async def test_an_earlier_router_runs_turns_at_a_worker_of_today(server: ControlServer, earlier: Any) -> None:
    status_type = earlier["kvferry.control.v1.WorkerStatus"]
    event_type = earlier["kvferry.control.v1.GenerateEvent"]
    request_type = earlier["kvferry.control.v1.GenerateRequest"]
    async with grpc.aio.insecure_channel(server.address) as channel:
        status = channel.unary_unary(DECODE.methods["Status"].path)
        answer = await status(EarlierSeal("").close(b""), metadata=metadata())
        assert status_type.FromString(EarlierSeal("").open(answer)).ready
        sent = DECODE.methods["Generate"].request.encode(kit.generate_request("request-1"))
        request = request_type.FromString(sent)
        assert request.request_id == "request-1"
        call = channel.unary_stream(DECODE.methods["Generate"].path)(
            EarlierSeal("request-1").close(request.SerializeToString()), metadata=metadata("request-1")
        )
        seal = EarlierSeal("request-1")
        kinds = [event_type.FromString(seal.open(message)).WhichOneof("event") async for message in call]
    assert kinds[0] == "ticket_issued"
    assert kinds.count("token_generated") == 3
    assert "generation_finished" in kinds


async def test_an_earlier_routers_damaged_request_is_refused(server: ControlServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary(PREFILL.methods["AbortTurn"].path)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(EarlierSeal("a").close(b""), metadata=metadata("another"))
    assert "damaged" in (raised.value.details() or "")


async def test_a_worker_of_the_earlier_release_is_named() -> None:
    async def answer(data: bytes, context: Any) -> bytes:
        keys = {key for key, _ in context.invocation_metadata()}
        assert "kvferry-sealed" not in keys  # it would not take our seal for its own
        return control_pb2.WorkerStatus(instance_id="i", ready=True, protocol_version=3).SerializeToString()

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kvferry.control.v1.Decode", {"Status": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcDecodeClient(f"127.0.0.1:{port}")
    try:
        with pytest.raises(WorkerUnavailable, match="earlier release; workers are upgraded before routers"):
            await client.status(timeout_s=kit.WAIT_S)
    finally:
        await client.close()
        await server.stop(0)


def test_fields_of_the_earlier_release_have_their_number_and_type(earlier: Any) -> None:
    """A field may be added; one that is gone leaves its number reserved."""

    def shape(field: FieldDescriptor) -> tuple[Any, ...]:
        kind = field.message_type or field.enum_type
        return field.name, field.type, field.is_repeated, kind.full_name if kind is not None else ""

    today = {
        message.full_name: message for message in _all(control_pb2.DESCRIPTOR.message_types_by_name.values())
    }
    compared = 0
    for name, kind in earlier.items():
        new = today[name]
        reserved = descriptor_pb2.DescriptorProto()
        new.CopyToProto(reserved)
        for field in kind.DESCRIPTOR.fields:
            now = new.fields_by_number.get(field.number)
            if now is None:
                assert any(
                    interval.start <= field.number < interval.end for interval in reserved.reserved_range
                ), (
                    name,
                    field.name,
                )
            else:
                assert shape(now) == shape(field)
                compared += 1
    assert compared > 100


def _all(messages: Any) -> Any:
    for message in messages:
        yield message
        yield from _all(message.nested_types)
