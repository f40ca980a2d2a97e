"""A rank that follows: it loads its part of the model and runs the passes that the lead names.

Entry point of a child process of a worker, which ends with the worker, however that happens:

    python -m kvferry.shared.model.parallel.follower COMMANDS LIFE NOTES CLASS

COMMANDS, LIFE and NOTES are descriptors of pipes; CLASS is `module:name` of a `FollowingRank`. Each role has
its own class, because prefill's ranks ship and decode's have KV.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch

from kvferry.kernels.dispatch import KernelMode
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.device.kernel_paths import Role, choose_kernels
from kvferry.shared.device.self_test import model_shapes, self_test
from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.interface import DecodeAttention, Division
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.parallel.passes import PartTaker, RankDecodePass, RankPrefillPass
from kvferry.shared.model.parallel.ranks import Call, Question, Ranks, Word
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
        self._answers: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self._model: TransformersModel | None = None

    def join(self) -> None:
        self._commands.send(None)
        super().join()

    def follow(self) -> None:
        """Run what the lead names. Raises: EOFError: the lead is gone."""
        while True:
            self._run(self._commands.recv())

    def loaded(self) -> None:
        self._commands.send(None)
        self.proceed()

    def proceed(self) -> None:
        while (word := self._commands.recv()) is not Word.PROCEED:
            if word is Word.ABORT:
                raise PassAborted
            self._run(word)  # a pass that overtakes this one

    def decode_attention(self, num_slots: int) -> DecodeAttention:
        """Return the attention of this rank's heads in the next step. Only ranks that have KV have one."""
        raise NotImplementedError

    def part_taker(self, transfer: TransferKey) -> PartTaker | None:
        """Return what ships this rank's heads of a prompt; None if aborted. Only ranks that ship have one."""
        raise NotImplementedError

    def step_done(self) -> None:
        """Take note that a step has been run."""

    def target(self, name: str) -> Any:
        """Return the object whose method of this name the lead calls (`LeadingRank.call`)."""
        return self

    def take_aside(self, word: Any) -> None:
        """Do what the lead says aside, on a separate thread, whatever else runs. See `LeadingRank.aside`."""

    def listen_aside(self) -> None:
        """Listen on that thread until the lead is gone."""
        with suppress(EOFError, OSError):
            while True:
                word = self._notes.recv()
                if isinstance(word, Question):
                    self._answers.put(word)
                else:
                    self.take_aside(word)

    def note(self, note: object) -> None:
        """Tell the lead something that it does not wait for; see `LeadingRank.on_note`. Any thread may."""
        with self._noting:
            self._notes.send(note)

    def ask(self, what: object, *, timeout_s: float) -> Any:
        """Have the lead answer at once, whatever either of the two is running; see `LeadingRank.on_question`.
        Any thread may. Raises: TimeoutError: there is no answer in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._asking:
            self._num_asked += 1
            self.note(Question(number=self._num_asked, content=what))
            with suppress(queue.Empty):
                while True:
                    answer = self._answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
                    if answer.number == self._num_asked:
                        return answer.content
        raise TimeoutError(f"the leading rank has given no answer for {timeout_s:g} s")

    @property
    def model(self) -> TransformersModel:
        """This rank's part."""
        assert self._model is not None, "nothing is loaded"
        return self._model

    @torch.inference_mode()
    def _run(self, call: Call) -> None:
        answer: object = None
        try:
            answer = getattr(self.target(call.name), call.name)(*call.args)
        except PassAborted:
            pass
        except KvferryError as error:
            if not call.is_answered and not isinstance(error, InvalidRequest):  # the lead answers it
                raise
            answer = error.with_traceback(None)
        if call.is_answered:
            self._commands.send(answer)

    @torch.inference_mode(False)  # the weights are ordinary tensors
    def load(self, path_or_id: str | Path, device: str, dtype: str, max_model_len: int) -> None:
        """Load this rank's part of a model; arguments as of `load_model`. On failure the lead is told why
        (`LeadingRank.loaded`)."""
        try:
            self._model = load_model(
                path_or_id, device=device, dtype=dtype, max_model_len=max_model_len, ranks=self
            )
        except KvferryError as error:
            self._commands.send(error.with_traceback(None))

    def prepare(
        self, role: Role, kernels: KernelMode, is_tested: bool, epsilon_tables: str, calibration: str
    ) -> None:
        """Set up what the worker computes with beside the model: its kernels and its tables.

        Args: is_tested: compare the kernels that the role uses with their references; see `self_test.py`.
        """
        spec, device = self.model.spec, self.model.device
        choose_kernels(kernels, device)
        install_tables(epsilon_tables, calibration=calibration)
        for shape in model_shapes(spec, device) if is_tested else ():
            self_test(role, shape)

    def run_prompt(
        self,
        num_tokens: int,
        start: int,
        num_queries: int | None,
        with_logits: bool,
        division: Division | None,
    ) -> None:
        """Run a prompt's pass; arguments as of `LanguageModel.prefill`. The token ids follow by broadcast."""
        model = self.model
        token_ids = torch.empty(num_tokens, dtype=torch.int64, device=model.device)
        self.broadcast(token_ids)
        current = RankPrefillPass(
            self,
            model,
            model.spec,
            start=start,
            num_queries=num_queries,
            division=division,
            taker=None if division is None else self.part_taker(division.transfer),
        )
        on_logits = (lambda first, logits: None) if with_logits else None
        model.run_prompt(token_ids, start, current, on_logits=on_logits)

    def run_step(self, batch_size: int) -> None:
        """Run a decode step over the first slots. Token ids and positions follow by broadcast."""
        model = self.model
        current = RankDecodePass(self.decode_attention(batch_size), spec=model.spec)
        step = torch.empty(2, batch_size, dtype=torch.int64, device=model.device)
        self.broadcast(step)
        model.run(step[0][:, None], step[1][:, None], current)
        self.step_done()
        if current.error is not None:  # the lead sees it, because the step's logits are not numbers
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
