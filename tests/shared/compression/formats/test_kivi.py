"""KIVI's layers and rows that the wire quantises: equal bytes, the same codes, and the same rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtest.compression import Placed, formats_for, make_inputs, make_sizing
from kvtest.reference.scores import rounded
from torch import Tensor

from kvferry.kernels.kivi.rows import kivi_dequantise, kivi_quantise
from kvferry.shared.compression.formats import compress_layer
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerFormat
from kvferry.shared.compression.formats.kivi import Kivi
from kvferry.shared.compression.formats.rows import WireRows
from kvferry.shared.compression.formats.stored import StoredCache
from kvferry.shared.compression.interface import LayerInputs, LayerShape
from kvferry.shared.compression.plan import Budget, Part
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import KvferryError

HEADS, DIM = 2, 5


def compress(
    method: str, num_tokens: int, budget: int | None, *, dtype: torch.dtype = torch.float32, **overrides: int
) -> tuple[LayerInputs, LayerFormat, dict[str, Tensor]]:
    inputs = make_inputs(num_tokens, head_dim=DIM, dtype=dtype, seed=num_tokens)
    plan = plan_for(method, budget=Budget(tokens=budget) if budget else None, overrides=overrides)
    resolved = resolve_plan(plan, num_prompt_tokens=num_tokens, max_new_tokens=3, num_layers=1, head_dim=DIM)
    (fmt,) = formats_for(resolved, inputs)
    return inputs, fmt, dict(compress_layer(resolved, fmt, inputs))


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 97])
def test_every_token_is_kept_as_the_reference_rounds_it(num_tokens: int) -> None:
    inputs, fmt, tensors = compress("kivi", num_tokens, None, bits=2)
    assert isinstance(fmt, Kivi)
    assert "index" not in tensors
    assert tensors["keys"].shape == (HEADS, num_tokens % 32, DIM)
    for ours, expected in zip(
        kivi_dequantise(fmt.quantised(tensors)), rounded(inputs.keys, inputs.values, 2), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_quantised_for_the_wire_are_what_the_receiver_makes_of_the_codes(dtype: torch.dtype) -> None:
    _, _, plain = compress("snapkv", 90, 70, dtype=dtype)
    _, fmt, wire = compress("snapkv", 90, 70, dtype=dtype, wire_bits=4)
    assert isinstance(fmt, WireRows)
    assert not fmt.is_plain
    assert torch.equal(wire["index"], plain["index"])
    placed = Placed.of(fmt)
    placed.open(wire)
    expected = kivi_dequantise(kivi_quantise(plain["keys"], plain["values"], 4))
    for name, restored in zip(("keys", "values"), expected, strict=True):
        assert placed.regions[name].dtype is dtype
        assert torch.equal(placed.regions[name][:, :70], restored)
        assert placed.regions[name][:, 70:].isnan().all()
    wire_bytes = sum(tensor.nbytes for tensor in wire.values())
    plain_bytes = plain["keys"].nbytes + plain["values"].nbytes + wire["index"].nbytes
    assert wire["codes"].nbytes == HEADS * 64 * DIM + HEADS * 64 // 2  # 5 channels: 3 bytes
    assert wire["scales"].nbytes == HEADS * 2 * 2 * (DIM + 32) * 2  # groups, scale and minimum, float16
    if dtype is torch.float32:
        assert wire_bytes < plain_bytes


def test_whole_prompts_are_quantised_for_the_wire_too_and_skipped_layers_are_not() -> None:
    plan = plan_for("full", overrides={"wire_bits": 8}, skip_layers=(1,))
    resolved = resolve_plan(plan, num_prompt_tokens=40, max_new_tokens=1, num_layers=2, head_dim=DIM)
    assert resolved.method == "full"
    assert [layer.representation.params for layer in resolved.layers] == [{"wire_bits": 8}, {}]
    assert [layer.rows for layer in resolved.layers] == [40, 40]


@given(
    bits=st.sampled_from([2, 4, 8]),
    budget=st.integers(1, 400),
    num_tokens=st.integers(1, 600),
    head_dim=st.integers(4, 130),
    latent_dim=st.sampled_from([0, 3]),
)
def test_no_more_bytes_than_the_budgets_rows_and_one_row_more_would_be(
    bits: int, budget: int, num_tokens: int, head_dim: int, latent_dim: int
) -> None:
    part = Part(name="kivi", params={"bits": bits})
    rows = Kivi.rows_within(
        part, make_sizing(budget, num_tokens=num_tokens, head_dim=head_dim, latent_dim=latent_dim)
    )
    row_bytes = (2 if latent_dim else 4) * head_dim

    def size(count: int) -> int:
        shape = LayerShape(
            num_prompt_tokens=count,
            max_new_tokens=1,
            num_kv_heads=1,
            group_size=1,
            head_dim=head_dim,
            latent_dim=latent_dim,
            dtype=torch.float16,
        )
        return sum(spec.size_bytes for spec in Kivi(shape=shape, rows=count, bits=bits).tensors().values())

    assert 1 <= rows <= num_tokens
    assert size(rows) <= budget * row_bytes
    assert rows == num_tokens or size(rows + 1) > budget * row_bytes


@settings(max_examples=20)
@given(num_tokens=st.integers(1, 80), budget=st.integers(1, 70), bits=st.sampled_from([2, 4, 8]))
def test_a_layer_survives_its_place_in_the_arena(num_tokens: int, budget: int, bits: int) -> None:
    _, fmt, tensors = compress("snapkv-kivi", num_tokens, budget, bits=bits)
    if not isinstance(fmt, Kivi):  # the budget covers the prompt
        assert budget >= num_tokens
        return
    fmt.check_content(tensors)
    placed = Placed.of(fmt)
    cache = placed.open(tensors)
    assert isinstance(cache, StoredCache)
    assert all(placed.holds(tensor) for tensor in cache.prompt.values())
    assert list(cache.prompt) == list(tensors)
    assert all(torch.equal(cache.prompt[name], tensor) for name, tensor in tensors.items())
    assert (placed.buffer[-64:] == 0xFF).all()


@pytest.mark.parametrize(("entry", "value"), [(0, 0.0), (0, -1.0), (0, torch.nan), (DIM, torch.inf)])
def test_scales_that_no_quantiser_writes_are_refused(entry: int, value: float) -> None:
    for method, overrides in (("kivi", {}), ("full", {"wire_bits": 4})):
        _, fmt, tensors = compress(method, 40, None, **overrides)
        tensors["scales"][1, 0, entry] = value
        with pytest.raises(InvalidTensors, match="scales must be finite and positive") as caught:
            Placed.of(fmt).open(tensors)
        assert caught.value.reason == "packed"


def test_values_that_cannot_be_quantised_fail_by_name() -> None:
    inputs, _, _ = compress("kivi", 40, None)
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
            compress_layer(resolved, formats_for(resolved, inputs)[0], inputs)
        assert caught.value.reason == "packing"
