"""One sequence's failure inside a step stays its own."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels.dense_decode.reference import dense_decode
from kvferry.services.decode.attention import BatchAttention, append_and_attend
from kvferry.shared.cache.layout import sequence_layout, view_layers
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, ResolvedPlan
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


class OperatorCount(TorchDispatchMode):
    """How many torch operators ran."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def count_operators(attention, *, num_kv_heads, rows):
    """Operators of one token in one layer."""
    spec = replace(SPEC, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads)
    resolved = ResolvedPlan(
        plan=CompressionPlan(method="full"),
        method="full",
        num_prompt_tokens=rows,
        max_new_tokens=2,
        layers=(LayerPlan(rows=rows, attention=attention),),
    )
    layout = sequence_layout(spec, resolved)
    (cache,) = view_layers(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8))
    layout.layers[0].attention.build(cache.keys, cache.values, cache.auxiliary, length=rows)
    queries, row = torch.randn(num_kv_heads, 2, 8), torch.randn(num_kv_heads, 8)
    with OperatorCount() as operators:
        append_and_attend(cache, queries, row, row, num_appended=0, scaling=0.3)
    return operators.count


@pytest.mark.parametrize(
    "attention",
    [
        Part(name="dense"),
        Part(name="hsa", params={"page_size": 3, "num_channels": 5, "num_tokens": 6}),
        Part(name="quest", params={"page_size": 3, "num_tokens": 6}),
        Part(name="sparq", params={"num_channels": 5, "num_tokens": 6}),
        Part(name="exact_topk", params={"num_tokens": 6}),
    ],
    ids=lambda part: part.name,
)
def test_a_step_takes_as_many_operators_however_many_kv_heads_and_tokens_there_are(attention):
    few = count_operators(attention, num_kv_heads=1, rows=19)
    assert count_operators(attention, num_kv_heads=8, rows=19) == few
    assert count_operators(attention, num_kv_heads=1, rows=1999) == few
