"""FlashAttention 3 for prefill's attention, where it is installed and the GPU is a Hopper.

torch's own attention, which `prefill_attention.py` calls, then runs it for float16 and bfloat16. Installing
the package `flash_attn_3` turns it on. It is used only if it agrees with plain arithmetic on the device.
"""

from __future__ import annotations

import importlib.util
import logging

import torch

from kvferry.shared.model.prefill_attention import causal_attention

_log = logging.getLogger(__name__)

_MODULE = "flash_attn_interface"
_HOPPER = 9
_TOLERANCE = 0.02
"""For outputs in 16 bits, of values from N(0, 1)."""


def use_flash_attention_3(device: torch.device) -> bool:
    """Use FlashAttention 3 in this process if it is installed, and works correctly on a CUDA device.

    Returns: whether it is used from now on.
    """
    if importlib.util.find_spec(_MODULE) is None or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return False
    try:
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    except ImportError:
        _log.warning("torch is too old for FlashAttention 3; it must be 2.11 or newer")
        return False
    try:
        activate_flash_attention_impl("FA3")
        difference = _largest_difference(device)
    except Exception as error:  # whatever the package raises: torch's own attention remains
        problem = f"{type(error).__name__}: {error}"
    else:
        if difference <= _TOLERANCE:
            _log.info("prefill's attention is FlashAttention 3")
            return True
        problem = f"it differs by {difference:.2e}, allowed {_TOLERANCE:g}"
    restore_flash_attention_impl(False)
    _log.error("FlashAttention 3 is not used: %s", problem)
    return False


@torch.inference_mode()
def _largest_difference(device: torch.device) -> float:
    """Return the largest difference of prefill's attention from plain arithmetic, without and with history;
    infinity for NaN."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 300, 128, generator=generator).to(device, torch.bfloat16) for heads in (4, 2, 2)
    )
    scaling = 128**-0.5
    keys, values = (tensor.float().repeat_interleave(2, dim=1) for tensor in (key, value))
    scores = query.float() @ keys.mT * scaling
    masked = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    expected = masked.softmax(-1) @ values
    found = [causal_attention(query[:, :, -num:], key, value, scaling).float() for num in (300, 100)]
    differences = [(output - expected[:, :, -output.shape[2] :]).abs().max() for output in found]
    return float(torch.stack(differences).max().nan_to_num(torch.inf))
