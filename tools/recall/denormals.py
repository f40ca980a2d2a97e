"""Denormal numbers, which sharp attention produces in large numbers and which are slow on some CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat them as zero in this thread and those that it starts; restores torch's default afterwards."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
