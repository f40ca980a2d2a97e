"""Rows packed at one width for K and one for V: the reference's values, the budget's bytes, HSA's choice."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import Placed, compress_layer, formats_for, make_inputs, packed_tensors
from kvtest.packed import group_of, unpack_layer
from kvtest.reference.scores import rounded_row
from kvtest.reference.sparse import in_8_bits
from torch import Tensor

from kvferry.kernels import hsa
from kvferry.kernels.packed.packing import pack_layer
from kvferry.shared.compression.formats.interface import InvalidTensors, Tensors
from kvferry.shared.compression.formats.rows import Rows
from kvferry.shared.compression.formats.uniform import Uniform, rows_within
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest

HEADS = 2


def made(
    method: str, num_tokens: int, budget: int, *, head_dim: int = 13, group_size: int = 2, **overrides: int
) -> tuple[Uniform, Tensors, LayerInputs, Tensor]:
    """A method's format of one layer, its tensors and inputs, and the rows' scores."""
    inputs = make_inputs(num_tokens, head_dim=head_dim, group_size=group_size, seed=num_tokens)
    resolved = resolve_plan(
        plan_for(method, budget=Budget(tokens=budget), overrides=overrides),
        num_prompt_tokens=num_tokens,
        max_new_tokens=6,
        num_layers=1,
        head_dim=head_dim,
    )
    (fmt,) = formats_for(resolved, inputs)
    assert isinstance(fmt, Uniform)
    assert resolved.plan.scorer is not None
    scores = make_scorer(resolved.plan.scorer, rows=fmt.rows)(inputs)
    return fmt, compress_layer(resolved, inputs), inputs, scores


@pytest.mark.parametrize("method", ["compactor-kivi", "rocketkv-kivi"])
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(("num_tokens", "budget"), [(97, 14), (203, 41)])
@pytest.mark.parametrize(("k_bits", "v_bits"), [(4, 4), (4, 2), (8, 2)])
def test_k_is_rounded_per_channel_of_each_64_of_the_best_rows_and_v_per_token(
    method: str, num_tokens: int, budget: int, k_bits: int, v_bits: int, group_size: int
) -> None:
    fmt, tensors, inputs, scores = made(
        method, num_tokens, budget, group_size=group_size, k_bits=k_bits, v_bits=v_bits
    )
    heads = unpack_layer(fmt.packed(tensors))
    for head, (keys, values, positions) in enumerate(heads):
        best = sorted(range(num_tokens), key=lambda t: (-float(scores[head, t]), t))[: fmt.rows]
        assert positions.tolist() == sorted(best)
        kept_keys, kept_values = inputs.keys[head, sorted(best)], inputs.values[head, sorted(best)]
        groups = torch.tensor([group_of(row, fmt.rows) for row in range(fmt.rows)])
        assert len(groups.unique()) == -(-fmt.rows // 64)
        expected = torch.empty_like(kept_keys)
        for group in groups.unique().tolist():
            channels = kept_keys[groups == group].T.tolist()
            expected[groups == group] = torch.tensor([rounded_row(channel, k_bits) for channel in channels]).T
        rows = [rounded_row(row.tolist(), v_bits) for row in kept_values]
        torch.testing.assert_close(keys, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, torch.tensor(rows), atol=1e-5, rtol=1e-5)


@given(
    k_bits=st.sampled_from([2, 4, 8]),
    v_bits=st.sampled_from([2, 4, 8]),
    budget=st.integers(1, 300),
    num_tokens=st.integers(1, 500),
    head_dim=st.integers(8, 130),
)
def test_all_that_is_stored_is_within_the_budgets_rows_and_one_row_more_would_not_be(
    k_bits: int, v_bits: int, budget: int, num_tokens: int, head_dim: int
) -> None:
    rows = rows_within(budget, num_tokens, head_dim, k_bits=k_bits, v_bits=v_bits)

    def size(count: int) -> int:
        generator = torch.Generator().manual_seed(count)
        keys, values = torch.randn(2, 1, num_tokens, head_dim, generator=generator)
        value_bits = torch.zeros(1, num_tokens, dtype=torch.uint8)
        value_bits[:, :count] = v_bits
        key_bits = torch.full((1, head_dim), k_bits, dtype=torch.uint8)
        return len(pack_layer(keys, values, key_bits, value_bits).buffer)

    assert 0 <= rows <= num_tokens
    assert size(rows) <= 4 * budget * head_dim
    assert rows == num_tokens or size(rows + 1) > 4 * budget * head_dim


def test_a_layer_has_exactly_the_bytes_that_its_plan_says_and_narrow_values_more_rows() -> None:
    rows = {}
    for v_bits in (4, 2):
        fmt, tensors, _, _ = made("compactor-kivi", 600, 40, head_dim=64, v_bits=v_bits)
        sent = sum(tensor.nbytes for name, tensor in tensors.items() if name != "layout")
        assert sent == fmt.limit_bytes == fmt.prompt_bytes(tensors) == fmt.kept_bytes() == fmt.read_bytes()
        assert 0.97 * HEADS * 40 * 256 < sent <= HEADS * 40 * 256
        rows[v_bits] = fmt.rows
    assert 3 * 40 < rows[4] < rows[2] < 6 * 40


@pytest.mark.parametrize("group_size", [1, 4])
def test_rocketkvs_attention_chooses_among_the_packed_rows_as_among_the_rounded_ones(group_size: int) -> None:
    fmt, tensors, _, _ = made("rocketkv-kivi", 400, 40, group_size=group_size)
    attention = fmt.attention
    assert attention.num_tokens < fmt.rows
    cache, generator = Placed.of(fmt).open(tensors), torch.Generator().manual_seed(3)
    heads = unpack_layer(fmt.packed(tensors))
    keys, values = (torch.stack([head[i] for head in heads]) for i in (0, 1))
    sizes = {name: getattr(attention, name) for name in ("page_size", "num_channels", "num_tokens")}
    for step in range(5):
        queries = torch.randn(HEADS, group_size, 13, generator=generator)
        key, value = torch.randn(2, HEADS, 13, generator=generator)
        output = cache.append_and_attend(queries, key, value, num_appended=step, scaling=0.3)
        keys, values = torch.cat([keys, key[:, None]], 1), torch.cat([values, value[:, None]], 1)
        pages = torch.empty(2, HEADS, hsa.num_pages(keys.shape[1], attention.page_size), 13)
        coded = torch.stack(
            [in_8_bits(head_keys, head[0]) for head_keys, head in zip(keys, heads, strict=True)]
        )
        hsa.page_extremes(coded, *pages, length=keys.shape[1], page_size=attention.page_size)
        expected = hsa.attend(queries, keys, values, *pages, length=keys.shape[1], scaling=0.3, **sizes)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_half_of_the_traffic_is_packed_rows() -> None:
    fmt, _, _, _ = made("rocketkv-kivi", 3000, 200, head_dim=64)
    half = HEADS * 100 * 64 * 4
    read_rows = fmt.limit_bytes * fmt.attention.num_tokens // fmt.rows
    assert 0.95 * half < read_rows <= half
    # page extremes have 8 bits, and twice as many channels are read as of rows of 16 bits
    assert 0.8 * half < fmt.read_bytes() - read_rows <= 1.05 * half


def test_a_budget_that_covers_the_prompt_leaves_rows() -> None:
    for method in ("compactor-kivi", "rocketkv-kivi"):
        inputs = make_inputs(30)
        resolved = resolve_plan(
            plan_for(method, budget=Budget(tokens=30)),
            num_prompt_tokens=30,
            max_new_tokens=3,
            num_layers=1,
            head_dim=8,
        )
        assert resolved.method == "full"
        assert type(formats_for(resolved, inputs)[0]) is Rows


@pytest.mark.parametrize(("k_bits", "v_bits", "rows"), [(8, 4, 0), (4, 2, 0), (4, 4, -1)])
def test_other_widths_or_rows_than_the_plans_are_refused(k_bits: int, v_bits: int, rows: int) -> None:
    fmt, _, inputs, scores = made("compactor-kivi", 97, 14)
    value_bits = torch.zeros(HEADS, 97, dtype=torch.uint8)
    value_bits.scatter_(1, scores.topk(fmt.rows + rows).indices, v_bits)
    key_bits = torch.full((HEADS, 13), k_bits, dtype=torch.uint8)
    tensors = packed_tensors(pack_layer(inputs.keys, inputs.values, key_bits, value_bits))
    with pytest.raises(InvalidTensors, match="expected") as caught:
        Placed.of(fmt).open(tensors)
    # padding may give a row less the same sizes
    assert caught.value.reason == ("layout" if rows else "layer_header")


def test_counts_that_do_not_follow_from_the_plan_are_refused() -> None:
    fmt, tensors, _, _ = made("compactor-kivi", 97, 14)
    one, more = fmt.rows - 1, fmt.rows + 1
    for counts in ([one, more], [more, one]):
        layout = tensors["layout"].clone()
        # two channels' tokens of 4 bits: the second of four counts, after the four of channels
        layout[1 + 4 + 1], layout[1 + 8 + 4 + 1] = counts
        with pytest.raises(InvalidTensors) as caught:
            Placed.of(fmt).open({**tensors, "layout": layout})
        assert caught.value.reason == "layout"


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"representation": Part(name="packed", params={"k_bits": 3, "v_bits": 4})}, "k_bits is 3.*2, 4, 8"),
        ({"representation": Part(name="packed", params={"k_bits": 4, "v_bits": 16})}, "v_bits is 16"),
        ({"representation": Part(name="packed", params={"k_bits": 4})}, "v_bits"),
        ({"scorer": None}, "'packed' does not go without a scorer"),
        ({"attention": Part(name="quest")}, "'packed' does not go with attention 'quest'"),
        (
            {"layer_allocation": preset("d2o").layer_allocation},
            "'packed' does not go with layer_allocation 'attention_variance'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(part: dict[str, Part], named: str) -> None:
    plan: CompressionPlan = dataclasses.replace(plan_for("compactor-kivi"), **part)
    with pytest.raises(InvalidRequest, match=named):
        resolve_plan(plan, num_prompt_tokens=90, max_new_tokens=1, num_layers=2, head_dim=8)
