"""Every kernel at every dtype under three orders of programs, and NaN in those that `test_isolation.py` does
not have. The self-test's cases at sizes that the interpreter gets through."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from kvtest.lanes import some
from kvtest.triton_guard import guarded
from torch import Tensor

from kvferry.kernels import cases, decode_cases, decoder_ops, dispatch, prefill_cases
from kvferry.kernels.attention_mass import attention_mass
from kvferry.kernels.chunk_scores import triton_kernel as chunk_scores
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.decoder_ops import triton_kernel as decoder_kernels
from kvferry.kernels.knapsack import triton_kernel as knapsack
from kvferry.kernels.packed import triton_kernel as packing
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed.layout import Bound
from kvferry.kernels.packed.packing import indexed_layer

KERNELS = Path(decoder_ops.__file__).parents[1]
SHAPE = BatchShape(
    num_layers=1, num_slots=1, num_kv_heads=1, group_size=2, head_dim=16, dtype=torch.float32,
    device=torch.device("cpu"),
)  # fmt: skip
SPECIAL = replace(SHAPE, has_windows=True, has_plain_softmax=False)
NAN, INF = float("nan"), float("inf")
SPOILT = 1
"""The head or row that is spoilt, of three."""
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # NumPy's, of the interpreter, for a logarithm of zero and for casts of NaN
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def guard() -> None:
    """Instead of the folder's."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of fewer tokens: one sequence has a whole group of KIVI's, and as many pages that matter as HSA
    chooses; the others' HSA is dense."""
    for name, value in {"LENGTHS": (5, 14, 45), "CAPACITY": 52}.items():
        monkeypatch.setattr(decode_cases, name, value)
    for name, value in {"PROMPT_TOKENS": 33, "LATER_TURN": 9, "WINDOW": 7, "CHUNK": 20}.items():
        monkeypatch.setattr(prefill_cases, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("seed", "dtype"), [*enumerate(dispatch.DTYPES, 1)], ids=str)
def test_every_kernel_keeps_to_its_memory_in_any_order(seed: int, dtype: torch.dtype) -> None:
    """`guarded` fails the test for an access out of bounds or misaligned, or two writes of one byte."""
    with guarded(seed=seed) as guard:
        for op in dispatch.TRITON_OPS:
            shapes = (SHAPE, SPECIAL) if op in ("dense_decode", "hsa") else (SHAPE,)
            for shape in shapes:
                for case in cases.op_checks(op, replace(shape, dtype=dtype)):
                    if case.spoilt is None:
                        assert case.problem(case.launch()) is None, (op, case.name)
    source = "\n".join(path.read_text() for path in KERNELS.rglob("*.py"))
    assert guard.kernels == set(re.findall(r"^def (_\w+_kernel)\(", source, flags=re.MULTILINE))


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def spoil(tensor: Tensor, value: float) -> Tensor:
    """A few elements of one head or row."""
    tensor = tensor.clone()
    tensor[SPOILT].view(-1)[3:40:7] = value
    return tensor


def scores(kind: str, fault: str, value: float) -> Tensor:
    queries, keys = random(3, 2, 33, 16), random(3, 33, 16)
    if fault == "queries":
        queries = spoil(queries, value)
    elif fault == "keys":
        keys = spoil(keys, value)
    if kind == "chunk_scores":
        return chunk_scores.chunk_scores(queries, keys, chunk_tokens=20, scaling=0.25, shared=False)
    return attention_mass(queries, keys, scaling=0.25, per_query_head=kind == "column_sums")


def decoder(kind: str, fault: str, value: float) -> Tensor:
    parts = [random(3, 64), random(3, 64) + 1, random(3, 16), random(3, 16)]
    if fault != "none":
        number = ("queries", "keys").index(fault)
        parts[number] = spoil(parts[number], value)
    first, second, cos, sin = parts
    if kind == "add_norm":
        return torch.cat(decoder_kernels.add_norm(first, second, random(64), 1e-5), 1)
    if kind == "silu_product":
        return decoder_kernels.silu_product(first, second)
    norms = (random(16), random(16), 1e-5) if kind == "rotate after norms" else None
    return torch.cat(decoder_kernels.rotate(first, second, second, cos, sin, norms), 1)


def packed(kind: str, fault: str, value: float) -> Tensor:
    """Every byte of each head, padded."""
    keys, values = random(3, 33, 16), random(3, 33, 16) + 1
    bits = [torch.tensor([2, 4, 8, 16], dtype=torch.uint8).repeat(3, n)[:, :units] for n, units in
            ((4, 16), (9, 33))]  # fmt: skip
    layer = indexed_layer(keys, values, *bits)
    if fault == "queries":
        values = spoil(values, value)
    elif fault == "keys":
        keys = spoil(keys, value)
    size_bytes = layer.layout.size_bytes
    report, buffer = packing.pack(keys, values, *bits, None, Bound(tokens=33, size_bytes=size_bytes))
    # what is not finite is refused, after all heads are packed
    assert bool(report[-1, 2]) == (fault != "none")
    layer = view_packed_layer(layer.layout, buffer)
    names = (
        "key_words", "values_2", "values_4", "values_8", "key_scales", "key_minima", "value_scales",
        "value_minima", "values_16", "channels", "positions",
    )  # fmt: skip
    return torch.stack(
        [
            torch.cat([getattr(head, name).contiguous().view(torch.uint8).flatten() for name in names])
            for head in layer.heads
        ]
    )


def taken(kind: str, fault: str, value: float) -> Tensor:
    weights = random(3, 33).double().abs()
    gains = weights[:, None] * torch.tensor([3.0, 1.0, 0.25], dtype=torch.float64)[:, None]
    gained, order = gains.flatten(1).sort(dim=1, descending=True, stable=True)
    if fault != "none":
        gained = spoil(gained, value)
    return knapsack.take_increments(order, gained, (2, 2, 12), torch.tensor([100, 170, 240]), 33)


CASES = {
    **{kind: partial(scores, kind) for kind in ("chunk_scores", "column_sums", "window_scores")},
    **{kind: partial(decoder, kind) for kind in ("add_norm", "silu_product", "rotate", "rotate after norms")},
    "pack": partial(packed, "pack"),
    "knapsack": partial(taken, "knapsack"),
}


@pytest.mark.parametrize("seed", some([1, 2], 2))
@pytest.mark.parametrize("name", CASES)
def test_a_spoilt_head_or_row_leaves_its_neighbours_bit_by_bit_as_they_are(name: str, seed: int) -> None:
    case = CASES[name]
    with guarded(seed=seed):
        clean = case("none", 0.0)
        for fault in ("queries", "keys"):
            for value in (NAN, INF, -INF):
                found = case(fault, value)
                assert found.shape == clean.shape
                for neighbour in (0, 2):
                    assert torch.equal(found[neighbour], clean[neighbour]), (fault, value)
