"""Every kernel compiled without a GPU, held against its gate.

Needs no GPU and takes no times: registers, spills, shared memory, load widths, conversions. Triton makes an
argument that is 1 a constant of the code, and knows of one that 16 divides, so what is compiled has several
KV heads, a batch of two and odd lengths, as what serves.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from case import MODELS, Case, Model
from compiler import Facts, Launch, caught, compile_launch, folded, specialised
from decoder_cases import decoder_cases
from dense_cases import append_case, dense_case
from gates import SHARED_BYTES, TUNED, breaks
from hsa_cases import HsaSize, hsa_cases
from kivi_cases import kivi_case
from packed_cases import check_case, knapsack_case, pack_case, trizone_case
from score_cases import chunk_case, window_case

from kvferry.kernels import attention_mass, dependent_launch
from kvferry.kernels.dense_decode import triton_kernel
from kvferry.kernels.device_limits import RESERVED_BYTES
from kvferry.kernels.hsa import MAX_PAGES
from kvferry.kernels.quantise import WIDTHS

HEAD_DIMS = (64, 96, 128, 256)
GROUP_SIZES = (1, 4, 5, 7, 8, 16)
SPECIAL_GROUP_SIZES = (4, 16)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NUM_KV_HEADS, BATCH_SIZE = 2, 2
ONE_HEAD = ("D128-G4-bf16", "D256-G4-bf16")
"""Shapes that are compiled with one KV head, too: one of eight ranks has it, or a small model."""
HEAD_COUNTS = ("num_heads", "num_kv_heads")
"""Arguments that are 1 of one sequence with one KV head alone."""
_CPU = torch.device("cpu")


def models() -> Iterator[Model]:
    """The models' shapes, then every shape that is served, named as D128-G4-bf16 and D128-G4-bf16-H1 are."""
    yield from MODELS
    for head_dim, group_size, (short, dtype) in itertools.product(HEAD_DIMS, GROUP_SIZES, DTYPES.items()):
        name = f"D{head_dim}-G{group_size}-{short}"
        model = Model(
            name=name, num_kv_heads=NUM_KV_HEADS, group_size=group_size, head_dim=head_dim, dtype=dtype
        )
        yield model
        if name in ONE_HEAD:
            yield replace(model, name=f"{name}-H1", num_kv_heads=1)


def batch_size_of(model: Model) -> int:
    """How many sequences are compiled for. One KV head serves another binary with one sequence only."""
    return 1 if model.num_kv_heads == 1 else BATCH_SIZE


def compile_cases(model: Model) -> list[Callable[[], Case]]:
    """Launches whose constants are the largest of a shape's, on as few rows as give them."""
    batch_size = batch_size_of(model)
    return [
        lambda: dense_case(model, batch_size=batch_size, length=64, device=_CPU, seed=0, target=None),
        lambda: append_case(model, batch_size=batch_size, device=_CPU, seed=0),
        lambda: hsa_cases(
            model,
            HsaSize(
                batch_size=1,  # of its grid alone, and these are many rows
                length=2 * MAX_PAGES,
                page_size=2,
                num_channels=model.head_dim,
                num_tokens=256,
            ),
            device=_CPU,
            seed=0,
            targets=(None, None),
        )[-1],
        lambda: hsa_cases(
            model,
            HsaSize(batch_size=1, length=64, page_size=1, num_channels=model.head_dim, num_tokens=32),
            device=_CPU,
            seed=0,
            targets=(None, None),
        )[0],
        lambda: trizone_case(
            model, batch_size=batch_size, kept=300, new=16, device=_CPU, seed=0, target=None
        ),
        lambda: window_case(model, window=32, length=65, device=_CPU, seed=0, target=None),
        *(partial(_column_case, model, number) for number in range(2)),
        lambda: pack_case(model, length=300, device=_CPU, seed=0, target=None),
        *(partial(_decoder_case, model, number) for number in range(5)),
        lambda: check_case(model, length=300, device=_CPU, seed=0),
        lambda: knapsack_case(model, length=301, device=_CPU, seed=0),
        lambda: chunk_case(model, chunk=512, length=513, device=_CPU, seed=0),
        *(
            partial(kivi_case, model, bits=bits, batch_size=batch_size, length=40, new=1, device=_CPU, seed=0)
            for bits in WIDTHS
        ),
        *(_special_cases(model) if model.group_size in SPECIAL_GROUP_SIZES else ()),
    ]


def _special_cases(model: Model) -> list[Callable[[], Case]]:
    """Attention with a window, capped logits and sinks. How many query heads share a KV head changes little,
    because a tile has `MIN_BLOCK_G` of them."""
    size = HsaSize(
        batch_size=1, length=64, page_size=1, num_channels=model.head_dim, num_tokens=32, is_special=True
    )
    dense = {"length": 64, "window": 32, "device": _CPU, "seed": 0, "target": None}
    dense["batch_size"] = batch_size_of(model)
    return [
        *(partial(dense_case, model, **dense, **softmax) for softmax in ({"capped": True}, {"sinks": True})),
        lambda: hsa_cases(model, size, device=_CPU, seed=0, targets=(None, None))[-1],
    ]


def _decoder_case(model: Model, number: int) -> Case:
    return decoder_cases(model, batch_size=batch_size_of(model), device=_CPU, seed=0)[number]


def _column_case(model: Model, number: int) -> Case:
    """Column sums of a whole prompt for each query head; `window_case` has those of a KV head.

    Args: number: of the kernel of two that is listed.
    """
    window = window_case(model, window=32, length=65, device=_CPU, seed=0, target=None)
    queries = torch.zeros(model.num_kv_heads, model.group_size, 65, model.head_dim, dtype=model.dtype)

    def launch() -> torch.Tensor:
        return attention_mass.attention_mass(queries, queries[:, 0], scaling=1.0, per_query_head=True)

    of_this_last = tuple(sorted(window.kernels, key=lambda kernel: kernel is window.kernels[number]))
    return replace(window, special="each query head", launch=launch, kernels=of_this_last)


def launches_of(case: Case, arch: str) -> list[Launch]:
    """What a case launches on a GPU of an architecture."""
    shared, capability = SHARED_BYTES[arch] + RESERVED_BYTES, int(arch.removeprefix("sm_"))
    with (
        patch.object(triton_kernel, "shared_bytes", lambda device: shared),
        patch.object(dependent_launch, "compute_capability", lambda device: capability),
        caught(list(case.kernels)) as launches,
    ):
        case.launch()
    return launches


def compile_all(
    only: str = "", model_names: tuple[str, ...] = (), architectures: tuple[str, ...] = TUNED
) -> list[dict[str, Any]]:
    """Facts of every kernel in whose name `only` is found, at the named models' shapes (all where none is
    named).

    What would compile to the same code, as of models of one shape, is compiled once and listed for each.

    Args: only: a regular expression.
    Raises:
        ValueError: no model or architecture has such a name.
        Exception: whatever the compiler raises where a kernel does not compile.
    """
    known = {model.name: model for model in models()}
    if unknown := set(model_names) - set(known):
        raise ValueError(f"models is {sorted(unknown)}; there are {', '.join(known)}")
    if others := set(architectures) - set(SHARED_BYTES):
        raise ValueError(f"architectures is {sorted(others)}; there are {', '.join(SHARED_BYTES)}")
    compiled: dict[tuple[Any, ...], Facts] = {}
    rows = []
    for name in model_names or known:
        model = known[name]
        for make in compile_cases(model):
            case = make()
            for arch in architectures:
                listed = set()
                for launch in launches_of(case, arch):
                    # what is special is so in the last kernel alone
                    is_known = bool(case.special) and launch.kernel is not case.kernels[-1]
                    if not re.search(only, launch.kernel.__name__) or is_known:
                        continue
                    one = set(HEAD_COUNTS).intersection(folded(launch))
                    assert model.num_kv_heads == 1 or not one, f"{name} has one KV head in {launch.kernel}"
                    key = (launch.kernel.__name__, arch, repr(specialised(launch)), repr(launch.options))
                    if key in listed:
                        continue
                    listed.add(key)
                    if key not in compiled:
                        compiled[key] = compile_launch(launch, arch)
                    facts = compiled[key]
                    shape = {
                        "model": name, "head_dim": model.head_dim, "group_size": model.group_size,
                        "num_kv_heads": model.num_kv_heads,
                    }  # fmt: skip
                    dtype, broken = str(model.dtype), breaks(facts, model.head_dim)
                    special = {"special": case.special} if case.special else {}
                    rows.append({**shape, "dtype": dtype, **facts.row(), **special, "breaks": broken})
    return rows
