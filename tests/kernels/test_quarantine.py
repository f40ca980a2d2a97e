"""A kernel that raises is quarantined: its call and all later ones take the torch path, and equal it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.kernels import dispatch, quarantine
from kvferry.kernels.chunk_scores import chunk_scores
from kvferry.kernels.column_sums import column_sums, window_scores
from kvferry.kernels.decoder_ops import silu_product
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.hsa import attend, page_extremes
from kvferry.kernels.kivi import kivi_decode
from kvferry.kernels.kivi.rows import kivi_quantise
from kvferry.kernels.knapsack import take_increments
from kvferry.kernels.packed.check import begin_packed_check
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.trizone import trizone_decode_segments

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("interpreter")


class OutOfResources(Exception):
    """Named as Triton's."""


class CompilationError(Exception):
    """Named as Triton's."""


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    quarantine.state.by_op = {}


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def run_hsa() -> Tensor:
    keys, values = rows(2, 2, 45, 16)
    page_max, page_min = torch.zeros(2, 2, 16, 12).mT
    page_extremes(keys, page_max, page_min, length=45, page_size=4)
    sizes = {"length": 45, "page_size": 4, "num_channels": 8, "num_tokens": 9}
    return attend(rows(2, 3, 16), keys, values, page_max, page_min, **sizes, scaling=0.3)


def run_kivi() -> Tensor:
    quantised = kivi_quantise(*rows(2, 2, 37, 16), 4)
    return kivi_decode(rows(2, 3, 16), quantised, *rows(2, 2, 5, 16), scaling=0.3)


def run_pack() -> Tensor:
    keys, values = rows(2, 2, 37, 16)
    bits = [torch.full((2, units), 4, dtype=torch.uint8) for units in (16, 37)]
    return pack_layer(keys, values, *bits).buffer


def run_knapsack() -> Tensor:
    gained, order = rows(2, 30).double().abs().sort(dim=1, descending=True, stable=True)
    return take_increments(order, gained, (2, 14), torch.tensor([20, 55]), num_units=15)


def run_packed_check() -> Tensor:
    keys, values = rows(2, 2, 37, 16)
    bits = [torch.full((2, units), 4, dtype=torch.uint8) for units in (16, 37)]
    packed = pack_layer(keys, values, *bits)
    begin_packed_check(packed, 37)()
    return packed.buffer


def run_trizone() -> Tensor:
    keys, values = rows(2, 2, 37, 16)
    bits = [torch.full((2, units), 4, dtype=torch.uint8) for units in (16, 37)]
    packed = pack_layer(keys, values, *bits)
    return trizone_decode_segments(rows(2, 3, 16), [packed], *rows(2, 2, 5, 16), scaling=0.3)


OPS: dict[str, tuple[str, Callable[[], Any]]] = {
    "chunk_scores": (
        "chunk_scores.triton_kernel.chunk_scores",
        lambda: chunk_scores(rows(2, 3, 37, 16), rows(2, 37, 16), chunk_tokens=8, scaling=0.3),
    ),
    "column_sums": (
        "attention_mass.attention_mass",
        lambda: column_sums(rows(2, 3, 9, 16), rows(2, 37, 16), scaling=0.3).sums,
    ),
    "decoder_ops": (
        "decoder_ops.triton_kernel.silu_product",
        lambda: silu_product(rows(2, 37), rows(2, 37)),
    ),
    "dense_decode": (
        "dense_decode.triton_kernel.dense_decode",
        lambda: dense_decode(rows(2, 3, 16), *rows(2, 2, 37, 16), scaling=0.3),
    ),
    "hsa": ("hsa.triton_kernel.attend", run_hsa),
    "kivi": ("kivi.triton_kernel.kivi_decode", run_kivi),
    "knapsack": ("knapsack.triton_kernel.take_increments", run_knapsack),
    "pack": ("packed.triton_kernel.pack", run_pack),
    "packed_check": ("packed.check_kernel.begin", run_packed_check),
    "trizone": ("trizone.triton_kernel.trizone_decode_segments", run_trizone),
    "window_scores": (
        "attention_mass.attention_mass",
        lambda: window_scores(rows(2, 3, 9, 16), rows(2, 37, 16), scaling=0.3),
    ),
}


def fail_with(monkeypatch: pytest.MonkeyPatch, op: str, error: Exception) -> list[int]:
    """Make an op's launch raise. Returns the calls."""
    calls: list[int] = []

    def launch(*args: object, **kwargs: object) -> None:
        calls.append(1)
        raise error

    monkeypatch.setattr(f"kvferry.kernels.{OPS[op][0]}", launch)
    return calls


def test_every_op_with_a_kernel_is_tested() -> None:
    assert set(OPS) == set(dispatch.TRITON_OPS)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfResources("out of resource: shared memory"), "out_of_resources"),
        (CompilationError("at 3:4"), "compile_error"),
        (RuntimeError("device function failed"), "exception"),
    ],
)
@pytest.mark.parametrize("op", sorted(OPS))
def test_a_kernel_that_raises_is_quarantined_and_torch_answers(
    monkeypatch: pytest.MonkeyPatch, op: str, error: Exception, reason: str
) -> None:
    run = OPS[op][1]
    dispatch.configure("torch", CPU)
    expected = run()
    dispatch.configure("triton", CPU)
    heard: list[quarantine.Quarantined] = []
    quarantine.on_quarantine(heard.append)
    calls = fail_with(monkeypatch, op, error)
    assert torch.equal(run(), expected)
    assert quarantine.quarantined()[op].reason == reason
    assert torch.equal(run(), expected), "a later call"
    assert len(calls) == 1, "the kernel is not tried again"
    assert [entry.op for entry in heard] == [op], "told once"
    assert dispatch.kernel_paths(CPU)[op] == "torch"
    others = {name: path for name, path in dispatch.kernel_paths(CPU).items() if name != op}
    assert {name for name, path in others.items() if path == "interpreter"} == set(OPS) - {op}


def test_an_argument_that_torch_refuses_too_blames_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.full((1, 3, 16), 1e30)
    bits = [torch.full((1, units), 16, dtype=torch.uint8) for units in (16, 3)]
    with pytest.raises(ValueError, match="float16"):
        pack_layer(values, values, *bits)
    assert not quarantine.quarantined()


def test_a_device_without_memory_blames_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, "dense_decode", torch.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        OPS["dense_decode"][1]()
    assert not quarantine.quarantined()


def test_nothing_is_launched_in_torch_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "is_capturing", lambda: True)
    fail_with(monkeypatch, "hsa", RuntimeError("cannot be captured"))
    with pytest.raises(RuntimeError, match="cannot be captured"):
        run_hsa()
    assert quarantine.is_quarantined("hsa")
