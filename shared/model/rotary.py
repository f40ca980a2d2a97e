"""Undoes rotary positions: from post-RoPE keys to the output of the key projection and its norm.

Compression methods that use keys without positions call it for a whole layer, through
`LanguageModel.pre_rope_keys`. It needs no second projection and works for keys from the history. The angles
come from the model's own rotary embedding; how it pairs channels is measured once at load time, so no model's
code is copied.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from kvferry.shared.model.adapters.layers import decoder_of

Layout = Literal["halves", "interleaved"]
"""The channels of pair j of R rotated channels: (j, j + R/2), or (2j, 2j + 1)."""
Angles = Literal["halves", "interleaved", "once"]
"""How the embedding gives a pair's angle: at both its channels, or once."""

_ROTARY = ("rotary_emb", "pos_emb")
"""Names of a decoder's rotary embedding."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_INTERMEDIATE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class KeyRotation:
    """Undoes the rotation of one model's keys.

    A model turns each pair of channels (x, y) of a token into (x c - y s, x s + y c), or the other way round
    (NanoChat). c and s include the attention factor of scaled RoPE types. Channels before the first rotated
    one and beyond the rotary embedding's width stay as they are.

    Attributes:
        rotary: the model's rotary embedding module; None if it has none.
        rotated: the layers whose keys are rotated at all.
        layer_types: one per layer if the embedding depends on it, else None.
        angles, channels: layouts of the embedding's cosines and of the channels they apply to. They are
            determined at the start, because looking at a layer's cosines would wait for the device.
        is_reversed: whether angles count the other way round.
        first_channel: the first rotated one; latent rows have their rotary channels last.
    """

    rotary: nn.Module | None = None
    rotated: Set[int] = frozenset()
    layer_types: Sequence[str] | None = None
    angles: Angles = "halves"
    channels: Layout = "halves"
    is_reversed: bool = False
    first_channel: int = 0

    def undo(self, layer: int, keys: Tensor) -> Tensor:
        """Undo the rotation. Args: keys: post-RoPE `[H_kv, T, D]` at positions 0 to T - 1. Returns: float32
        `[H_kv, T, D]`."""
        if layer not in self.rotated:
            return keys.to(torch.float32, copy=True)
        assert self.rotary is not None, "keys are rotated without a rotary embedding"
        layer_type = None if self.layer_types is None else self.layer_types[layer]
        cos, sin = _cos_sin(self.rotary, keys, layer_type)
        if self.angles != "once":
            cos, sin = _pairs(cos, self.angles)[0], _pairs(sin, self.angles)[0]
        width = 2 * cos.shape[1]
        # c^2 + s^2 is the squared attention factor; in half precision this also corrects their rounding.
        norm = cos.square() + sin.square()
        sign, first = -1.0 if self.is_reversed else 1.0, self.first_channel
        cos, sin = cos / norm, sign * sin / norm
        restored = keys.to(torch.float32, copy=True)
        # a few at a time, because intermediate results are as large as the keys
        heads_at_once = max(_INTERMEDIATE_BYTES // max(restored[:1].nbytes, 1), 1)
        for heads in restored.split(heads_at_once):  # type: ignore[no-untyped-call]
            x, y = _pairs(heads[:, :, first : first + width], self.channels)
            y_before_rope = (y * cos).addcmul_(x, sin, value=-1)
            x.mul_(cos).addcmul_(y, sin)
            y.copy_(y_before_rope)
        return restored


def find_key_rotation(
    model: Any, keys: Mapping[int, Tensor], *, first_channel: int = 0
) -> KeyRotation | None:
    """Find the rotation of a model's keys; None if it cannot be undone.

    The probe's key of a token depends on the position only through the rotation. So the right layout is the
    one in which each token has the same key at two positions, in every layer.

    Args:
        model: a transformers causal language model.
        keys: by layer, see `probe_attention`.
        first_channel: as of `KeyRotation`.
    """
    decoder = decoder_of(model)
    rotary = next((module for name in _ROTARY if (module := getattr(decoder, name, None)) is not None), None)
    tolerance = _TOLERANCE[model.dtype]
    rotated = {layer for layer, tensor in keys.items() if not _is_position_free(tensor.float(), tolerance)}
    if not rotated:
        return KeyRotation()
    if not isinstance(rotary, nn.Module):
        return None
    layer_types = None
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        layer_types = model.config.get_text_config().layer_types
    first = min(rotated)
    cos, _ = _cos_sin(rotary, keys[first], layer_types[first] if layer_types else None)
    layouts: tuple[Layout, ...] = get_args(Layout)
    pairs = {layout: _pairs(cos, layout) for layout in layouts} if cos.shape[1] % 2 == 0 else {}
    angles: Angles = next((layout for layout, pair in pairs.items() if torch.equal(*pair)), "once")
    width = 2 * cos.shape[1] if angles == "once" else cos.shape[1]
    if not 2 <= width <= keys[first].shape[2] - first_channel or width % 2:
        return None
    for channels, is_reversed in itertools.product(layouts, (False, True)):
        rotation = KeyRotation(
            rotary=rotary,
            rotated=rotated,
            layer_types=layer_types,
            angles=angles,
            channels=channels,
            is_reversed=is_reversed,
            first_channel=first_channel,
        )
        if all(_is_position_free(rotation.undo(i, tensor), tolerance) for i, tensor in keys.items()):
            return rotation
    return None


def _cos_sin(rotary: nn.Module, keys: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 `[T, R]` each or `[T, R / 2]`, at positions 0 to T - 1, rounded as in
    the keys' dtype."""
    positions = torch.arange(keys.shape[1], device=keys.device)[None]
    arguments = () if layer_type is None else (layer_type,)
    angles = rotary(keys.new_empty(1), positions, *arguments)
    if isinstance(angles, Tensor):  # Llama 4's are complex numbers, one for each pair of channels
        return angles[0].real.float(), angles[0].imag.float()
    cos, sin = (part[0].float() for part in angles)
    return cos, sin


def _pairs(channels: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """View the first and the second channel of each pair: `[..., R]` -> two of `[..., R / 2]`."""
    if layout == "interleaved":
        return channels[..., 0::2], channels[..., 1::2]
    half = channels.shape[-1] // 2
    return channels[..., :half], channels[..., half:]


def _is_position_free(keys: Tensor, tolerance: float) -> bool:
    """Return whether the two halves of `[H_kv, 2n, D]` are the same keys."""
    first, second = keys.chunk(2, dim=1)
    return bool((first - second).norm() <= tolerance * first.norm()) and bool(first.norm() > 0)
