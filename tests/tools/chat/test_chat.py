"""`kvferry chat`: piped and on a terminal against a real stack; its client against streams that go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.stack import serving
from rich.console import Console

from kvferry.shared.errors import KvferryError
from kvferry.tools.chat.client import ChatClient, TurnStats
from kvferry.tools.chat.config import ChatConfig
from kvferry.tools.chat.conversation import Conversation, format_bytes, stats_table

COMMAND = (sys.executable, "-c", "from kvferry.services.launcher.cli import main; main()", "chat")
DOCUMENT = (
    "the old sailor painted the quiet bridge . remember that the pin of the red castle is 4 2 7 1 . "
    "the access code of the blue lighthouse is 9 0 5 3 ."
)
LONG = " ".join(["the old sailor painted the quiet bridge ."] * 300)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--in-process") as served:
        yield served.base_url


def _is_running(url: str) -> bool:
    metrics = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    return re.search(r"^kvferry_requests_running\{.*\} 1\.0$", metrics, flags=re.MULTILINE) is not None


def chat(url: str, *lines: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return subprocess.run(
        [*COMMAND, "--url", url, *options],
        input="".join(f"{line}\n" for line in lines),
        env=clean | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_session_continues_over_turns_with_only_new_messages_sent(url: str) -> None:
    done = chat(
        url,
        f"the quiet doctor visited the green market . {DOCUMENT} what is the pin of the red castle ?",
        "what is the access code of the blue lighthouse ?",
        options=("--session", "piped", "--max-tokens", "16", "--method", "rocketkv"),
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "4 2 7 1" in lines
    assert "9 0 5 3" in lines
    figures = [lines[i + 1].split() for i, line in enumerate(lines) if line.startswith("method")]
    assert figures[0][3] == "0"
    assert int(figures[1][3]) > 30
    session = httpx.get(f"{url}/v1/sessions/piped", timeout=30, trust_env=False).json()
    assert session["turns"] == 2


def test_commands_choose_session_method_and_budget(url: str) -> None:
    done = chat(
        url,
        "/method full",
        "/budget x",
        "/session chosen",
        f"{DOCUMENT} what is the pin of the red castle ?",
        "/method rocketkv",
        "/budget 8",
        "/new",
        f"{DOCUMENT} what is the pin of the red castle ?",
        "/help",
        "/nonsense",
        "/quit",
        "never sent",
        options=("--max-tokens", "8"),
    )
    assert done.returncode == 0, done.stdout
    assert "budget is 'x'; it must be a number of tokens, or 0" in done.stdout
    assert "session chosen" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if " KiB " in line]
    assert [row[0] for row in rows] == ["full", "rocketkv"]
    saved = [float(row[row.index("%") - 1]) for row in rows]
    # of float16, the checkpoint's, where the workers ship float32
    assert saved[0] < -99
    assert saved[0] + 50 < saved[1]
    assert "/nonsense is not a command" in done.stdout
    assert "never sent" not in done.stdout


def test_a_refused_turn_is_told_and_the_chat_goes_on(url: str) -> None:
    done = chat(url, "hello", "/method full", "hello", options=("--method", "best", "--max-tokens", "4"))
    assert done.returncode == 1
    assert "best" in done.stdout
    assert "one of full, snapkv, rocketkv" in done.stdout
    assert "first token" in done.stdout


def test_an_unreachable_router_is_told_with_its_address() -> None:
    done = chat("http://127.0.0.1:1")
    assert done.returncode == 1
    assert "the router at http://127.0.0.1:1 cannot be reached" in done.stderr


_PROMPT_BEGINS = b"\x1b[?2004h"
"""The editor asks the terminal to mark what is pasted; it reads each character from then on."""


class Terminal:
    """`kvferry chat` on a pseudo-terminal of its own."""

    def __init__(self, *options: str) -> None:
        self._master, slave = os.openpty()
        os.set_blocking(self._master, False)
        termios.tcsetwinsize(slave, (40, 160))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        self.process = subprocess.Popen(
            [*COMMAND, *options],
            # Nothing here answers requests for the cursor's position.
            env=clean | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            preexec_fn=lambda: os.login_tty(slave),
        )
        os.close(slave)
        self._shown = ""
        self._raw = b""

    def type(self, keys: str) -> None:
        left = keys.encode()
        while left:
            readable, writable, _ = select.select([self._master], [self._master], [], 60.0)
            assert readable or writable
            if readable:
                self._read()
            elif writable:
                left = left[os.write(self._master, left) :]

    def wait_for_answer(self, url: str) -> None:
        """Until the router runs the request; what is shown meanwhile is read, so that nobody waits for us."""
        deadline_s = time.monotonic() + 60.0
        while not _is_running(url):
            assert time.monotonic() < deadline_s, self._shown
            if select.select([self._master], [], [], 0.01)[0]:
                self._read()

    def read_until(self, text: str, timeout_s: float = 60.0) -> str:
        """What is shown up to the text, less control sequences; what follows stays for the next call."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self._shown:
            ready, _, _ = select.select([self._master], [], [], deadline_s - time.monotonic())
            assert ready, f"{text!r} is not in {self._shown!r}"
            self._read()
        before, _, self._shown = self._shown.partition(text)
        return before

    def interrupt(self, text: str) -> None:
        """Type a text and Ctrl-C, and wait for the next prompt: what is typed before it, the terminal cuts
        off after 4,095 characters."""
        before = self._raw.count(_PROMPT_BEGINS)
        self.type(f"{text}\x03")
        deadline_s = time.monotonic() + 60.0
        while self._raw.count(_PROMPT_BEGINS) == before:
            ready, _, _ = select.select([self._master], [], [], deadline_s - time.monotonic())
            assert ready, f"there is no prompt in {self._shown!r}"
            self._read()
        self._shown = ""

    def _read(self) -> None:
        read = os.read(self._master, 4096)
        self._raw += read
        self._shown += read.decode(errors="replace")
        self._shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._shown)

    def end_of_input(self) -> int:
        """Type Ctrl-D until the process ends: between two prompts nobody reads it. Returns the exit code."""
        deadline_s = time.monotonic() + 60.0
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, self._shown
            with contextlib.suppress(OSError):  # the terminal is closed
                self.type("\x04")
            time.sleep(0.05)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)
        os.close(self._master)


@pytest.fixture
def terminal(url: str, tmp_path: Path) -> Iterator[Terminal]:
    history = ("--input-history", str(tmp_path / "typed"))
    opened = Terminal("--url", url, "--session", "typed", "--max-tokens", "16", *history)
    try:
        opened.read_until("/help for commands")
        opened.read_until(">")
        yield opened
    finally:
        opened.close()


def test_on_a_terminal_lines_history_and_completion_work(
    terminal: Terminal, url: str, tmp_path: Path
) -> None:
    terminal.type("/bud\t")
    terminal.read_until("get")
    terminal.type(" 64\r")
    terminal.read_until("token budget 64")
    terminal.read_until(">")
    # Alt-Enter starts a line; the message is sent whole.
    terminal.type(f"{DOCUMENT}\x1b\rwhat is the pin of the red castle ?\r")
    terminal.read_until("4 2 7 1")
    terminal.read_until("4 2 7 1")
    terminal.read_until("first token")
    terminal.read_until(">")
    terminal.type("\x1b[A\x1b[A\x1b[A\r")
    terminal.read_until("token budget 64")
    terminal.read_until(">")
    terminal.type("/method rocket\t")
    terminal.read_until("kv")
    terminal.type("\r")
    terminal.read_until("method rocketkv")
    terminal.read_until(">")
    assert terminal.end_of_input() == 0
    session = httpx.get(f"{url}/v1/sessions/typed", timeout=30, trust_env=False).json()
    assert session["turns"] == 1
    stored = (tmp_path / "typed").read_text(encoding="utf-8").splitlines()
    assert {"+/budget 64", "+what is the pin of the red castle ?"} <= set(stored)


def test_an_interrupt_stops_the_answer_and_keeps_the_session(terminal: Terminal, url: str) -> None:
    terminal.type("/session interrupted\r")
    terminal.read_until("session interrupted\r\n")
    terminal.read_until(">")
    terminal.type(f"{DOCUMENT} what is the pin of the red castle ?\r")
    terminal.read_until("first token")
    terminal.read_until(">")
    terminal.interrupt("half a message")
    terminal.type(f"\x1b[200~{LONG}\x1b[201~ what is the pin of the red castle ?\r")
    terminal.wait_for_answer(url)
    terminal.type("\x03")
    assert "first token" not in terminal.read_until("stopped")
    terminal.read_until(">")
    terminal.type("what is the access code of the blue lighthouse ?\r")
    terminal.read_until("9 0 5 3")
    terminal.read_until("first token")
    terminal.read_until(">")
    terminal.type("\x03")
    assert terminal.process.wait(timeout=60) == 0
    session = httpx.get(f"{url}/v1/sessions/interrupted", timeout=30, trust_env=False).json()
    assert session["turns"] == 2


@asynccontextmanager
async def canned(body: bytes, *, status: str = "200 OK") -> AsyncIterator[ChatClient]:
    """A client of a server that answers every request with this body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    config = ChatConfig(url=f"http://{host}:{port}", chat_model="demo", chat_timeout_s=20)
    async with server, ChatClient.connect(config) as client:
        yield client


async def read(client: ChatClient) -> str:
    async with client.turn("hello", session="s", method="", token_budget=0) as turn:
        return "".join([piece async for piece in turn.pieces()])


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event({"choices": [{"delta": {"content": text}}]})


async def test_comments_and_empty_deltas_are_no_text() -> None:
    body = b": keep-alive\n\n" + event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    end = event({"choices": [], "kv": {"method": "full"}}) + b"data: [DONE]\n\n"
    async with canned(body + piece("a") + piece(" b") + end) as client:
        assert await read(client) == "a b"


async def test_an_error_in_the_stream_is_raised_with_its_message() -> None:
    body = piece("a") + event({"error": {"message": "the transfer failed", "code": None}})
    async with canned(body) as client:
        with pytest.raises(KvferryError, match="the transfer failed"):
            await read(client)


async def test_a_stream_that_just_ends_is_an_error() -> None:
    async with canned(piece("a")) as client:
        with pytest.raises(KvferryError, match="ended before it was complete"):
            await read(client)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "slow down"}}', "slow down"),
        (b"<html>", "HTTP status 502"),
        (b"[]", "HTTP status 502"),
    ],
)
async def test_refusals_are_told_in_the_servers_words_where_it_has_any(body: bytes, message: str) -> None:
    async with canned(body, status="502 Bad Gateway") as client:
        with pytest.raises(KvferryError, match=message):
            await read(client)


class Lines:
    """An input of given messages."""

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    async def read(self) -> str:
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)


async def test_the_chat_ends_with_the_input_and_counts_failures() -> None:
    stream = io.StringIO()
    async with canned(b'{"error": {"message": "no"}}', status="503 Busy") as client:
        config = ChatConfig(session="s")
        assert await Conversation(client, config, Console(file=stream), Lines("hello", "")).run()
        assert not await Conversation(client, config, Console(file=stream), Lines("/help", "")).run()
    assert "no" in stream.getvalue().split()


def test_figures_of_a_turn_are_shown_in_units() -> None:
    stats = TurnStats(
        method="rocketkv",
        prompt_tokens=4096,
        reused_tokens=1000,
        full_bytes=16 << 20,
        shipped_bytes=4 << 20,
        first_token_s=0.25,
    )
    stream = io.StringIO()
    Console(file=stream, width=120).print(stats_table(stats))
    shown = stream.getvalue().splitlines()[1].split("  ")
    values = [value.strip() for value in shown if value.strip()]
    assert values == ["rocketkv", "4096 tokens", "1000", "16.0 MiB", "4.0 MiB", "75.0 %", "250 ms"]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (1 << 53, "8192.0 TiB")],
)
def test_bytes_have_binary_units(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_nothing_is_saved_of_nothing() -> None:
    stats = TurnStats(
        method="full", prompt_tokens=0, reused_tokens=0, full_bytes=0, shipped_bytes=9, first_token_s=0.0
    )
    assert stats.saved_percent == 0.0
