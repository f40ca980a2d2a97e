"""Services that are told to end while requests run: two workers of each role and a router, as processes.

No token is lost or doubled, no client sees an error, and what a worker's memory has outlives it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import kvtest.control as kit
import pytest
from kvtest.documents import make_document
from kvtest.processes import Process, started
from kvtest.waiting import until

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.messages import TicketIssued
from kvferry.shared.errors import WorkerUnavailable
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.question import find_question
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

# Workers that a test stops are gone for those after it.
pytestmark = pytest.mark.random_order(disabled=True)

NUM_STREAMS = 32
NUM_PROMPTS = 4
NUM_TOKENS = 40
WAIT_S = 120.0
"""Far more than anything here takes."""


@dataclass(kw_only=True)
class Services:
    prefill: list[Process]
    decode: list[Process]
    router: Process

    @property
    def url(self) -> str:
        return f"http://{self.router.addresses['address']}"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with running(tmp_path_factory.mktemp("drain"), WAIT_S) as services:
        yield services


@contextmanager
def running(folder: Path, shutdown_timeout_s: float) -> Iterator[Services]:
    """Args: shutdown_timeout_s: of the workers."""
    common = ("--threads", "1", "--shutdown-timeout-s", str(shutdown_timeout_s))
    disk = ("--history-disk", str(folder / "history"), "--history-disk-bytes", "1GiB")
    with ExitStack() as stack:
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
        waits = [
            stack.enter_context(started(folder, name, *common, *(disk if name.startswith("prefill") else ())))
            for name in names
        ]
        workers = [wait() for wait in waits]
        addresses = [worker.addresses["address"] for worker in workers]
        options = (
            "--shutdown-timeout-s",
            str(WAIT_S),
            "--prefill-workers",
            ",".join(addresses[:2]),
            "--decode-workers",
            ",".join(addresses[2:]),
        )
        router = stack.enter_context(started(folder, "router", "--listen", "127.0.0.1:0", *options))()
        services = Services(prefill=workers[:2], decode=workers[2:], router=router)
        until(lambda: httpx.get(f"{services.url}/ready", timeout=30).status_code == 200)
        until(lambda: all(ready(worker) for worker in workers))
        yield services


def ready(worker: Process) -> bool:
    return httpx.get(f"http://{worker.addresses['metrics']}/ready", timeout=30).status_code == 200


def request(index: int) -> dict[str, Any]:
    """Every second one is of a session, and every second prompt is compressed."""
    document = make_document(index % NUM_PROMPTS, num_words=120)
    method = {"method": "rdkv", "token_budget": 64} if index % 2 else {"method": "full"}
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"{document.text} {document.questions[0][0]}"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "kv_compression": method,
        **({"session_id": f"s{index}", "session_mode": "append"} if index % 4 < 2 else {}),
    }


Say = Callable[[int, int], str]


@pytest.fixture(scope="module")
def say(demo_model_dir: Path) -> Say:
    """What one process says to a request, in so many tokens."""
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    generator = OneProcessGenerator(model)
    tokenizer = ChatTokenizer.load(demo_model_dir)

    def answer(index: int, num_tokens: int) -> str:
        messages = request(index)["messages"]
        ids = tokenizer.render(messages)
        plan = plan_for("rdkv", budget=Budget(tokens=64)) if index % 2 else plan_for("full")
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        assembler = TextAssembler(tokenizer)
        question = find_question(tokenizer, messages, ids)
        tokens = generator.generate(ids, plan=plan, sampling=sampling, question=question)
        return "".join(assembler.push(token.token_id).text for token in tokens) + assembler.flush()

    return answer


@pytest.fixture(scope="module")
def expected(say: Say) -> list[str]:
    """To each prompt."""
    return [say(index, NUM_TOKENS) for index in range(NUM_PROMPTS)]


def stream(url: str, body: dict[str, Any], on_token: Callable[[], None] = lambda: None) -> str:
    pieces = []
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=WAIT_S
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            assert '"error"' not in line, line
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if piece := choice["delta"].get("content"):
                        pieces.append(piece)
                        on_token()
    return "".join(pieces)


def end(process: Process) -> None:
    process.popen.send_signal(signal.SIGTERM)


def test_workers_leave_under_32_streams(services: Services, expected: list[str]) -> None:
    """A prefill and a decode worker leave while a third of the streams have tokens and the others begin."""
    num_tokens, enough = threading.Semaphore(0), NUM_STREAMS // 3
    leaving = (services.prefill[0], services.decode[0])
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams: list[Future[str]] = [
            pool.submit(stream, services.url, request(index), num_tokens.release)
            for index in range(NUM_STREAMS)
        ]
        for _ in range(enough):
            assert num_tokens.acquire(timeout=WAIT_S)
        until(lambda: all(worker.metric("kvferry_decode_batch_size") for worker in services.decode))
        for worker in leaving:
            end(worker)
        texts = [future.result(WAIT_S) for future in streams]
    assert texts == [expected[index % NUM_PROMPTS] for index in range(NUM_STREAMS)]
    assert [worker.popen.wait(WAIT_S) for worker in leaving] == [0, 0]
    # They ended where they ran; nothing was computed twice.
    assert services.router.metric("kvferry_recoveries_total") == 0
    # The next turn of each session finds what the worker that left had in memory.
    for index in range(NUM_STREAMS):
        body = request(index)
        if "session_id" in body:
            follow = {**body, "messages": [{"role": "user", "content": "who"}], "max_tokens": 2}
            answer = httpx.post(f"{services.url}/v1/chat/completions", json=follow, timeout=WAIT_S).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100, answer


def test_a_router_leaves_when_its_streams_have_ended(services: Services, expected: list[str]) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=services.url, timeout=WAIT_S) as client:
        body = {**request(0), "max_tokens": 400, "session_id": "long"}
        running = pool.submit(stream, services.url, body, begun.set)
        assert begun.wait(WAIT_S)
        end(services.router)
        until(lambda: client.get("/ready").status_code == 503)
        refused = client.post("/v1/chat/completions", json=request(0))
        assert not running.done()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "is to end" in refused.json()["error"]["message"]
        assert running.result(WAIT_S).startswith(expected[0])
    assert services.router.popen.wait(WAIT_S) == 0


def test_a_second_signal_ends_a_worker_at_once(services: Services) -> None:
    worker = services.decode[1]

    async def drain() -> None:
        client = GrpcDecodeClient(worker.addresses["address"])
        try:
            model = (await client.status(timeout_s=WAIT_S)).model
            asked = replace(kit.generate_request("open"), model_fingerprint=model.fingerprint)
            async with aclosing(client.generate(asked, timeout_s=WAIT_S)) as events:
                assert isinstance(await anext(events), TicketIssued)
                end(worker)
                while not (status := await client.status(timeout_s=WAIT_S)).draining:
                    await asyncio.sleep(0.01)
                assert not status.ready
                with pytest.raises(WorkerUnavailable, match="decode worker is to end") as raised:
                    await anext(client.generate(asked, timeout_s=WAIT_S))
                assert raised.value.reason == "draining"
                assert worker.popen.poll() is None
                end(worker)
                with pytest.raises(WorkerUnavailable):
                    await anext(events)
        finally:
            await client.close()

    asyncio.run(drain())
    assert worker.popen.wait(WAIT_S) == -signal.SIGTERM


def test_streams_that_are_left_when_the_time_is_over_go_on_at_other_workers(say: Say, tmp_path: Path) -> None:
    """Pinned sessions, too. Next turns of those whose turns had ended find what the prefill worker that left
    had in memory; of the others it may be lost, with what their turns had staged there."""
    indices, num_tokens = (0, 2), 400
    texts = {index: say(index, num_tokens) for index in {index % NUM_PROMPTS for index in indices}}

    def pinned(body: dict[str, Any], session: str, max_tokens: int) -> dict[str, Any]:
        session_fields = {"session_id": session, "session_mode": "append", "session_pin": True}
        return {**body, "max_tokens": max_tokens, **session_fields}

    with running(tmp_path, 0.05) as services, ThreadPoolExecutor(2 * len(indices)) as pool:

        def next_turn(session: str) -> int:
            """How many of its tokens had KV."""
            body = {**request(0), "messages": [{"role": "user", "content": "who"}]}
            path = f"{services.url}/v1/chat/completions"
            answer = httpx.post(path, json=pinned(body, session, 2), timeout=WAIT_S).json()
            found = httpx.get(f"{services.url}/v1/sessions/{session}", timeout=WAIT_S).json()
            assert found["turns"] == 2, (answer, found)
            num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return num_cached

        # of documents of their own, whose KV no other session has
        ended = [f"ended-{number}" for number in range(4)]
        for number, session in enumerate(ended):
            text = make_document(NUM_PROMPTS + number, num_words=120).text
            body = {**request(0), "messages": [{"role": "user", "content": text}]}
            assert stream(services.url, pinned(body, session, 2))
        # where they are depends on the workers' addresses
        prefill = max(services.prefill, key=lambda worker: worker.metric("kvferry_history_bytes"))
        assert prefill.metric("kvferry_history_bytes") > 0
        begun = {f"{index}-{copy}": threading.Event() for index in indices for copy in range(2)}
        streams = {
            name: pool.submit(
                stream, services.url, pinned(request(int(name[0])), name, num_tokens), event.set
            )
            for name, event in begun.items()
        }
        assert all(event.wait(WAIT_S) for event in begun.values())
        until(lambda: all(worker.metric("kvferry_decode_batch_size") for worker in services.decode))
        leaving = (prefill, services.decode[0])
        for worker in leaving:
            end(worker)
        for name, future in streams.items():
            assert future.result(WAIT_S) == texts[int(name[0]) % NUM_PROMPTS], name
        assert [worker.popen.wait(WAIT_S) for worker in leaving] == [0, 0]
        assert services.router.metric("kvferry_recoveries_total") > 0
        for session in ended:
            assert next_turn(session) > 100, session
        for session in streams:
            next_turn(session)
