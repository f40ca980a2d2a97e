"""KIVI attention in vectorised torch, a tile of groups at a time: no loop over heads or tokens.

`__init__.py` checks arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.kivi.rows import GROUP_TOKENS, KiviRows, key_tiles, value_tiles


def attend(
    queries: Tensor, rows: KiviRows, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """Compute `q . k = sum_c (s_c q_c) code_c + sum_c min_c q_c` and
    `sum_t (p_t s_t) code_t + sum_t p_t min_t`: codes are never scaled. Args: as of `kivi_decode`."""
    left_keys = torch.cat([rows.keys, new_keys], dim=1)
    left_values = torch.cat([rows.values, new_values], dim=1)
    scaled = queries.float() * scaling
    grouped = rows.codes.shape[1] * GROUP_TOKENS
    logits = scaled.new_empty(*queries.shape[:2], grouped + left_keys.shape[1])
    for start, codes, scales, minima in key_tiles(rows):
        # [H_kv, g, G, D] @ [H_kv, g, D, 32]
        products = (scaled[:, None] * scales[:, :, None]) @ codes
        products += scaled[:, None] @ minima[..., None]
        stop = start + codes.shape[1] * GROUP_TOKENS
        logits[:, :, start:stop] = products.transpose(1, 2).flatten(2)
    logits[:, :, grouped:] = scaled @ left_keys.float().mT
    probabilities = logits.softmax(dim=-1)
    output = probabilities[:, :, grouped:] @ left_values.float()
    for start, codes, scales, minima in value_tiles(rows):
        tile = probabilities[:, :, start : start + codes.shape[1] * GROUP_TOKENS]
        output += (tile * scales.flatten(1)[:, None]) @ codes.flatten(1, 2)
        output += tile @ minima.flatten(1)[:, :, None]
    if rows.latent_dim:
        for start, *of_keys in key_tiles(rows):
            shared = (part[:, :, : rows.latent_dim] for part in of_keys)
            tile = probabilities[:, :, start : start + of_keys[0].shape[1] * GROUP_TOKENS]
            output += _latent_values(tile, *shared)
    return output.to(queries.dtype)


def _latent_values(probabilities: Tensor, codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Compute `sum_t p_t (s_c code_ct + min_c)` of a tile of latent rows: float32 `[H_kv, G, R]`.

    Args: probabilities `[H_kv, G, 32 t]`; codes `[H_kv, t, R, 32]`, their scales and minima `[H_kv, t, R]`.
    """
    num_kv_heads, group_size, _ = probabilities.shape
    by_group = probabilities.reshape(num_kv_heads, group_size, -1, GROUP_TOKENS).transpose(1, 2)
    products = (by_group @ codes.mT) * scales[:, :, None]
    products += by_group.sum(-1, keepdim=True) * minima[:, :, None]
    return products.sum(1)
