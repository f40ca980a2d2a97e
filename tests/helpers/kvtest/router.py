"""A router on a real socket, in front of scripted workers."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import structlog
from prometheus_client import CollectorRegistry

from kvferry.models import DEMO_MODEL
from kvferry.services.router.app import Timing, create_app
from kvferry.services.router.completion.services import Services
from kvferry.services.router.config import RouterConfig
from kvferry.services.router.http.server import http_server
from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.telemetry.metrics import RouterMetrics
from kvtest.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, Wire
from kvtest.waiting import eventually

EOS = 6
LAST_INDEX = 24
"""The script's completions end by themselves with this token."""
FIRST_WORD, NUM_WORDS = 100, 200

SPEC = ModelSpec(
    name="demo",
    fingerprint="feedc0de",
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=704,
    max_model_len=512,
    dtype="float32",
    eos_token_ids=(EOS,),
)


def scripted_token(prompt: tuple[int, ...], index: int, sampling: SamplingParams) -> int:
    """Any word, decided by prompt, index and (unless greedy) seed; the end after LAST_INDEX words."""
    if index == LAST_INDEX and not sampling.ignore_eos:
        return EOS
    seed = sampling.seed if sampling.temperature > 0 else 0
    return FIRST_WORD + (sum(prompt) * 31 + index * 7 + seed * 13) % NUM_WORDS


@dataclass
class Stack:
    """A running router and its scripted workers."""

    base_url: str
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    script: Script
    prefill: list[ScriptedPrefill]
    decode: list[ScriptedDecode]
    registry: CollectorRegistry
    close: Callable[[], Awaitable[None]]
    services: Services
    model: str = SPEC.name
    num_sweeps: int = 0

    async def swept(self, times: int = 2) -> None:
        """Wait until the router has looked for expired sessions so often; the first time may have begun."""
        until = self.num_sweeps + times
        await eventually(lambda: self.num_sweeps >= until)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvferry_{name}", labels) or 0.0

    async def has_turns(self, session_id: str, turns: int, key: str = "key-a") -> None:
        """A session has had so many turns: its record is there no later than the answer."""
        response = await self.http.get(
            f"/v1/sessions/{session_id}", headers={"Authorization": f"Bearer {key}"}
        )
        assert response.status_code == 200, response.text
        assert response.json()["turns"] == turns

    def keyed(self, api_key: str) -> openai.AsyncOpenAI:
        return self.client.with_options(api_key=api_key)

    @property
    def num_active(self) -> int:
        return sum(len(worker.active) for worker in [*self.prefill, *self.decode])


async def say(stack: Stack, content: str, session_id: str = "s", *, client: Any = None, **extra: Any) -> Any:
    """Run a session's next turn. Args: client: another key's; extra: fields of ours."""
    return await (client or stack.client).chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=4,
        extra_body={"session_id": session_id, "session_mode": "append", **extra},
    )


def text_of(prompt_words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt_words}]


@pytest.fixture(autouse=True, scope="session")
def _quiet_logs() -> Iterator[None]:
    """Log lines go nowhere, but for tests that capture them."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(DEMO_MODEL)


StartStack = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def start_stack(tokenizer: ChatTokenizer) -> AsyncIterator[StartStack]:
    """Starts routers: `await start_stack(num_decode=2, max_recoveries=1)`."""
    async with AsyncExitStack() as stack:

        async def start(*, num_prefill: int = 1, num_decode: int = 1, **options: Any) -> Stack:
            chosen = options.pop("tokenizer", tokenizer)
            return await _start(stack, chosen, num_prefill, num_decode, options)

        yield start


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    return await start_stack()


@pytest.fixture(scope="module")
def base_url(tokenizer: ChatTokenizer) -> Iterator[str]:
    """Where a router listens, one for a whole file, in a thread of its own. Tests that take only this fixture
    run against any stack."""
    started: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            running = await _start(stack, tokenizer, 1, 1, {})
            started.put((running.base_url, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="router under test")
    thread.start()
    url, loop, stop = started.get(timeout=120.0)
    yield url
    loop.call_soon_threadsafe(stop.set)
    thread.join(timeout=120.0)
    assert not thread.is_alive()


async def _start(
    stack: AsyncExitStack,
    tokenizer: ChatTokenizer,
    num_prefill: int,
    num_decode: int,
    options: dict[str, Any],
) -> Stack:
    tokenizer = options.pop("tokenizer", tokenizer)
    settings = {
        "listen": "127.0.0.1:0", "shutdown_timeout_s": 1.0, "history_redis_timeout_s": 30.0, **options
    }  # fmt: skip
    wire = Wire()
    script = Script(
        spec=settings.pop("spec", SPEC),
        token=scripted_token,
        new_assembler=lambda sampling: TextAssembler(
            tokenizer, sampling.stop, min_tokens=sampling.min_tokens
        ),
    )
    prefill = {f"prefill-{index}": ScriptedPrefill(script, wire) for index in range(num_prefill)}
    decode = {f"decode-{index}": ScriptedDecode(script, wire) for index in range(num_decode)}
    polling = {"status_interval_s": 0.05, "status_timeout_s": 30.0}
    metrics = RouterMetrics()
    timing = settings.pop("timing", Timing(recovery_backoff_s=0.01))
    clock = settings.pop("clock", time.time)
    config = RouterConfig(**settings)
    app = create_app(
        config,
        prefill=WorkerPool.of_clients("prefill", prefill, **polling),
        decode=WorkerPool.of_clients("decode", decode, **polling),
        timing=timing,
        clock=clock,
        tokenizer=tokenizer,
        metrics=metrics,
    )
    running = AsyncExitStack()
    address = await running.enter_async_context(http_server(app, config))
    http = await running.enter_async_context(
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, verify=False, timeout=120.0)
    )
    client = openai.AsyncOpenAI(
        base_url=f"http://{address}/v1",
        api_key="key-a",
        max_retries=0,
        timeout=120.0,
        http_client=await running.enter_async_context(httpx.AsyncClient(trust_env=False, verify=False)),
    )
    stack.push_async_callback(running.aclose)
    started = Stack(
        base_url=f"http://{address}",
        client=client,
        http=http,
        script=script,
        prefill=list(prefill.values()),
        decode=list(decode.values()),
        registry=metrics.registry,
        close=running.aclose,
        services=app.state.services,
    )
    _count_sweeps(started)
    return started


def _count_sweeps(stack: Stack) -> None:
    """Count the router's sweeps, each of which ends with implicit sessions."""
    sessions = stack.services.implicit
    remove_stale = sessions.remove_stale

    def counted() -> Any:
        stack.num_sweeps += 1
        return remove_stale()

    sessions.remove_stale = counted  # type: ignore[method-assign]
