"""Numbers below the smallest normal one, of which sharp attention is full and on which some CPUs are slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Inside, they count as zero on this thread and on those that it starts; torch's default comes after."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
