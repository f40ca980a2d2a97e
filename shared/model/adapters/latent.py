"""For multi-head latent attention (MLA: DeepSeek V2 and V3, GLM, Kimi and others).

A token's latent row is a latent vector, of which each head's key and value are projections, and a rotary key
that all heads share. Rows are stored, shipped and selected as they are, as one KV head:

    key    [latent | rotary], R + P channels, post-RoPE       value    its first R channels

transformers expands rows to keys and values of all heads in `expand_kv`, just before it calls our attention.
Here that method passes the rows on. Prefill expands them, some heads at a time (`expand`). Decode attends to
the rows themselves: with `k_h = W_UK,h c` and `v_h = W_UV,h c`, `q_h . k_h = (W_UK,h^T q_h) . c` (`absorb`),
and the attended values are `W_UV,h` times the attended latents (`project`). Both forms have the same scores.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvferry.shared.errors import UnsupportedModel

LATENT = "kvferry_latent"
"""Attribute of an attention module: a function that returns its `Latent`."""
_SIZES = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def pass_latent_rows(model: Any) -> None:
    """Let every latent attention call ours with its rows in place of expanded keys and values.

    Raises: UnsupportedModel: a module is not made as this adapter expects.
    """
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    if not modules:
        raise UnsupportedModel(
            f"{type(model).__name__} has no attention with expand_kv; this version of transformers is not "
            "supported for models with latent attention"
        )
    for attention in modules:
        attention.kv_b_proj = _plain(attention.kv_b_proj, model.dtype)
        _check(attention)
        setattr(attention, LATENT, partial(Latent, attention))
        attention.expand_kv = _rows


def _rows(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Pass rows on in place of `expand_kv`. Args: `[B, 1, T, R]` and `[B, 1, T, P]`. Returns: keys, and
    values (a view)."""
    rows = torch.cat([latents, rotary], -1)
    return rows, rows[..., : latents.shape[-1]]


def _plain(projection: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a projection with plain weights in place of quantised ones: its output for each unit vector.

    Deviation: if the checkpoint's activations are quantised, those of this projection are not; its weights
    are part of queries and attended values here, which have other scales.
    """
    weight = getattr(projection, "weight", None)
    is_plain = type(weight) is nn.Parameter and weight.dtype == dtype and type(projection) is nn.Linear
    if is_plain or not isinstance(projection, nn.Linear) or getattr(projection, "bias", None) is not None:
        return projection
    device = next(iter(projection.state_dict().values())).device
    columns = projection(torch.eye(projection.in_features, dtype=dtype, device=device))
    plain = nn.Linear(projection.in_features, projection.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(columns.mT.contiguous(), requires_grad=False)
    return plain


def _check(attention: nn.Module) -> None:
    name = type(attention).__name__
    sizes = {size: getattr(attention, size, None) for size in _SIZES}
    projection = getattr(attention, "kv_b_proj", None)
    if not all(isinstance(value, int) for value in sizes.values()):
        raise UnsupportedModel(f"{name} has sizes {sizes}; all of them must be integers")
    if type(projection) is not nn.Linear or getattr(projection, "bias", None) is not None:
        raise UnsupportedModel(
            f"kv_b_proj of {name} is {projection}; to attend to latent rows it must be a torch.nn.Linear "
            "without a bias"
        )


class Latent:
    """A layer's latent attention, by its module's own weights: views of `kv_b_proj`, no copies.

    Legend: H query heads, R latent and P rotary channels.
    """

    def __init__(self, attention: Any) -> None:
        self._rank, self._nope = attention.kv_lora_rank, attention.qk_nope_head_dim
        weight = attention.kv_b_proj.weight.view(attention.num_heads, -1, self._rank)
        self._of_keys, self._of_values = weight[:, : self._nope], weight[:, self._nope :]

    def expand(self, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Expand rows `[n, R + P]` to some heads' keys `[h, n, N + P]` and values `[h, n, V]`."""
        latents, rotary = rows[:, : self._rank], rows[:, self._rank :]
        of_keys, of_values = self._of_keys[heads], self._of_values[heads]
        keys = rows.new_empty(len(of_keys), len(rows), self._nope + rotary.shape[1])
        torch.matmul(latents, of_keys.mT, out=keys[..., : self._nope])
        keys[..., self._nope :] = rotary
        return keys, latents @ of_values.mT

    def absorb(self, queries: Tensor) -> Tensor:
        """Turn queries `[B, H, T, N + P]` of expanded keys into queries `[B, H, T, R + P]` of rows."""
        latent = queries[..., : self._nope] @ self._of_keys
        return torch.cat([latent, queries[..., self._nope :]], -1)

    def project(self, attended: Tensor) -> Tensor:
        """Project attended latents `[B, H, R]` to attended values `[B, H, V]`."""
        values: Tensor = attended[:, :, None] @ self._of_values.mT
        return values[:, :, 0]
