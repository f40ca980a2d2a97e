"""`kvferry chat`: a terminal client of the OpenAI API that keeps a session and shows what each turn moved.

    line ──► POST /v1/chat/completions (stream, session id, only the new message) ──► answer, then figures

Works with a terminal and with piped input. Holds no conversation: the router does.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvferry.services.launcher.chat_client import ChatClient, TurnStats
from kvferry.services.launcher.config import ChatConfig
from kvferry.shared.errors import KvferryError

_HELP = """/new           start a new session
/session [ID]  show the session, or continue another
/method [NAME] show the compression method, or choose one ("default" leaves it to the router)
/budget [N]    show the token budget, or choose one (0 leaves it to the router)
/help          this
/quit          leave (so does the end of input)"""


async def chat(config: ChatConfig) -> int:
    """Chat until `/quit` or the input's end; returns the exit code: 1 if a turn of piped input failed."""
    console = Console(highlight=False)
    async with ChatClient.connect(config) as client:
        return await Conversation(client, config, console).run()


@dataclass(kw_only=True)
class Choice:
    """What the next turn asks for."""

    session: str
    method: str
    token_budget: int


class Conversation:
    """The prompt's loop. One turn at a time."""

    def __init__(
        self,
        client: ChatClient,
        config: ChatConfig,
        console: Console,
        *,
        read_line: Callable[[str], str] | None = None,
    ) -> None:
        """Args:
        read_line: shows a prompt and returns a line; raises EOFError at the input's end. Default: stdin.
        """
        self._client = client
        self._console = console
        self._is_terminal = sys.stdin.isatty()
        self._read_line = read_line or self._from_stdin
        self._failed = False
        self.choice = Choice(
            session=config.session or new_session_id(), method=config.method, token_budget=config.token_budget
        )
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/new": self._new,
            "/session": self._session,
            "/method": self._method,
            "/budget": self._budget,
            "/help": self._help,
        }

    async def run(self) -> int:
        model = await self._client.model()
        self._note(f"{model} at {self._client.url}, session {self.choice.session}; /help for commands")
        while True:
            try:
                line = (await asyncio.to_thread(self._read_line, "> ")).strip()
            except (EOFError, KeyboardInterrupt):
                break
            if line == "/quit":
                break
            if line.startswith("/"):
                await self._run_command(line)
            elif line:
                await self._turn(line)
        return int(self._failed and not self._is_terminal)

    async def _turn(self, text: str) -> None:
        choice = self.choice
        try:
            async with self._client.turn(
                text, session=choice.session, method=choice.method, token_budget=choice.token_budget
            ) as turn:
                async for piece in turn.pieces():
                    self._console.print(piece, end="", markup=False, soft_wrap=True)
                self._console.print()
                self._console.print(stats_table(turn.stats))
        except KvferryError as error:
            self._failed = True
            self._console.print()
            self._console.print(error.message, style="red", markup=False)

    async def _run_command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if command := self._commands.get(name):
            await command(argument.strip())
        else:
            self._note(f"{name} is not a command; commands are {', '.join(self._commands)}, /quit")

    async def _new(self, _: str) -> None:
        self.choice.session = new_session_id()
        self._note(f"session {self.choice.session}")

    async def _session(self, session: str) -> None:
        self.choice.session = session or self.choice.session
        self._note(f"session {self.choice.session}")

    async def _method(self, name: str) -> None:
        if name:
            self.choice.method = "" if name == "default" else name
        self._note(f"method {self.choice.method or 'as the router decides'}")

    async def _budget(self, tokens: str) -> None:
        if tokens and not (tokens.isascii() and tokens.isdigit()):
            self._note(f"budget is {tokens!r}; it must be a number of tokens, or 0")
            return
        self.choice.token_budget = int(tokens or self.choice.token_budget)
        self._note(f"token budget {self.choice.token_budget or 'as the router decides'}")

    async def _help(self, _: str) -> None:
        self._note(_HELP)

    def _from_stdin(self, prompt: str) -> str:
        if self._is_terminal:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)


def new_session_id() -> str:
    return f"chat-{secrets.token_hex(6)}"


def stats_table(stats: TurnStats) -> Table:
    """One turn's figures, on a line."""
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
    """With a binary unit: 512 B, 1.5 KiB, 2.0 MiB, ..."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
