"""Generated rows on their way back to prefill: as the model made them, freed whatever happens."""

import asyncio
import contextlib
import threading

import pytest
import torch

from kvferry.kernels import dispatch
from kvferry.shared.control.messages import (
    GenerationFinished,
    HistoryReturned,
)
from kvferry.shared.wire.messages import TensorHeader
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

REBUDGETED = [
    {"method": "rdkv", "tokens": 5, "overrides": {"rebudget_tokens": 32, "window": 5}},
    {"method": "rocketkv", "tokens": 10, "overrides": {"rebudget_tokens": 32, "window": 5}},
    {"method": "snapkv-kivi", "tokens": 40, "overrides": {"rebudget_tokens": 32}},
]


class HistorySink:
    """A prefill worker's end of the history return."""

    def __init__(self):
        self.manifest = None
        self.headers = []
        self.tensors = {}
        self.committed = threading.Event()
        self.aborted = threading.Event()
        self.opened = threading.Event()
        self.proceed = threading.Event()
        self.proceed.set()

    def open(self, manifest):
        self.manifest = manifest
        self.headers = []
        self.opened.set()

    def begin_layer(self, key, header):
        assert header.layer == len(self.headers)
        self.headers.append(header)

    def write(self, header, payload):
        self.proceed.wait(20)
        name = self.headers[header.layer].tensors[header.tensor].name
        self.tensors.setdefault((header.layer, name), bytearray()).extend(payload)

    def commit(self, end):
        self.end = end
        self.committed.set()

    def abort(self, key, reason):
        self.aborted.set()


@contextlib.contextmanager
def history_server(made):
    sink = HistorySink()
    server = made.hub.server(sink)
    try:
        yield sink, server.endpoint
    finally:
        sink.proceed.set()
        server.close()


async def generated(made, request, endpoint, *, timeout_s, credit_bytes=1 << 20):
    """The stream of a request whose answer is whole, and whose rows go back to this endpoint."""
    stream = made.service.generate(request, timeout_s=timeout_s)
    ticket = (await anext(stream)).ticket
    await asyncio.to_thread(
        made.shipper.ship, request, ticket, history_endpoint=endpoint, history_credit_bytes=credit_bytes
    )
    while not isinstance(await anext(stream), GenerationFinished):
        pass
    return stream


async def test_closing_a_stream_that_returns_history_aborts_the_return_and_frees_it(harness, request_of):
    made = await harness()
    with history_server(made) as (sink, endpoint):
        sink.proceed.clear()
        request = request_of(store_history=True, max_tokens=5)
        # the end cannot be under way yet when the stream closes: the credit is spent long before
        stream = await generated(made, request, endpoint, timeout_s=30, credit_bytes=64)
        await asyncio.to_thread(sink.opened.wait, 10)
        await stream.aclose()
        assert await made.arena_is_free()
        sink.proceed.set()
        assert await asyncio.to_thread(sink.aborted.wait, 10)
        assert not sink.committed.is_set()
    assert made.value("history_returned_bytes_total") == 0


async def test_returns_that_wait_for_a_thread_are_freed_when_their_stream_closes(harness, request_of):
    made = await harness(history_threads=1)
    with history_server(made) as (sink, endpoint):
        sink.proceed.clear()
        streams = []
        for i in range(2):
            request = request_of(store_history=True, max_tokens=5, request_id=str(i))
            streams.append(await generated(made, request, endpoint, timeout_s=30))
        assert made.service.arena.bytes_by_state()["running"] > 0
        await streams[1].aclose()
        assert await made.arena_is_free()
        sink.proceed.set()
        assert (await anext(streams[0])).num_tokens == 4


async def test_a_stalled_prefill_worker_delays_no_return_to_another(harness, request_of):
    made = await harness(history_threads=1, history_timeout_s=200.0)
    with history_server(made) as (stalled, stalled_at), history_server(made) as (_, other_at):
        stalled.proceed.clear()
        streams = []
        for number in range(3):
            request = request_of(store_history=True, max_tokens=5, request_id=f"stalled-{number}")
            streams.append(await generated(made, request, stalled_at, timeout_s=200))
        for number in range(4):
            request = request_of(store_history=True, max_tokens=5, request_id=str(number))
            running = made.run(request, history_endpoint=other_at, history_credit_bytes=1 << 20)
            _, events = await asyncio.wait_for(running, 60)
            assert next(e for e in events if isinstance(e, HistoryReturned)).num_tokens == 4
        stalled.proceed.set()
        for stream in streams:
            assert (await anext(stream)).num_tokens == 4


async def test_returned_rows_of_an_evicting_cache_are_counted_beside_it(harness, request_of):
    made = await harness()
    prompt = [i * 7 % 50 for i in range(100)]
    sizes = {}
    for store_history in (False, True):
        request = request_of(prompt, method="d2o", tokens=16, max_tokens=6, store_history=store_history)
        with history_server(made) as (_, endpoint):
            _, events = await made.run(request, history_endpoint=endpoint, history_credit_bytes=1 << 20)
        sizes[store_history] = next(e.cache_bytes for e in events if isinstance(e, GenerationFinished))
    # layers, K and V, heads, rows, head_dim, bytes
    assert sizes[True] - sizes[False] == 2 * 2 * 2 * 5 * 8 * 4


@pytest.mark.parametrize(
    "method", ["full", "rocketkv", "rdkv", "h2o", "d2o", "adakv", "snapkv-think", "snapkv-kivi"]
)
async def test_generated_rows_return_to_prefill_as_the_model_made_them(
    harness, request_of, small_model, method
):
    made = await harness()
    prompt = [i * 7 % 50 for i in range(100)]
    tokens = None if method == "full" else 16
    request = request_of(prompt, method=method, tokens=tokens, max_tokens=6, store_history=True)
    session = OracleSession()
    OneProcessGenerator(small_model()).generate(
        prompt, plan=request.plan, sampling=request.sampling, session=session
    )
    with history_server(made) as (sink, endpoint):
        _, events = await made.run(request, history_endpoint=endpoint, history_credit_bytes=1 << 20)
        assert [type(e) for e in events[-2:]] == [GenerationFinished, HistoryReturned]
        assert events[-1].num_tokens == 5
        assert sink.committed.is_set()
    assert (sink.manifest.purpose, sink.manifest.start, sink.manifest.num_tokens) == ("history", 100, 5)
    assert sink.manifest.num_layers == len(sink.headers) == 2
    assert (sink.manifest.layer_rows, sink.manifest.plan_digest) == ((), "")
    rows = tuple(TensorHeader(name=kind, dtype="float32", shape=(2, 5, 8)) for kind in ("keys", "values"))
    assert all(header.tensors == rows for header in sink.headers)
    assert sink.end.first_token is None
    for layer, (keys, values) in session.layers.items():
        for name, full in (("keys", keys), ("values", values)):
            sent = torch.frombuffer(sink.tensors[layer, name], dtype=torch.float32).view(2, 5, 8)
            # C code, by which decode may attend, sums in another order than torch
            torch.testing.assert_close(sent, full[:, 100:], rtol=1e-5, atol=1e-5)
    assert made.value("history_returned_bytes_total", model="small") == 5 * 256
    assert await made.arena_is_free()


@pytest.fixture
def in_torch():
    """C code's sums have another order than the oracle's, so bits could differ."""
    dispatch.configure("torch", torch.device("cpu"))
    yield
    dispatch.configure("auto", torch.device("cpu"))


@pytest.mark.covering(1)
@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("max_tokens", [33, 34, 66])
@pytest.mark.parametrize("rebudgeted", REBUDGETED, ids=lambda options: options["method"])
async def test_rows_of_packed_and_dropped_tokens_return_to_prefill_as_the_model_made_them(
    harness, request_of, small_model, rebudgeted, max_tokens
):
    made = await harness()
    prompt = [i * 7 % 50 for i in range(150)]
    request = request_of(prompt, **rebudgeted, max_tokens=max_tokens, store_history=True)
    session = OracleSession()
    OneProcessGenerator(small_model()).generate(
        prompt, plan=request.plan, sampling=request.sampling, session=session
    )
    with history_server(made) as (sink, endpoint):
        await made.run(request, timeout_s=120, history_endpoint=endpoint, history_credit_bytes=1 << 20)
        assert sink.committed.is_set()
    num_tokens = max_tokens - 1
    assert sink.manifest.num_tokens == num_tokens
    for layer, (keys, values) in session.layers.items():
        for name, full in (("keys", keys), ("values", values)):
            sent = torch.frombuffer(sink.tensors[layer, name], dtype=torch.float32).view(2, -1, 8)
            assert torch.equal(sent, full[:, 150:])
    assert await made.arena_is_free()


async def test_a_completion_of_one_token_has_no_rows_to_return(harness, request_of):
    made = await harness()
    with history_server(made) as (sink, endpoint):
        _, events = await made.run(
            request_of(max_tokens=1, store_history=True), history_endpoint=endpoint, history_credit_bytes=1
        )
        assert events[-1] == HistoryReturned(num_tokens=0)
        assert sink.manifest is None
    assert await made.arena_is_free()


async def test_a_return_that_fails_is_no_error_for_the_client(harness, request_of):
    made = await harness()
    _, events = await made.run(
        request_of(store_history=True), history_endpoint="inproc://nobody", history_credit_bytes=1 << 20
    )
    assert events[-1] == HistoryReturned(num_tokens=0)
    assert await made.arena_is_free()


async def test_a_probes_return_moves_no_byte_counter(harness, request_of):
    made = await harness()
    with history_server(made) as (_, endpoint):
        _, events = await made.run(
            request_of(store_history=True, probe=True),
            history_endpoint=endpoint,
            history_credit_bytes=1 << 20,
        )
    assert events[-1].num_tokens == 7
    assert made.value("history_returned_bytes_total") == 0
