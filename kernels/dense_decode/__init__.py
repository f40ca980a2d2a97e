"""Dense decode attention: one new token of one sequence and layer attends to every cached row.

Called by the decode engine for layers without sparse attention.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvferry.kernels.dispatch import attention_problem, check_attention, run
from kvferry.kernels.softmax import Scaling
from kvferry.kernels.torch_attention import attend_rows


def dense_decode(queries: Tensor, keys: Tensor, values: Tensor, *, scaling: Scaling) -> Tensor:
    """Compute softmax(scaling * q K^T) V, or as `Softmax` says.

    Args: as in `kernels`.
        keys, values: `[H_kv, n, D]`, n >= 1; rows contiguous, heads at any stride (a slice of a longer
            cache).
    """
    check_attention(queries, keys, values)
    if keys.stride(2) != 1 or values.stride(2) != 1:
        raise ValueError("rows of keys and values must be contiguous (stride 1 over D)")
    in_torch = partial(attend_rows, queries, keys, values, scaling=scaling)
    unsupported = partial(attention_problem, queries, keys, values)
    return run(
        "dense_decode", queries.device, "dense_decode.triton_kernel.dense_decode", in_torch, unsupported
    )
