"""FlashAttention 3 is used where it is installed and right; else torch's attention stays, as the log says.

Without a GPU: torch's registry is real, the package's operators are stand-ins, the comparison runs on a CPU.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from kvferry.shared.model import flash_attention
from kvferry.shared.model.flash_attention import use_flash_attention_3

CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package on a GPU of compute capability 9.0."""
    module = types.ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    library = torch.library.Library("flash_attn_3", "DEF")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor x) -> Tensor")
    yield
    restore_flash_attention_impl(False)
    library._destroy()


@pytest.mark.usefixtures("hopper")
def test_it_is_used_where_it_agrees() -> None:
    assert flash_attention._largest_difference(CPU) > 0
    assert use_flash_attention_3(CPU)
    assert current_flash_attention_impl() == "FA3"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "fault", [lambda *_, **__: torch.full((1, 4, 100, 128), torch.nan), lambda *_, **__: 1 / 0]
)
def test_it_is_not_used_where_it_is_wrong_or_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: object
) -> None:
    monkeypatch.setattr(flash_attention, "causal_attention", fault)
    assert not use_flash_attention_3(CPU)
    assert current_flash_attention_impl() is None
    assert [record.message.partition(":")[0] for record in caplog.records] == ["FlashAttention 3 is not used"]


@pytest.mark.usefixtures("hopper")
def test_other_gpus_and_other_machines_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not use_flash_attention_3(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    assert not use_flash_attention_3(CPU)
    assert current_flash_attention_impl() is None
