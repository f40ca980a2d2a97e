"""What prefill computes of a prompt, in plain float32, written like the equations. For tests only.

Scores sum attention probabilities of queries `[H_kv, G, n, D]` over keys `[H_kv, T, D]`; H_kv KV heads, G
query heads per KV head, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_TOKENS = 32
"""KIVI's tokens that share one scale of a K channel."""


def causal_attention(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """`A = softmax(Q K^T * scaling + causal mask)` of the last n queries: float32 `[H_kv, G, n, T]`."""
    num_queries, num_tokens = queries.shape[2], keys.shape[1]
    logits = torch.einsum("hgid,htd->hgit", queries.float(), keys.float()) * scaling
    query_positions = torch.arange(num_tokens - num_queries, num_tokens)
    future = torch.arange(num_tokens)[None, :] > query_positions[:, None]
    return logits.masked_fill(future, float("-inf")).softmax(dim=-1)


def window_scores_reference(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """`s_t = sum_g sum_i A_{g,i,t}` over the window's queries: float32 `[H_kv, T]`."""
    return causal_attention(queries, keys, scaling).sum(dim=(1, 2))


def column_sums_reference(queries: Tensor, keys: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """D2O Eq. 6: `s_t = sum_g sum_i A_{g,i,t}`; Eq. 4: `F_g = Var_t(sum_i A_{g,i,t})`.

    Returns: float32 `[H_kv, T]` and `[H_kv, G]`.
    """
    columns = causal_attention(queries, keys, scaling).sum(dim=2)  # [H_kv, G, T]
    mean = columns.mean(dim=-1, keepdim=True)
    return columns.sum(dim=1), ((columns - mean) ** 2).mean(dim=-1)


def chunk_scores_reference(queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float) -> Tensor:
    """Compactor equation 5: `A_b = softmax(Q_b K_b^T * scaling)` of chunk b, no mask, `a_b = 1^T A_b`; mean
    over the group.

    Args: queries `[H_kv, G, T, D]`, keys `[H_kv, T, D]`. Returns: float32 `[H_kv, T]`.
    """
    chunks = []
    for begin in range(0, keys.shape[1], chunk_tokens):
        chunk = slice(begin, begin + chunk_tokens)
        logits = torch.einsum("hgqd,hkd->hgqk", queries[:, :, chunk].float(), keys[:, chunk].float())
        chunks.append((logits * scaling).softmax(dim=-1).sum(dim=2).mean(dim=1))
    return torch.cat([keys.new_zeros(keys.shape[0], 0, dtype=torch.float32), *chunks], dim=1)


def shared_chunk_scores_reference(queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float) -> Tensor:
    """The same with one set of queries for every chunk: the mean over queries, times the chunk's length.

    Args: queries `[H_kv, G, M, D]`, keys `[H_kv, T, D]`. Returns: float32 `[H_kv, T]`.
    """
    chunks = []
    for begin in range(0, keys.shape[1], chunk_tokens):
        chunk = keys[:, begin : begin + chunk_tokens].float()
        logits = torch.einsum("hgqd,hkd->hgqk", queries.float(), chunk) * scaling
        chunks.append(logits.softmax(dim=-1).mean(dim=(1, 2)) * chunk.shape[1])
    return torch.cat([keys.new_zeros(keys.shape[0], 0, dtype=torch.float32), *chunks], dim=1)


def quantise_row(row: Tensor, bits: int) -> tuple[list[int], float, float]:
    """Codes, scale and minimum of one row.

    Args: row `[C]`. Returns: C codes in [0, 2^b - 1], s and min with `x ~ s code + min`.
    """
    values = [float(x) for x in row]
    minimum, levels = min(values), 2**bits - 1
    scale = (max(values) - minimum) / levels
    if scale == 0:
        return [0] * len(values), 1.0, minimum
    return [min(max(round((x - minimum) / scale), 0), levels) for x in values], scale, minimum


def rounded(keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """K and V float32 `[H_kv, n, D]` after quantisation and back: K per channel in groups of 32 tokens, V per
    token; rows beyond the last whole group as they are."""
    new_keys, new_values = keys.float().clone(), values.float().clone()
    num_kv_heads, num_rows, head_dim = keys.shape
    for head in range(num_kv_heads):
        for start in range(0, num_rows - num_rows % GROUP_TOKENS, GROUP_TOKENS):
            group = slice(start, start + GROUP_TOKENS)
            for channel in range(head_dim):
                channel_row = keys[head, group, channel].tolist()
                new_keys[head, group, channel] = torch.tensor(rounded_row(channel_row, bits))
            for token in range(start, start + GROUP_TOKENS):
                new_values[head, token] = torch.tensor(rounded_row(values[head, token].tolist(), bits))
    return new_keys, new_values


def rounded_row(row: list[float], bits: int) -> list[float]:
    """KIVI's quantiser (Liu et al. 2024, section 2): `code = round((x - z) / s)`, `x' = s code + z`, with
    `z = min x` and `s = (max x - min x) / (2^b - 1)`, both float16: z rounded down, s rounded up."""
    half_step, least = 2.0**-10, min(row)
    z = torch.tensor(least).half().item()
    if z > least:
        z = torch.tensor(least - abs(least) * half_step).half().item()
    # in float32, whose rounding decides between two scales and between two codes
    span = torch.tensor(max(row)) - z
    s = span / (2**bits - 1)
    s = (s + s * half_step).half().item() or 1.0
    steps = (torch.tensor(row) - z) / s
    codes = [min(max(round(step), 0), 2**bits - 1) for step in steps.tolist()]
    return [s * code + z for code in codes]
