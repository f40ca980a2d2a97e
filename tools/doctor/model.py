"""The model to serve, from its configuration and the sizes of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvferry.kernels.decode_batch import BatchShape
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.checkpoint import quiet_libraries, resolve_model_path, weight_files
from kvferry.shared.model.spec import TORCH_DTYPES

_WINDOWS = ("sliding_window", "attention_chunk_size")
_WITH_SINKS = ("gpt_oss",)
"""Model types; no field of a configuration says so."""


@dataclass(frozen=True, kw_only=True)
class DescribedModel:
    """What the checks need to know of a model.

    Attributes:
        weight_bytes: of one copy in `dtype`, 0 if the weights are not on this machine.
        kv_token_bytes: full KV of one token.
        shape: of its kernels.
    """

    name: str
    dtype: str
    weight_bytes: int
    kv_token_bytes: int
    shape: BatchShape


def describe(model: str, device: torch.device, dtype: str) -> DescribedModel:
    """Read a model's configuration.

    Raises: ConfigurationError: there is no such model, or its configuration has no attention heads.
    """
    from transformers import AutoConfig

    folder = resolve_model_path(model, weights=False)
    with quiet_libraries():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config()
    stored = str(config.dtype or text.dtype or "float32").removeprefix("torch.")
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else stored
    if dtype not in TORCH_DTYPES:
        raise ConfigurationError(f"dtype is {dtype!r}; it must be auto, {', '.join(TORCH_DTYPES)}")
    heads = getattr(text, "num_attention_heads", 0)
    if not heads:
        raise ConfigurationError(f"model {model!r} has no attention heads in its configuration")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    element = TORCH_DTYPES[dtype].itemsize
    return DescribedModel(
        name=Path(model).name,
        dtype=dtype,
        weight_bytes=_file_bytes(folder) * element // getattr(TORCH_DTYPES.get(stored), "itemsize", element),
        kv_token_bytes=2 * text.num_hidden_layers * kv_heads * head_dim * element,
        shape=BatchShape(
            num_layers=1,
            num_slots=1,
            num_kv_heads=kv_heads,
            group_size=heads // kv_heads,
            head_dim=head_dim,
            dtype=TORCH_DTYPES[dtype],
            device=device,
            has_windows=any(getattr(text, name, None) for name in _WINDOWS),
            has_plain_softmax=not getattr(text, "attn_logit_softcapping", None)
            and text.model_type not in _WITH_SINKS,
        ),
    )


def _file_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in weight_files(folder))
    except ConfigurationError:
        return 0
