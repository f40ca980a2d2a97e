"""Marks in a CUDA stream's work: how far it must be before a sequence's layers are read on another stream.

Steps run on a stream of their own (`cuda_device.py`). Everything else that writes to the arena runs on the
device's default stream, in one of these threads:

    receiver's      blocks (`ArenaCopier`), rows copied from a session's retained ones (`DeltaLayer.open`),
                    page extremes and the like, checks of packed layers, joined parts
    a request's     the copy of a prompt that siblings share (`DecodeService._begin_shared`)
    engine's        moves: growth, compaction, back from the host (`Sequence.move`); the warm-up's prompts
    sweeper's       retained rows that are copied to less memory, which only the receiver's thread reads

A sequence has a mark behind its own last write of these, for which its join waits. A stream works in order,
so what was queued there before is done by then, too: blocks of an aborted transfer to the same range,
retained rows, weights. What is queued later, such as another sequence's blocks, delays no step. Rows that a
step appends need no mark: they are on the steps' own stream, and the engine waits for a step before others
read or move its rows.
"""

from __future__ import annotations

import torch


def written_so_far(device: torch.device) -> torch.cuda.Event | None:
    """Mark what this thread's stream has been given so far; None on a CPU, where it is done."""
    if device.type != "cuda":
        return None
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark
