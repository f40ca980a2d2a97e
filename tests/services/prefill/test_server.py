"""The worker's process, whole: real gRPC, real ZeroMQ, real metrics over HTTP, ended by a signal."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from kvtest.processes import started

from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.control.client import GrpcPrefillClient
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    PrefillRequest,
    SessionKey,
    Ticket,
    TransferDone,
)
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.wire.messages import BlockHeader, EndRecord, LayerHeader, Manifest, TransferKey
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.zmq import ZmqListeningChannel


class CountingSink:
    """Counts payload bytes; accepts everything."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.payload_bytes = 0
        self.ends: list[EndRecord] = []

    def open(self, manifest: Manifest) -> None:
        self.manifests.append(manifest)

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        pass

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        self.payload_bytes += len(payload)

    def commit(self, end: EndRecord) -> None:
        self.ends.append(end)

    def abort(self, key: TransferKey, reason: str) -> None:
        raise AssertionError(f"transfer {key} was aborted: {reason}")


@pytest.mark.timeout(180)
async def test_a_prompt_goes_through_the_process_and_a_signal_ends_it(tmp_path: Path) -> None:
    sink = CountingSink()
    decode = BlockServer(ZmqListeningChannel("tcp://127.0.0.1:0"), sink)
    options = ("--threads", "1", "--device", "cpu", "--max-model-len", "1024")
    with closing(decode), started(tmp_path, "prefill", *options) as wait:
        worker = await asyncio.to_thread(wait)
        info = worker.addresses
        assert info["service"] == "prefill"
        client = GrpcPrefillClient(info["address"])
        status = await client.status(timeout_s=30)
        assert status.model.max_model_len == 1024
        session = SessionKey(owner="k", session_id="s")
        prompt = tuple(range(20, 60))
        request = PrefillRequest(
            request_id="r1",
            model_fingerprint=status.model.fingerprint,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=4, temperature=0.0),
            ticket=Ticket(
                endpoint=decode.endpoint,
                transfer_id=7,
                generation=1,
                credit_bytes=1 << 20,
                lease_s=30,
                reserved_bytes=0,
                plan=resolve_plan(
                    plan_for("full"),
                    num_prompt_tokens=len(prompt),
                    max_new_tokens=4,
                    num_layers=status.model.num_layers,
                    head_dim=status.model.head_dim,
                ),
            ),
            session=session,
        )
        events = [event async for event in client.prefill(request, timeout_s=60)]
        done = events[-1]
        assert isinstance(done, TransferDone)
        assert sink.payload_bytes == done.bytes_by_kind["rows"] == 40 * status.model.kv_token_bytes
        assert sink.manifests[0].history_endpoint == info["blocks"]
        committed = await client.commit_turn(
            CommitTurnRequest(request_id="r1", session=session, token_ids=prompt), timeout_s=10
        )
        assert committed.num_tokens == 40
        url = f"http://{info['metrics']}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
        assert 'kvferry_prefill_tokens_total{model="demo"} 40.0' in text
        await client.close()
        worker.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.popen.wait, 30) == 0
