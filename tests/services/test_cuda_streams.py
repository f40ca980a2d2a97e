"""Which streams a worker makes on CUDA, and with what priority: decode's steps go before all of prefill's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvferry.services.prefill.host_copies import PinnedCopies
from kvferry.shared.device.cuda_device import CudaDevice, step_device
from kvferry.shared.model.interface import LanguageModel

DEVICE = torch.device("cuda:0")


class RecordedStream:
    """Instead of CUDA's, of which there is none; as there, a lower number is a higher priority."""

    made: list[RecordedStream]

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        RecordedStream.made.append(self)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    RecordedStream.made = []
    monkeypatch.setattr(torch.cuda, "Stream", RecordedStream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))


def test_decodes_stream_has_a_higher_priority_than_each_of_prefills() -> None:
    model = cast(LanguageModel, SimpleNamespace(device=DEVICE, num_ranks=1))
    step_device(model)
    (decode,) = RecordedStream.made
    PinnedCopies(DEVICE)
    step_device(model, priority=0)
    prefill = RecordedStream.made[1:]
    # it computes, copies to the host, copies history to the device, and captures the step of drafts
    assert len(prefill) == 4
    assert all(decode.priority < stream.priority for stream in prefill)
    assert {stream.device for stream in RecordedStream.made} == {DEVICE}


def test_decode_steps_run_in_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", entered.append)
    CudaDevice(DEVICE).scope()
    assert entered == RecordedStream.made
