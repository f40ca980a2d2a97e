"""The device on which one thread runs steps: a CPU, here, or a GPU with graphs (`cuda_device.py`).

Used by decode's steps, and by those of a draft in prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class StepDevice:
    """The device on which one thread runs steps. This class is for a CPU, where a step is done on return.

    Attributes: captures: whether `capture` makes steps faster.
    """

    captures = False

    def scope(self) -> AbstractContextManager[object]:
        """Return a context whose device work runs in order."""
        return nullcontext()

    def follow(self, written: torch.cuda.Event | None = None) -> None:
        """Make what other threads have written visible to later work in the scope.

        Args: written: up to this mark (`written_so_far`); None: so far.
        """

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the device work of `run`. Returns a function that replays it without the Python code.

        `run` may be called for this, so it must have no lasting effect at that time.

        Raises: RuntimeError: `run` cannot be captured.
        """
        return run

    def capture_warm(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture, as `capture`, a function that has run in the scope before: nothing is left to compile."""
        return self.capture(run)

    def fetch(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Callable[[], bool]]:
        """Begin to copy tensors to the host. Returns the copies and a function that says if they are done."""
        return tuple([tensor.clone() for tensor in tensors]), lambda: True


def written_so_far(device: torch.device) -> torch.cuda.Event | None:
    """Mark what this thread's stream has been given so far; None on a CPU, where it is done.

    Decode's steps run on a stream of their own (`cuda_device.py`). Everything else that writes to the arena
    runs on the device's default stream, in one of these threads:

        receiver's      blocks (`ArenaCopier`), rows copied from a session's retained ones
                        (`DeltaLayer.open`), page extremes and the like, checks of packed layers, joined parts
        a request's     the copy of a prompt that siblings share (`SharedPrompts.copy`)
        engine's        moves: growth, compaction, back from the host (`Part.move`); the warm-up's prompts
        sweeper's       retained rows copied to less memory, which only the receiver's thread reads

    A sequence has a mark behind its own last write of these, for which its join waits. A stream works in
    order, so what was queued there before is done by then, too: blocks of an aborted transfer to the same
    range, retained rows, weights. What is queued later, such as another sequence's blocks, delays no step.
    Rows that a step appends need no mark: they are on the steps' own stream, and the engine waits for a step
    before others read or move its rows.
    """
    if device.type != "cuda":
        return None
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark
