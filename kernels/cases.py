"""The self-test's cases: every Triton kernel at a model's shapes against the same op in torch.

A case is small: three sequences or a few hundred tokens, at odd lengths, once as they are and once with NaN
in one sequence (or head), whose neighbours must not notice. Inputs are made anew for each side from one seed,
because decode attention writes rows. Nothing here counts calls, falls back or quarantines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.kernels import decode_cases as decode
from kvferry.kernels import prefill_cases as prefill
from kvferry.kernels.case import OpCheck
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.dispatch import shape_problem

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
    """The cases of one op; none if it has no kernel for this shape.

    Args: shape: of the model; its layers and slots do not matter.
    """
    if op in _CASES and shape_problem(shape.dtype, shape.group_size, shape.head_dim, shape.device) is None:
        yield from _CASES[op](shape)
