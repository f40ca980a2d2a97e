"""Kernels in Triton's CPU interpreter: slow by the operation, so shapes are few and small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvferry.kernels import dispatch


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Ops with a Triton kernel run it in the interpreter for the length of a test, or say why they cannot."""
    dispatch.configure("triton", torch.device("cpu"))
    yield
    dispatch.configure("auto", torch.device("cpu"))
