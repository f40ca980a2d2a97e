"""A rank that follows: it loads its part of the model and runs the passes that the lead names.

Entry point of a child process of a worker, which ends with the worker, however that happens:

    python -m kvferry.shared.model.parallel.follower COMMANDS LIFE NOTES CLASS

COMMANDS, LIFE and NOTES are descriptors of pipes; CLASS is `module:name` of a `FollowingRank`. Each role has
one of its own, because prefill's ranks ship and decode's have KV.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import structlog
import torch

from kvferry.kernels.dispatch import KernelMode
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.device.kernel_paths import Role, choose_kernels
from kvferry.shared.device.self_test import model_shapes, self_test
from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.interface import DecodeAttention
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.parallel.compression import PartCompressor, PartTaker
from kvferry.shared.model.parallel.messages import (
    Abort,
    Answer,
    Call,
    Decode,
    Load,
    Loaded,
    Prefill,
    Proceed,
    Question,
)
from kvferry.shared.model.parallel.passes import RankDecodePass, RankPrefillPass
from kvferry.shared.model.parallel.ranks import Ranks
from kvferry.shared.process.logging import setup_logging

if TYPE_CHECKING:
    from kvferry.shared.wire.messages import TransferKey

_log = structlog.get_logger(__name__)


class PassAborted(Exception):
    """The lead has given up the pass."""


class FollowingRank(Ranks):
    """A rank other than 0. One thread runs everything, in the lead's order."""

    def __init__(self, commands: Connection, notes: Connection) -> None:
        super().__init__(commands.recv())
        self._commands = commands
        self._notes = notes
        self._noting = threading.Lock()
        self._asking = threading.Lock()
        self._num_asked = 0
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._model: TransformersModel | None = None

    def join(self) -> None:
        self._commands.send(Loaded())
        super().join()

    def follow(self) -> None:
        """Run what the lead names. Raises: EOFError: the lead is gone."""
        while True:
            self._run(self._commands.recv())

    def loaded(self) -> None:
        self._commands.send(Loaded())
        self.proceed()

    def proceed(self) -> None:
        while True:
            command: object = self._commands.recv()
            if isinstance(command, Proceed):
                return
            if isinstance(command, Abort):
                raise PassAborted
            self._run(command)  # a pass that overtakes this one

    def decode_attention(self, num_slots: int) -> DecodeAttention:
        """What attends to this rank's heads in the next step. Only ranks that have KV have one."""
        raise NotImplementedError

    def part_taker(self, transfer: TransferKey) -> PartTaker:
        """What ships this rank's heads of a prompt. Only ranks that ship have one."""
        raise NotImplementedError

    def step_done(self) -> None:
        """A step has been run."""

    def target(self, name: str) -> Any:
        """Whose method of this name the lead calls (`LeadingRank.call`)."""
        return self

    def prepare(self, role: Role, kernels: KernelMode, is_tested: bool, epsilon_tables: str) -> None:
        """Take what the worker computes with, beside the model: its kernels and its tables.

        Args: is_tested: compare the kernels that the role uses with their references; see `self_test.py`.
        """
        spec, device = self.model.spec, self.model.device
        choose_kernels(kernels, device)
        install_tables(epsilon_tables)
        for shape in model_shapes(spec, device) if is_tested else ():
            self_test(role, shape)

    def take_aside(self, word: Any) -> None:
        """Do what the lead says aside, whatever runs; on a thread of its own. See `LeadingRank.aside`."""

    def listen_aside(self) -> None:
        """Runs on that thread, until the lead is gone."""
        with suppress(EOFError, OSError):
            while True:
                word = self._notes.recv()
                if isinstance(word, Answer):
                    self._answers.put(word)
                else:
                    self.take_aside(word)

    def note(self, note: object) -> None:
        """Tell the lead something that it does not wait for; see `LeadingRank.on_note`. Any thread may."""
        with self._noting:
            self._notes.send(note)

    def ask(self, what: object, *, timeout_s: float) -> Any:
        """Have the lead answer at once, whatever either of the two runs; see `LeadingRank.on_question`. Any
        thread may. Raises: TimeoutError: there is no answer in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._asking:
            self._num_asked += 1
            self.note(Question(number=self._num_asked, what=what))
            with suppress(queue.Empty):
                while True:
                    answer = self._answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
                    if answer.number == self._num_asked:
                        return answer.answer
        raise TimeoutError(f"the leading rank has given no answer for {timeout_s:g} s")

    @property
    def model(self) -> TransformersModel:
        """This rank's part."""
        assert self._model is not None, "nothing is loaded"
        return self._model

    def _run(self, command: object) -> None:
        if isinstance(command, Load):
            self._load(command)
            return
        try:
            if isinstance(command, Prefill):
                self._prefill(command)
            elif isinstance(command, Decode):
                self._decode(command)
            elif isinstance(command, Call):
                self._call(command)
        except PassAborted:
            pass
        except InvalidRequest:
            pass  # the lead tells the request

    def _load(self, command: Load) -> None:
        try:
            self._model = load_model(
                command.path_or_id,
                device=command.device,
                dtype=command.dtype,
                max_model_len=command.max_model_len,
                ranks=self,
            )
        except KvferryError as error:
            self._commands.send(Loaded(error=error.message))

    @torch.inference_mode()
    def _call(self, command: Call) -> None:
        answer: object
        try:
            answer = getattr(self.target(command.name), command.name)(*command.args)
        except KvferryError as error:
            if not command.is_answered:
                raise
            answer = error.with_traceback(None)
        if command.is_answered:
            self._commands.send(answer)

    def _prefill(self, command: Prefill) -> None:
        model = self.model
        token_ids = torch.empty(command.num_tokens, dtype=torch.int64, device=model.device)
        self.broadcast(token_ids)
        division = command.division
        current = RankPrefillPass(
            self,
            model.spec,
            start=command.start,
            num_queries=command.num_queries,
            compressor=None
            if division is None
            else PartCompressor(model, division, self.part_taker(division.transfer)),
        )
        on_logits = (lambda first, logits: None) if command.with_logits else None
        model.run_prompt(token_ids, command.start, current, on_logits=on_logits)

    def _decode(self, command: Decode) -> None:
        model = self.model
        current = RankDecodePass(self.decode_attention(command.batch_size), spec=model.spec)
        step = torch.empty(2, command.batch_size, dtype=torch.int64, device=model.device)
        self.broadcast(step)
        model.run_step(step[0], step[1], current)
        self.step_done()
        if current.error is not None:  # the lead's logits are not numbers, by which it knows
            _log.error("attention of a rank failed", rank=self.rank, exc_info=current.error)


def _answer(life: Connection) -> None:
    """Answer the lead's pings; end this process with the lead."""
    while True:
        try:
            life.recv_bytes()
            life.send_bytes(b"!")
        except (EOFError, OSError):
            os._exit(0)


def main() -> None:
    # The lead gets the signals of their terminal or service manager, and ends this process when it is done.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    commands, life, notes = (Connection(int(descriptor)) for descriptor in sys.argv[1:4])
    module, name = sys.argv[4].split(":")
    threading.Thread(target=_answer, args=(life,), daemon=True).start()
    setup_logging("warning", "auto", "rank")
    code = 1
    try:
        rank: FollowingRank = getattr(importlib.import_module(module), name)(commands, notes)
        threading.Thread(target=rank.listen_aside, daemon=True).start()
        rank.join()
        rank.follow()
    except EOFError:
        code = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
