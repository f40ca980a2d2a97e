"""The models that are measured end to end, and small ones of the same classes."""

from __future__ import annotations

from typing import Any

from kvferry.tools.kernel_cache.shapes import SHIPPED, Shape

SHAPES = tuple(SHIPPED[name] for name in ("Llama-3.1-8B", "Qwen3-8B", "Mistral-7B"))
TINY_SHAPES = tuple(
    Shape(
        name=f"tiny {shape.model_type}", model_type=shape.model_type, num_layers=2, hidden_size=32,
        intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=60, dtype="float32",
    )
    for shape in SHAPES
)  # fmt: skip
"""Of the same classes."""


def transformers_config(shape: Shape, *, max_model_len: int) -> Any:
    """Return the configuration of a model that transformers runs by itself, without an end token."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        shape.model_type, num_hidden_layers=shape.num_layers, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab_size,
        max_position_embeddings=max_model_len, sliding_window=None, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
