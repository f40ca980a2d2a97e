"""Sources of the chat's messages: a prompt on a terminal, or lines of piped input."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Input(Protocol):
    """A source of messages."""

    async def read(self) -> str:
        """Return the next message.

        Raises: EOFError at the end of the input.
        """
        ...


class PipedInput:
    """Standard input, one message a line."""

    async def read(self) -> str:
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line


class TerminalInput:
    """A prompt with history (arrow keys), new lines (Alt-Enter) and completion of commands (Tab)."""

    def __init__(self, completions: Sequence[str], history_file: str) -> None:
        """Args:
        completions: whole messages to offer.
        history_file: where earlier messages are read from and new ones stored; empty: in memory.
        """
        path = Path(history_file).expanduser()
        self._session: PromptSession[str] = PromptSession(
            "> ",
            prompt_continuation="  ",
            multiline=True,
            history=FileHistory(path) if history_file else InMemoryHistory(),
            completer=WordCompleter(completions, sentence=True),
            complete_while_typing=False,
            key_bindings=_key_bindings(),
        )

    async def read(self) -> str:
        """Read as `Input.read`; Ctrl-C empties the prompt, and ends the input if it is empty already."""
        while True:
            try:
                return await self._session.prompt_async()
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    raise EOFError from None


def _key_bindings() -> KeyBindings:
    """Bind Enter to sending a message, also one of several lines, and Alt-Enter to beginning a line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
