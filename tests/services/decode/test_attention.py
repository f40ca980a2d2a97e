"""One sequence's failure inside a step stays its own."""

import torch

from kvferry.kernels.dense_decode.reference import dense_decode
from kvferry.services.decode.attention import BatchAttention
from kvferry.shared.cache.layout import sequence_layout, view_layers
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, ResolvedPlan
from kvferry.shared.model.spec import ModelSpec

SPEC = ModelSpec(
    name="m",
    fingerprint="f",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=9,
    max_model_len=99,
    dtype="float32",
    eos_token_ids=(1,),
)


def make_caches(rows, seed):
    """Caches with room for one more row, NaN where nothing has been written."""
    resolved = ResolvedPlan(
        plan=CompressionPlan(method="full"),
        method="full",
        num_prompt_tokens=rows,
        max_new_tokens=2,
        layers=(LayerPlan(rows=rows),) * 2,
    )
    layout = sequence_layout(SPEC, resolved)
    caches = view_layers(layout, torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8))
    generator = torch.Generator().manual_seed(seed)
    for cache in caches:
        cache.keys[:, :rows] = torch.randn(2, rows, 8, generator=generator)
        cache.values[:, :rows] = torch.randn(2, rows, 8, generator=generator)
    return caches


def test_a_full_cache_is_recorded_for_its_sequence_and_the_other_goes_on():
    caches = [make_caches(5, 0), make_caches(3, 1)]
    attention = BatchAttention(caches, [1, 0])  # the first has used its one spare row already
    for layer in range(2):
        queries, keys, values = torch.randn(2, 2, 2, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
        output = attention(layer, queries, keys, values, 0.3)
        cache = caches[1][layer]
        assert torch.equal(cache.keys[:, 3], keys[1])
        assert torch.equal(cache.values[:, 3], values[1])
        expected = dense_decode(queries[1], cache.keys, cache.values, scaling=0.3)
        torch.testing.assert_close(output[1], expected, atol=2e-6, rtol=2e-6)
        assert not output[0].any()
    assert list(attention.errors) == [0]
    assert isinstance(attention.errors[0], IndexError)
