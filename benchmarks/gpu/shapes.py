"""The models that are measured end to end, and small ones of the same classes."""

from __future__ import annotations

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
