"""Requests made from the router's own OpenAPI document, and a client that sends many of them."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from kvtest.fuzz.mutate import NUMBERS, TEXTS, spoilt_bytes, spoilt_tree, weird
from kvtest.fuzz.run import Report

MAX_REQUEST_S = 10.0
NUM_CONNECTIONS = 12
MAX_ANSWER_BYTES = 4 << 20
_BODY_LIMIT = 64 << 10
_IDS = ("s", "t", "doc", "resp_1", "a.b", "x" * 128, "x" * 129, "..", "%00", "")
_CHEAP: dict[str, Any] = {"model": "demo", "max_tokens": 3, "n": 1, "best_of": 1}
"""Fields whose values would only make requests slow, and how they usually are."""

# ---- what is asked ---------------------------------------------------------------------------------------


class Api:
    """Args: document: of OpenAPI."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._operations: list[tuple[str, str, dict[str, Any] | None]] = []
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                content = operation.get("requestBody", {}).get("content", {}).get("application/json")
                schema = content["schema"] if content else None
                self._operations += [(method.upper(), path, schema)] * (6 if schema is not None else 1)

    def make(self, rng: Random) -> bytes:
        """A request as bytes, with `Connection: keep-alive`."""
        method, path, schema = rng.choice(self._operations)
        body = b"" if schema is None else self._body(rng, schema)
        if rng.random() < 0.02:
            method = rng.choice(("GET", "PUT", "DELETE", "POST", "HEAD"))
        while "{" in path:
            before, _, rest = path.partition("{")
            path = before + quote(rng.choice(_IDS), safe="%") + rest.partition("}")[2]
        if rng.random() < 0.05:
            path += "?" + quote(rng.choice(TEXTS)) + "=" + quote(rng.choice(TEXTS))
        names = {"host": "fuzz", "content-type": "application/json"}
        if rng.random() < 0.8:
            names["authorization"] = f"Bearer key-{rng.choice('ab')}"
        if rng.random() < 0.1:
            name = rng.choice(
                ("content-type", "x-kvferry-session-id", "x-request-id", "accept", "traceparent")
            )
            text = rng.choice(TEXTS).encode("ascii", "ignore").decode()
            names[name] = text.replace("\r\n", "").replace("\0", "").strip()
        if rng.random() < 0.05:
            names["transfer-encoding"] = "chunked"
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        else:
            names["content-length"] = str(len(body))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in names.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def _body(self, rng: Random, schema: dict[str, Any]) -> bytes:
        tree = self._instance(rng, schema, 4)
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            tree = spoilt_tree(rng, tree)
        try:
            data = json.dumps(tree).encode()
        except (ValueError, RecursionError):
            data = b"{}"
        if rng.random() < 0.1:
            data = spoilt_bytes(rng, data)
        if rng.random() < 0.002:
            data = rng.choice((b"[", b'{"a":', b'{"messages":[', b'{"messages":[{},')) * rng.randrange(9000)
        return data[:_BODY_LIMIT]

    def _instance(self, rng: Random, schema: dict[str, Any], depth: int) -> Any:
        """A value that the schema allows, mostly."""
        if "$ref" in schema:
            return self._instance(rng, self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self._instance(rng, rng.choice(schema[name]), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(rng, schema, depth)
            case "array":
                count = rng.choice((1, 1, 2, 3)) if depth else 0
                return [self._instance(rng, schema.get("items", {}), depth - 1) for _ in range(count)]
            case "integer":
                low, high = int(schema.get("minimum", 0)), int(schema.get("maximum", 9))
                return rng.choice((low, high, low + 1, rng.choice(NUMBERS)))
            case "number":
                least, most = float(schema.get("minimum", 0)), float(schema.get("maximum", 1))
                return rng.choice((least, most, (least + most) / 2, 0))
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case "string":
                return rng.choice((*TEXTS, "hello", "s", "doc"))
        return weird(rng, 1)

    def _object(self, rng: Random, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        value = {}
        for name, subschema in schema.get("properties", {}).items():
            if name in required or rng.random() < 0.12:
                is_cheap = name in _CHEAP and rng.random() < 0.9
                value[name] = _CHEAP[name] if is_cheap else self._instance(rng, subschema, max(0, depth - 1))
        if "messages" in value and rng.random() < 0.7:
            value["messages"] = [{"role": "user", "content": rng.choice(("hello", "quiet bridge"))}]
        if value.get("ignore_eos") and rng.random() < 0.9:
            del value["ignore_eos"]
        return value


# ---- who answers -----------------------------------------------------------------------------------------


def serve(ready: Connection) -> None:
    """A router in front of scripted workers, in this process, until the connection ends."""
    import structlog

    from kvferry.models import DEMO_MODEL
    from kvferry.shared.model.tokenizer import ChatTokenizer
    from kvtest.router import _start

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), cache_logger_on_first_use=False)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            tokenizer = ChatTokenizer.load(DEMO_MODEL)
            running = await _start(stack, tokenizer, 1, 1, {"max_body_bytes": 1 << 20})
            document = (await running.http.get("/openapi.json")).json()
            ready.send((running.base_url, document))
            await asyncio.to_thread(ready.poll, None)

    asyncio.run(main())


def rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def run_http(*, seed: int, num_messages: int, progress: Callable[[int], None] = lambda _: None) -> Report:
    """That many requests over a few connections. Allocations are how much the router's memory grew at its
    highest, over all, after the first hundredth of the requests."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    report = Report(seed)
    began_s = time.perf_counter()
    try:
        url, document = here.recv()
        client = _Client(url.removeprefix("http://"), Api(document), report, server.pid or 0, progress)
        asyncio.run(client.run(num_messages))
    finally:
        here.send(None)
        server.join(30)
        server.kill()
    report.seconds = time.perf_counter() - began_s
    return report


class _Client:
    def __init__(
        self, address: str, api: Api, report: Report, pid: int, progress: Callable[[int], None]
    ) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._api, self._report, self._pid, self._progress = api, report, pid, progress
        self._base_bytes = 0

    async def run(self, num_requests: int) -> None:
        number = iter(range(num_requests))
        await asyncio.gather(*(self._connection(number, num_requests) for _ in range(NUM_CONNECTIONS)))
        self._report.largest_allocation_bytes = rss_bytes(self._pid) - self._base_bytes

    async def _connection(self, numbers: Any, num_requests: int) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for number in numbers:
            request = self._api.make(Random(f"http {self._report.seed} {number}"))
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(MAX_REQUEST_S):
                    if streams is None:
                        streams = await asyncio.open_connection(self._host, self._port)
                    outcome, stays_open = await exchange(*streams, request)
                if not stays_open:
                    streams[1].close()
                    streams = None
            except Exception as error:
                outcome, streams = f"failed: {type(error).__name__} {error}", None
            self._note(number, request, outcome, time.perf_counter() - began_s)
            if self._report.num_messages == max(1, num_requests // 100):
                self._base_bytes = rss_bytes(self._pid)
        if streams is not None:
            streams[1].close()

    def _note(self, number: int, request: bytes, outcome: str, elapsed_s: float) -> None:
        report = self._report
        report.num_cases = report.num_messages = report.num_messages + 1
        report.outcomes[outcome] += 1
        report.longest_s = max(report.longest_s, elapsed_s)
        report.largest_case_bytes = max(report.largest_case_bytes, len(request))
        if outcome[0] not in "24" and len(report.findings) < 20:
            text = request.decode("latin1")[:3000]
            report.findings.append({"where": f"http {report.seed} {number}", "what": outcome, "case": [text]})
        known = report.smallest.get(outcome)
        if known is None or len(request) < len(known[0]):
            report.smallest[outcome] = (request,)
        self._progress(report.num_messages)


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[str, bool]:
    """Send a request and read its answer: what it was, and whether the connection stays open."""
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
    status = int(head.split(" ", 2)[1])
    lines = [line.partition(":") for line in head.split("\r\n")[1:]]
    names = {name.strip().lower(): value.strip() for name, _, value in lines}
    if request.startswith(b"HEAD") or status in (204, 304):
        body = b""
    elif "chunked" in names.get("transfer-encoding", ""):
        body = await _chunks(reader)
    else:
        size = int(names.get("content-length", 0))
        assert size <= MAX_ANSWER_BYTES, f"an answer of {size} bytes"
        body = await reader.readexactly(size)
    if status >= 500 or b'"server_error"' in body:
        return f"wrong: {status} {body[:300]!r}", False
    if status >= 400 and not request.startswith(b"HEAD"):
        error = json.loads(body)["error"]
        assert error["message"], "an error without a message"
        assert len(body) < 16_384, f"an error of {len(body)} bytes"
    return f"{status}", names.get("connection", "") != "close"


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
        assert len(body) <= MAX_ANSWER_BYTES, "an answer without an end"
    await reader.readuntil(b"\r\n")
    return body
