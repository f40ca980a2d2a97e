"""Models of real shapes with random weights, made where they run; nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvferry.shared.model.bridge import ATTENTION_NAME, TransformersModel, attention_forward
from kvferry.shared.model.rotary import find_key_rotation
from kvferry.shared.model.spec import DTypeName, ModelSpec
from kvferry.shared.model.support import probe_attention

INITIAL_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's shape, by transformers' names. Attributes: model_type: its class there."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: DTypeName = "bfloat16"


LLAMA_8B = Shape(
    name="Llama-3.1-8B", model_type="llama", num_layers=32, hidden_size=4096, intermediate_size=14336,
    num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
)  # fmt: skip
QWEN3_8B = Shape(
    name="Qwen3-8B", model_type="qwen3", num_layers=36, hidden_size=4096, intermediate_size=12288,
    num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151936,
)  # fmt: skip
MISTRAL_7B = Shape(
    name="Mistral-7B", model_type="mistral", num_layers=32, hidden_size=4096, intermediate_size=14336,
    num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=32768,
)  # fmt: skip
SHAPES = (LLAMA_8B, QWEN3_8B, MISTRAL_7B)
TINY_SHAPES = tuple(
    Shape(
        name=f"tiny {shape.model_type}", model_type=shape.model_type, num_layers=2, hidden_size=32,
        intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=60, dtype="float32",
    )
    for shape in SHAPES
)  # fmt: skip
"""Of the same classes."""


def random_model(shape: Shape, device: torch.device, *, max_model_len: int) -> TransformersModel:
    """A model of this shape behind our attention, its weights drawn on the device."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    config = AutoConfig.for_model(
        shape.model_type,
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=max_model_len,
        sliding_window=None,
        tie_word_embeddings=False,
        # ids of the tiny vocabulary's size, too
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    dtype = getattr(torch, shape.dtype)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model = model.to(device).eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, INITIAL_DEVIATION)
    spec = ModelSpec(
        name=shape.name,
        fingerprint="random",
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        dtype=shape.dtype,
        eos_token_ids=(),
    )
    _, keys = probe_attention(TransformersModel(model, spec))
    return TransformersModel(model, spec, find_key_rotation(model, keys))
