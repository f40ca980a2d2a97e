"""KIVI's layers and rows that the wire quantises: equal bytes, the same codes, and the same rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.kivi import kivi_dequantise, kivi_quantise
from kvferry.kernels.kivi.reference import rounded
from kvferry.shared.compression.compress import compress_layer
from kvferry.shared.compression.interface import CompressedLayer, LayerInputs
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.representations.interface import PromptShape, view_zone, zone_bytes
from kvferry.shared.compression.representations.kivi import Kivi, KiviPrompt
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import KvferryError

HEADS, DIM = 2, 5


def compress(
    method: str, num_tokens: int, budget: int | None, *, dtype: torch.dtype = torch.float32, **overrides: int
) -> tuple[LayerInputs, CompressedLayer]:
    generator = torch.Generator().manual_seed(num_tokens)
    inputs = LayerInputs(
        layer=0,
        queries=torch.randn(HEADS, 2, num_tokens, DIM, generator=generator).to(dtype),
        keys=torch.randn(HEADS, num_tokens, DIM, generator=generator).to(dtype),
        values=torch.randn(HEADS, num_tokens, DIM, generator=generator).to(dtype),
        scaling=DIM**-0.5,
    )
    plan = plan_for(method, budget=Budget(tokens=budget) if budget else None, overrides=overrides)
    resolved = resolve_plan(plan, num_prompt_tokens=num_tokens, max_new_tokens=3, num_layers=1, head_dim=DIM)
    return inputs, compress_layer(resolved, inputs)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 97])
def test_every_token_is_kept_as_the_reference_rounds_it(num_tokens: int) -> None:
    inputs, kept = compress("kivi", num_tokens, None, bits=2)
    assert isinstance(kept.stored, KiviPrompt)
    assert kept.stored.index is None
    assert kept.keys.shape == (HEADS, 0, DIM)
    for ours, expected in zip(kept.stored.dequantised(), rounded(inputs.keys, inputs.values, 2), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_quantised_for_the_wire_are_what_the_receiver_makes_of_the_codes(dtype: torch.dtype) -> None:
    _, plain = compress("snapkv", 90, 70, dtype=dtype)
    _, kept = compress("snapkv", 90, 70, dtype=dtype, wire_bits=4)
    assert isinstance(kept.wire, KiviPrompt)
    assert kept.stored is None
    assert torch.equal(kept.positions, plain.positions)
    assert kept.wire.index is kept.positions
    assert kept.keys.dtype is dtype
    expected = kivi_dequantise(kivi_quantise(plain.keys, plain.values, 4))
    assert all(torch.equal(one, other) for one, other in zip((kept.keys, kept.values), expected, strict=True))
    wire_bytes = sum(tensor.nbytes for tensor in kept.wire.tensors.values())
    plain_bytes = plain.keys.nbytes + plain.values.nbytes + kept.wire.index.nbytes
    assert kept.wire.tensors["codes"].nbytes == HEADS * 64 * DIM + HEADS * 64 // 2  # 5 channels: 3 bytes
    if dtype is torch.float32:
        assert wire_bytes < plain_bytes


def test_whole_prompts_are_quantised_for_the_wire_too_and_skipped_layers_are_not() -> None:
    plan = plan_for("full", overrides={"wire_bits": 8}, skip_layers=(1,))
    resolved = resolve_plan(plan, num_prompt_tokens=40, max_new_tokens=1, num_layers=2, head_dim=DIM)
    assert resolved.method == "full"
    assert [layer.representation.params for layer in resolved.layers] == [{"wire_bits": 8}, {}]
    assert [layer.rows for layer in resolved.layers] == [40, 40]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([2, 4, 8]),
    budget=st.integers(1, 400),
    num_tokens=st.integers(1, 600),
    head_dim=st.integers(4, 130),
)
def test_no_more_bytes_than_the_budgets_rows_and_one_row_more_would_be(
    bits: int, budget: int, num_tokens: int, head_dim: int
) -> None:
    kivi = Kivi(bits=bits)
    rows = kivi.rows_within(budget, num_tokens=num_tokens, head_dim=head_dim)

    def size(count: int) -> int:
        shape = PromptShape(
            rows=count, num_tokens=count, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16
        )
        return sum(spec.size_bytes for spec in kivi.specs(shape).values())

    assert 1 <= rows <= num_tokens
    assert size(rows) <= 4 * budget * head_dim
    assert rows == num_tokens or size(rows + 1) > 4 * budget * head_dim


@settings(max_examples=20, deadline=None)
@given(num_tokens=st.integers(1, 80), budget=st.integers(1, 70), bits=st.sampled_from([2, 4, 8]))
def test_a_layer_survives_its_zone(num_tokens: int, budget: int, bits: int) -> None:
    _, kept = compress("snapkv-kivi", num_tokens, budget, bits=bits)
    prompt = kept.stored
    if prompt is None:  # the budget covers the prompt
        assert budget >= num_tokens
        return
    assert isinstance(prompt, KiviPrompt)
    prompt.check(num_tokens)
    shape = PromptShape(
        rows=prompt.rows.num_rows,
        num_tokens=num_tokens,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.float32,
    )
    specs = Kivi(bits=bits).specs(shape)
    zone = torch.full((zone_bytes(specs) + 16,), 0xFF, dtype=torch.uint8)
    views = view_zone(specs, zone)
    assert list(views) == list(prompt.tensors)
    for name, tensor in prompt.tensors.items():
        views[name].copy_(tensor)
    received = Kivi(bits=bits).view(views)
    received.check(num_tokens)
    for one, other in zip(received.dequantised(), prompt.dequantised(), strict=True):
        assert torch.equal(one, other)
    assert (zone[-16:] == 0xFF).all()


@pytest.mark.parametrize(("entry", "value"), [(0, 0.0), (0, -1.0), (0, torch.nan), (DIM, torch.inf)])
def test_scales_that_no_quantiser_writes_are_refused(entry: int, value: float) -> None:
    _, kept = compress("kivi", 40, None)
    assert isinstance(kept.stored, KiviPrompt)
    kept.stored.rows.scales[1, 0, entry] = value
    with pytest.raises(ValueError, match="scales must be finite and positive"):
        kept.stored.check(40)


def test_values_that_cannot_be_quantised_fail_by_name() -> None:
    inputs, _ = compress("kivi", 40, None)
    inputs.values[1, 3] = torch.nan
    for method, overrides in (("kivi", None), ("full", {"wire_bits": 4})):
        resolved = resolve_plan(
            plan_for(method, overrides=overrides),
            num_prompt_tokens=40,
            max_new_tokens=1,
            num_layers=1,
            head_dim=DIM,
        )
        with pytest.raises(KvferryError, match=r"layer 0 cannot be packed.*finite") as caught:
            compress_layer(resolved, inputs)
        assert caught.value.reason == "packing"
