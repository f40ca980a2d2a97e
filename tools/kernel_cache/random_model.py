"""Models of real shapes with random weights, made where they run; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from kvferry.shared.model.bridge import ATTENTION_NAME, TransformersModel, attention_forward
from kvferry.shared.model.probe import probed_model
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.kernel_cache.shapes import Shape

INITIAL_DEVIATION = 0.02


def random_model(shape: Shape, device: torch.device, *, max_model_len: int) -> TransformersModel:
    """Make a model of this shape behind our attention, its weights drawn on the device."""
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
        make: Any = AutoModelForCausalLM.from_config
        model: Any = make(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
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
    return probed_model(model, spec)
