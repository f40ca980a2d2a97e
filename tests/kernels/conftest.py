"""Kernels in Triton's CPU interpreter: slow by the operation, so shapes are few and small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvtest.triton_guard import guarded

from kvferry.kernels import dispatch
from kvferry.kernels.quarantine import quarantined


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """Every interpreted kernel of these tests runs guarded, with its programs in another order, and none is
    quarantined, after which torch would be tested."""
    with guarded(seed=1):
        yield
    assert not quarantined()


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Ops with a Triton kernel run it in the interpreter for the length of a test, or say why they cannot."""
    dispatch.configure("triton", torch.device("cpu"))
    yield
    dispatch.configure("auto", torch.device("cpu"))
