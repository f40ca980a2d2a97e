"""Services' processes of a test that a busy machine, or a thread that stands still, disturbs at a known time.

prefill   the first long prompt takes a second longer for each layer
decode    SIGUSR1: the machine is busy, or is not any more: each turn of the event loop takes long, and each
          step; SIGUSR2: the engine's thread stands still while it waits for work, or goes on
router    asks for statuses often, and waits for them for less than two seconds
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from typing import Any

LONG_TOKENS = 200
LAYER_S = 1.1
LAP_S, STEP_S = 0.25, 0.05
STATUS_S = 0.6
STALL_S = 1.0


class FreezingCondition(threading.Condition):
    """A condition on which threads that wait stand still, without its lock, until `goes_on` is set."""

    goes_on, stands_still = threading.Event(), threading.Event()
    goes_on.set()

    def wait(self, timeout: float | None = None) -> bool:
        notified = super().wait(timeout)
        if not self.goes_on.is_set():
            self.stands_still.set()
            self.release()
            self.goes_on.wait()
            self.acquire()
        return notified


def prefill() -> None:
    """Run the command of `sys.argv`."""
    from kvferry.services.launcher.cli import main
    from kvferry.services.prefill.engine import PrefillEngine

    layer_done, numbers = PrefillEngine._layer_done, itertools.count()

    def late(self: PrefillEngine, started: Any, layer: int) -> None:
        is_long = started.job.resolved.num_prompt_tokens >= LONG_TOKENS
        if is_long and next(numbers) < self._model.spec.num_layers:
            time.sleep(LAYER_S)
        layer_done(self, started, layer)

    PrefillEngine._layer_done = late  # type: ignore[method-assign]
    main()


def decode() -> None:
    """Run the command of `sys.argv`."""
    from kvferry.services.decode.engine import DecodeEngine
    from kvferry.services.launcher.cli import main
    from kvferry.shared.process import heartbeat, worker

    heartbeat.STALL_S = STALL_S
    is_busy = threading.Event()
    step, serve = DecodeEngine._step, worker.serve_until_signal

    def slow_step(self: DecodeEngine) -> None:
        if is_busy.is_set():
            time.sleep(STEP_S)
        step(self)

    async def lap() -> None:
        while True:
            await asyncio.sleep(0 if is_busy.is_set() else 0.02)
            if is_busy.is_set():
                time.sleep(LAP_S)

    async def serve_busily(*arguments: Any) -> None:
        lapping = asyncio.create_task(lap())
        await serve(*arguments)
        lapping.cancel()

    def toggle(event: threading.Event) -> None:
        (event.clear if event.is_set() else event.set)()

    make = DecodeEngine.__init__

    def make_freezing(self: DecodeEngine, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._condition = FreezingCondition()

    DecodeEngine.__init__ = make_freezing  # type: ignore[method-assign]
    DecodeEngine._step = slow_step  # type: ignore[method-assign]
    worker.serve_until_signal = serve_busily  # type: ignore[assignment]
    signal.signal(signal.SIGUSR1, lambda *_: toggle(is_busy))
    signal.signal(signal.SIGUSR2, lambda *_: toggle(FreezingCondition.goes_on))
    main()


def router() -> None:
    """Run the command of `sys.argv`."""
    from kvferry.services.launcher.cli import main
    from kvferry.services.router.turn.worker_pool import WorkerPool

    WorkerPool.__init__.__kwdefaults__["status_timeout_s"] = STATUS_S
    main()
