"""KIVI decode attention: one new token of one sequence and layer attends to quantised rows and to new ones.

The codes are read as they arrived (`rows.py`).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvferry.kernels.dispatch import alignment_problem, attention_problem, check_attention, run
from kvferry.kernels.kivi import torch_path
from kvferry.kernels.kivi.rows import KiviRows


def kivi_decode(
    queries: Tensor, rows: KiviRows, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """Compute the softmax attention of one new token over quantised rows and the new tokens, itself included.

    Args, returns, raises: as in `kernels`.
    """
    check_attention(queries, new_keys, new_values, least=0, prefix="new_", rows="m")
    fits = (rows.keys.shape[0], rows.keys.shape[2]) == (queries.shape[0], queries.shape[2])
    if not fits or rows.values.shape[2] != new_values.shape[2]:
        raise ValueError(f"rows of {tuple(rows.keys.shape)} do not fit queries {tuple(queries.shape)}")
    if rows.num_rows + new_keys.shape[1] == 0:
        raise ValueError("there is neither a quantised row nor a new one; there must be one to attend to")
    unsupported = partial(_unsupported, queries, rows, new_keys, new_values)
    in_torch = partial(torch_path.attend, queries, rows, new_keys, new_values, scaling=scaling)
    return run("kivi", queries.device, "kivi.triton_kernel.kivi_decode", in_torch, unsupported)


def _unsupported(queries: Tensor, rows: KiviRows, new_keys: Tensor, new_values: Tensor) -> str | None:
    problem = attention_problem(queries, new_keys, new_values, prefix="new_") or rows.problem
    if problem is None and new_keys.shape[1] == 0:
        problem = "there is no new row"
    if problem is None and new_keys.shape[1] > 1 and new_keys.stride(1) != new_keys.shape[2]:
        problem = f"new rows are not {new_keys.shape[2]} elements apart"
    return problem or alignment_problem(
        codes=rows.codes, scales=rows.scales, keys=rows.keys, values=rows.values
    )
