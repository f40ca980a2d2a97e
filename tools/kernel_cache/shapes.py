"""The models whose kernels are compiled before there is a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.shared.model.spec import DTypeName


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


SHIPPED = {
    shape.name: shape
    for shape in (
        Shape(
            name="demo", model_type="llama", num_layers=4, hidden_size=256, intermediate_size=512,
            num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=704, dtype="float16",
        ),
        Shape(
            name="Qwen3-4B", model_type="qwen3", num_layers=36, hidden_size=2560, intermediate_size=9728,
            num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151936,
        ),
        Shape(
            name="Qwen3-8B", model_type="qwen3", num_layers=36, hidden_size=4096, intermediate_size=12288,
            num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151936,
        ),
        Shape(
            name="Qwen2.5-7B", model_type="qwen2", num_layers=28, hidden_size=3584, intermediate_size=18944,
            num_heads=28, num_kv_heads=4, head_dim=128, vocab_size=152064,
        ),
        Shape(
            name="Llama-3.1-8B", model_type="llama", num_layers=32, hidden_size=4096,
            intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
        ),
        Shape(
            name="Llama-3.2-1B", model_type="llama", num_layers=16, hidden_size=2048, intermediate_size=8192,
            num_heads=32, num_kv_heads=8, head_dim=64, vocab_size=128256,
        ),
        Shape(
            name="Mistral-7B", model_type="mistral", num_layers=32, hidden_size=4096,
            intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=32768,
        ),
    )
}  # fmt: skip
"""By name. Kernels are made for heads and dtypes, so a fine-tuned model has those of its base."""
