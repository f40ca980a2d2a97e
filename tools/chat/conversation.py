"""`kvferry chat`: keeps a session with a router and shows what each turn moved.

    message ──► POST /v1/chat/completions (stream, session id, only the new message) ──► answer, then figures

Works on a terminal and with piped input. The router holds the conversation; this holds only the session's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvferry.shared.errors import KvferryError
from kvferry.tools.chat.client import ChatClient, TurnStats
from kvferry.tools.chat.config import ChatConfig
from kvferry.tools.chat.terminal import Input, PipedInput, TerminalInput

_HELP = """/new           start a new session
/session [ID]  show the session, or continue another
/method [NAME] show the compression method, or choose one ("default" leaves it to the router)
/budget [N]    show the token budget, or choose one (0 leaves it to the router)
/help          show this
/quit          leave (so does the end of input)
Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer."""


async def chat(config: ChatConfig) -> int:
    """Chat until `/quit` or the input's end; returns the exit code: 1 if a turn of piped input failed."""
    async with ChatClient.connect(config) as client:
        model = await client.model()
        methods = [f"/method {name}" for name in ("default", *await client.methods())]
        is_terminal = sys.stdin.isatty()
        completions = [*COMMANDS, "/quit", *methods]
        source = TerminalInput(completions, config.input_history) if is_terminal else PipedInput()
        conversation = Conversation(client, config, Console(highlight=False), source)
        session = conversation.choice.session
        conversation.note(f"{model} at {client.url}, session {session}; /help for commands")
        failed = await conversation.run()
    return int(failed and not is_terminal)


@dataclass(kw_only=True)
class Choice:
    """What the next turn asks for."""

    session: str
    method: str
    token_budget: int


class Conversation:
    """The loop of messages, one turn at a time."""

    def __init__(self, client: ChatClient, config: ChatConfig, console: Console, source: Input) -> None:
        self._client = client
        self._console = console
        self._source = source
        self.choice = Choice(
            session=config.session or new_session_id(), method=config.method, token_budget=config.token_budget
        )

    async def run(self) -> bool:
        """Read and answer messages to the input's end; returns whether a turn failed."""
        failed = False
        while True:
            try:
                message = (await self._source.read()).strip()
            except EOFError:
                return failed
            if message == "/quit":
                return failed
            if message.startswith("/"):
                self._run_command(message)
            elif message:
                failed |= not await self._turn(message)

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)

    async def _turn(self, message: str) -> bool:
        """Run a turn; return whether it went well. An interrupt ends the answer, not the conversation."""
        answer = asyncio.create_task(self._answer(message))
        try:
            with _on_interrupt(answer.cancel):
                await asyncio.wait({answer})
        finally:
            answer.cancel()
        if answer.cancelled():
            self._console.print()
            self.note("stopped")
            return True
        return answer.result()

    async def _answer(self, message: str) -> bool:
        choice = self.choice
        try:
            async with self._client.turn(
                message, session=choice.session, method=choice.method, token_budget=choice.token_budget
            ) as turn:
                async for piece in turn.pieces():
                    self._console.print(piece, end="", markup=False, soft_wrap=True)
                self._console.print()
                self._console.print(stats_table(turn.stats))
        except KvferryError as error:
            self._console.print()
            self._console.print(error.message, style="red", markup=False)
            return False
        return True

    def _run_command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if run := COMMANDS.get(name):
            self.note(run(self.choice, argument.strip()))
        else:
            self.note(f"{name} is not a command; commands are {', '.join(COMMANDS)}, /quit")


# ---- commands: each changes what the next turn asks for, and says what that is ---------------------------


def _new(choice: Choice, _: str) -> str:
    choice.session = new_session_id()
    return f"session {choice.session}"


def _session(choice: Choice, session: str) -> str:
    choice.session = session or choice.session
    return f"session {choice.session}"


def _method(choice: Choice, name: str) -> str:
    if name:
        choice.method = "" if name == "default" else name
    return f"method {choice.method or 'as the router decides'}"


def _budget(choice: Choice, tokens: str) -> str:
    if tokens and not (tokens.isascii() and tokens.isdigit()):
        return f"budget is {tokens!r}; it must be a number of tokens, or 0"
    choice.token_budget = int(tokens or choice.token_budget)
    return f"token budget {choice.token_budget or 'as the router decides'}"


COMMANDS: dict[str, Callable[[Choice, str], str]] = {
    "/new": _new,
    "/session": _session,
    "/method": _method,
    "/budget": _budget,
    "/help": lambda _choice, _argument: _HELP,
}


@contextlib.contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` on Ctrl-C, instead of ending the program."""
    loop = asyncio.get_running_loop()
    earlier = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, earlier)


def new_session_id() -> str:
    return f"chat-{secrets.token_hex(6)}"


def stats_table(stats: TurnStats) -> Table:
    """Make a table of one turn's figures, on a line."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", style="dim")
    figures = {
        "method": stats.method,
        "prompt": f"{stats.prompt_tokens} tokens",
        "reused": str(stats.reused_tokens),
        "full KV": format_bytes(stats.full_bytes),
        "shipped": format_bytes(stats.shipped_bytes),
        "saved": f"{stats.saved_percent:.1f} %",
        "first token": f"{1000 * stats.first_token_s:.0f} ms",
    }
    for heading in figures:
        table.add_column(heading, no_wrap=True)
    table.add_row(*figures.values())
    return table


def format_bytes(size_bytes: int) -> str:
    """Format a size with a binary unit: 512 B, 1.5 KiB, 2.0 MiB, ..."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
