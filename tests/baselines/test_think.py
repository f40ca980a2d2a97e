"""ThinK keeps the channels of the paper's criterion and attends as with the other channels of K at zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import Placed, compress_layer, formats_for, make_sizing, one_format
from kvtest.reference.dense import dense_decode

from kvferry.baselines.think import Think
from kvferry.shared.compression.formats.interface import InvalidTensors, Tensors
from kvferry.shared.compression.interface import LayerInputs, LayerShape
from kvferry.shared.compression.plan import Budget, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan

HEADS, DIM = 2, 9


def make_inputs(num_tokens: int, new_tokens: int, group: int) -> LayerInputs:
    generator = torch.Generator().manual_seed(num_tokens * 7 + group)
    return LayerInputs(
        layer=0,
        queries=torch.randn(HEADS, group, new_tokens, DIM, generator=generator),
        keys=torch.randn(HEADS, num_tokens, DIM, generator=generator),
        values=torch.randn(HEADS, num_tokens, DIM, generator=generator),
        scaling=DIM**-0.5,
    )


def resolve(method: str, num_tokens: int, budget: Budget | None, **overrides: float) -> ResolvedPlan:
    return resolve_plan(
        plan_for(method, budget=budget, overrides=overrides),
        num_prompt_tokens=num_tokens,
        max_new_tokens=3,
        num_layers=1,
        head_dim=DIM,
    )


def stored(resolved: ResolvedPlan, inputs: LayerInputs) -> tuple[Think, Tensors]:
    fmt = formats_for(resolved, inputs)[0]
    assert isinstance(fmt, Think)
    return fmt, compress_layer(resolved, inputs)


def plain_channels(inputs: LayerInputs, window: int, count: int) -> list[list[int]]:
    """ThinK, Eq. 5: the largest Frobenius norms of Q_i K_i^T over the last queries, channel by channel."""
    heads = []
    for head in range(HEADS):
        norms: list[float] = []
        for channel in range(DIM):
            query = inputs.queries[head, :, -window:, channel].flatten().double()
            norms.append(float(torch.outer(query, inputs.keys[head, :, channel].double()).norm()))
        heads.append(sorted(sorted(range(DIM), key=lambda c: -norms[c])[:count]))
    return heads


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("num_tokens", "new_tokens"), [(1, 1), (31, 31), (32, 32), (33, 33), (97, 5)])
@pytest.mark.parametrize(("retention", "count"), [(0.5, 5), (0.01, 1), (1.0, 9), (4 / 9, 4)])
def test_channels_are_those_of_the_papers_criterion(
    num_tokens: int, new_tokens: int, group: int, retention: float, count: int
) -> None:
    inputs = make_inputs(num_tokens, new_tokens, group)
    _, prompt = stored(resolve("think", num_tokens, None, channel_retention=retention), inputs)
    channels = prompt["channels"].tolist()
    assert channels == plain_channels(inputs, min(32, new_tokens), count)
    assert torch.equal(prompt["keys"], torch.stack([inputs.keys[h][:, channels[h]] for h in range(HEADS)]))
    assert torch.equal(prompt["values"], inputs.values)
    assert "index" not in prompt


def test_rows_by_score_and_channels_go_together_and_are_attended_as_zeros_elsewhere() -> None:
    inputs = make_inputs(80, 80, 2)
    fmt, prompt = stored(resolve("snapkv-think", 80, Budget(tokens=30)), inputs)
    assert prompt["channels"].tolist() == plain_channels(inputs, 32, 5)
    whole = torch.zeros(HEADS, prompt["index"].shape[1], DIM)
    for head in range(HEADS):
        rows, channels = prompt["index"][head].long(), prompt["channels"][head].long()
        whole[head][:, channels] = inputs.keys[head][rows][:, channels]
        assert torch.equal(prompt["values"][head], inputs.values[head][rows])
    queries, new = torch.randn(HEADS, 2, DIM), torch.randn(HEADS, 1, DIM)
    output = fmt.attention(prompt)(queries, new, new, 0.3)
    expected = dense_decode(
        queries, torch.cat([whole, new], 1), torch.cat([prompt["values"], new], 1), scaling=0.3
    )
    torch.testing.assert_close(output, expected, atol=3e-6, rtol=3e-6)


@given(
    retention=st.floats(0.01, 1.0),
    budget=st.integers(1, 400),
    num_tokens=st.integers(1, 500),
    head_dim=st.integers(1, 130),
)
def test_no_more_bytes_than_the_budgets_rows_and_not_one_row_fewer(
    retention: float, budget: int, num_tokens: int, head_dim: int
) -> None:
    part = Part(name="think", params={"channel_retention": retention, "window": 8})
    rows = Think.rows_within(part, make_sizing(budget, num_tokens=num_tokens, head_dim=head_dim))

    def size(count: int) -> int:
        shape = LayerShape(
            num_prompt_tokens=count,
            max_new_tokens=1,
            num_kv_heads=1,
            group_size=1,
            head_dim=head_dim,
            dtype=torch.float16,
        )
        think = Think(shape=shape, rows=count, channel_retention=retention, window=8)
        return sum(spec.size_bytes for spec in think.tensors().values())

    assert rows == num_tokens or size(rows + 1) > 4 * budget * head_dim
    assert rows == 0 or size(rows) <= 4 * budget * head_dim


def test_pruned_channels_take_no_bytes() -> None:
    inputs = make_inputs(64, 64, 1)
    resolved = resolve("think", 64, None, channel_retention=1 / 9)
    expected = HEADS * 64 * (DIM + 1) * 4 + HEADS * 2
    assert sum(tensor.nbytes for tensor in compress_layer(resolved, inputs).values()) == expected
    assert formats_for(resolved, inputs)[0].kept_bytes() == expected


@pytest.mark.parametrize("channels", [[[0, 0], [1, 2]], [[0, 9], [1, 2]], [[-1, 2], [1, 2]]])
def test_channels_that_no_selection_makes_are_refused(channels: list[list[int]]) -> None:
    part = Part(name="think", params={"channel_retention": 0.2, "window": 1})
    fmt = one_format(rows=3, num_prompt_tokens=3, num_kv_heads=HEADS, head_dim=DIM, representation=part)
    tensors = {
        "channels": torch.tensor(channels, dtype=torch.int16),
        "keys": torch.zeros(HEADS, 3, 2),
        "values": torch.zeros(HEADS, 3, DIM),
    }
    with pytest.raises(InvalidTensors, match="channels must ascend within 0 to 8") as caught:
        Placed.of(fmt).open(tensors)
    assert caught.value.reason == "packed"
