"""Mixed-bit decode attention on packed bytes: RDKV's TriZone (section 3.3, Eq. 7).

The decode engine calls this once per layer and step, with the packed prompt as received (zone A: K of all
retained tokens and V below 16 bits; zone B: float16 V rows) and the rows of the new tokens (zone C).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kvferry.kernels.dispatch import attention_problem, check_attention, run
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.trizone import torch_path


def trizone_decode_segments(
    queries: Tensor,
    segments: Sequence[PackedLayer],
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """Attend with one new token to packed runs of tokens and the new tokens, itself included.

    With `k = s code + min` per channel and group of tokens, `q . k = sum_c (s_c q_c) code_c + sum_c min_c
    q_c`: codes are never scaled, and the second sum is one bias per query head and group. V likewise:
    `sum_t (p_t s_t) code_t + sum_t p_t min_t`.

    Args: as in `kernels`; the queries' channels are in the model's order.
        segments: at least one, such as a prompt and the tokens generated since, each packed by itself; heads
            may have different numbers of tokens. Their order changes only rounding.
    """
    _check(queries, segments, new_keys, new_values)
    unsupported = partial(attention_problem, queries, new_keys, new_values, prefix="new_")
    in_torch = partial(
        torch_path.trizone_decode_segments, queries, segments, new_keys, new_values, scaling=scaling
    )
    function = "trizone.triton_kernel.trizone_decode_segments"
    return run("trizone", queries.device, function, in_torch, unsupported)


def _check(queries: Tensor, segments: Sequence[PackedLayer], new_keys: Tensor, new_values: Tensor) -> None:
    check_attention(queries, new_keys, new_values, least=0, prefix="new_", rows="m")
    num_kv_heads, _, head_dim = queries.shape
    if not segments:
        raise ValueError("there are no segments; there must be at least one")
    for packed in segments:
        if len(packed.heads) != num_kv_heads or packed.layout.head_dim != head_dim:
            raise ValueError(
                f"the packed layer has {len(packed.heads)} heads of {packed.layout.head_dim} channels; the "
                f"queries have {num_kv_heads} of {head_dim}"
            )
        if packed.buffer.device != queries.device:
            raise ValueError(
                f"devices must agree: queries {queries.device}, the packed layer {packed.buffer.device}"
            )
    if new_keys.shape[1] == 0:
        kept = [sum(packed.heads[h].counts.num_tokens for packed in segments) for h in range(num_kv_heads)]
        if not all(kept):
            raise ValueError("a head has no token and there is no new one; there must be one to attend to")
