"""Mixed-bit decode attention on packed bytes: RDKV's TriZone (section 3.3, Eq. 7).

The decode engine calls this once a layer and step, with the packed prompt as it was shipped (zone A: K of all
kept tokens and V below 16 bits; zone B: float16 V rows) and the rows of the new tokens (zone C). Checks its
arguments and dispatches to an implementation; `reference.py` dequantises everything and attends densely.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kvferry.kernels.descriptors import alignment_problem, shape_problem
from kvferry.kernels.dispatch import path_for
from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.trizone import torch_path


def trizone_decode(
    queries: Tensor, packed: PackedLayer, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """Softmax attention of one new token over the packed prompt and the new tokens, itself included.

    With `k = s code + min` per channel, `q . k = sum_c (s_c q_c) code_c + sum_c min_c q_c`: codes are never
    scaled, and the second sum is one bias per query head. V likewise:
    `sum_t (p_t s_t) code_t + sum_t p_t min_t`.

    Args:
        queries: post-RoPE `[H_kv, G, D]`, channels in the model's order.
        packed: the layer, each head with as many tokens as it kept.
        new_keys, new_values: `[H_kv, m, D]`, m >= 0, the queries' dtype, at any strides.
        scaling: the softmax scale.

    Returns:
        `[H_kv, G, D]` in the queries' dtype; accumulated in float32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or a head has nothing to attend to.
    """
    return trizone_decode_segments(queries, (packed,), new_keys, new_values, scaling=scaling)


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """`trizone_decode` over several packed runs of tokens, such as a prompt and what was generated since,
    each packed by itself. Their order does not matter but to the last bit.

    Args, returns, raises: as `trizone_decode`; segments: at least one.
    """
    _check(queries, segments, new_keys, new_values)
    unsupported = partial(_unsupported, queries, new_keys, new_values)
    if path_for("trizone", queries.device, unsupported) == "torch":
        return torch_path.trizone_decode_segments(queries, segments, new_keys, new_values, scaling=scaling)
    # Here, because a CPU install has no Triton.
    from kvferry.kernels.trizone import triton_kernel

    return triton_kernel.trizone_decode_segments(queries, segments, new_keys, new_values, scaling=scaling)


def _unsupported(queries: Tensor, new_keys: Tensor, new_values: Tensor) -> str | None:
    problem = shape_problem(queries.dtype, queries.shape[1], queries.shape[2])
    if problem is None and new_keys.shape[1] > 1 and new_keys.stride(1) != new_values.stride(1):
        problem = f"rows of new_keys and new_values have strides {new_keys.stride(1)}, {new_values.stride(1)}"
    return problem or alignment_problem(new_keys=new_keys, new_values=new_values)


def _check(queries: Tensor, segments: Sequence[PackedLayer], new_keys: Tensor, new_values: Tensor) -> None:
    if queries.ndim != 3 or new_keys.ndim != 3 or new_keys.shape != new_values.shape:
        raise ValueError(
            f"queries {tuple(queries.shape)}, new_keys {tuple(new_keys.shape)} and new_values "
            f"{tuple(new_values.shape)} must be [H_kv, G, D], [H_kv, m, D] and [H_kv, m, D]"
        )
    num_kv_heads, _, head_dim = queries.shape
    if new_keys.shape[0] != num_kv_heads or new_keys.shape[2] != head_dim:
        raise ValueError(f"new_keys {tuple(new_keys.shape)} do not fit queries {tuple(queries.shape)}")
    if not segments:
        raise ValueError("there are no segments; there must be at least one")
    for packed in segments:
        if len(packed.heads) != num_kv_heads or packed.layout.head_dim != head_dim:
            raise ValueError(
                f"the packed layer has {len(packed.heads)} heads of {packed.layout.head_dim} channels; the "
                f"queries have {num_kv_heads} of {head_dim}"
            )
        if packed.buffer.device != queries.device:
            raise ValueError(f"devices differ: {queries.device}, {packed.buffer.device}")
    if not queries.dtype == new_keys.dtype == new_values.dtype or not queries.is_floating_point():
        raise ValueError(
            f"dtypes must be floating and agree: {queries.dtype}, {new_keys.dtype}, {new_values.dtype}"
        )
    if not queries.device == new_keys.device == new_values.device:
        raise ValueError(f"devices differ: {queries.device}, {new_keys.device}, {new_values.device}")
    if new_keys.shape[1] == 0:
        kept = [sum(packed.heads[h].counts.num_tokens for packed in segments) for h in range(num_kv_heads)]
        if not all(kept):
            raise ValueError("a head keeps no token and there is no new one; there must be one to attend to")
