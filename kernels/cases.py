"""The self-test's cases: every Triton kernel at a model's shapes against the same op in torch, and C code at
small ones before it is used.

A case is small: three sequences or a few hundred tokens, at odd lengths, once as they are and once with NaN
in one sequence (or head), whose neighbours must not notice. Inputs are made anew for each side from one seed,
because decode attention writes rows. Nothing here counts calls, falls back or quarantines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import torch

from kvferry.kernels import decode_cases as decode
from kvferry.kernels import prefill_cases as prefill
from kvferry.kernels.case import OpCheck
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.dispatch import shape_problem
from kvferry.kernels.native.library import has_halves, register_check
from kvferry.kernels.trizone.batch import NATIVE_CHANNELS

_CASES: dict[str, Callable[[BatchShape], Iterator[OpCheck]]] = {
    "chunk_scores": prefill.chunk_cases,
    "column_sums": prefill.column_cases,
    "decoder_ops": decode.decoder_cases,
    "dense_decode": decode.dense_cases,
    "hsa": decode.hsa_cases,
    "kivi": decode.kivi_cases,
    "knapsack": prefill.knapsack_cases,
    "pack": prefill.pack_cases,
    "packed_check": prefill.packed_check_cases,
    "trizone": decode.trizone_cases,
    "window_scores": prefill.window_cases,
}


def op_checks(op: str, shape: BatchShape) -> Iterator[OpCheck]:
    """Yield the cases of one op; none if it has no kernel for this shape.

    Args: shape: of the model; its layers and slots do not matter.
    """
    if op in _CASES and shape_problem(shape.dtype, shape.group_size, shape.head_dim, shape.device) is None:
        yield from _CASES[op](shape)


_OF_C_CODE = BatchShape(
    num_layers=1,
    num_slots=1,
    num_kv_heads=2,
    group_size=5,
    head_dim=24,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


@register_check
def native_errors() -> dict[str, float]:
    """Return the errors of C code relative to torch, by op and case."""
    shape, of_packed = _OF_C_CODE, replace(_OF_C_CODE, head_dim=NATIVE_CHANNELS)
    cases = [decode.dense_cases(shape), decode.hsa_cases(shape)]
    cases.append(prefill.chunk_cases(shape, "chunk_scores.native.chunk_scores"))
    if has_halves():
        cases += [decode.trizone_cases(of_packed), decode.packed_hsa_cases(of_packed)]
    plain = [case for case in chain(*cases) if case.spoilt is None]
    return {f"{case.op}, {case.name},": case.error(case.launch()) for case in plain}
