"""AdaKV's heads: one top-k over the layer with a floor, exact totals, the round trip through its tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import Placed, compress_layer, formats_for, one_format
from kvtest.reference.dense import dense_decode
from torch import Tensor

from kvferry.shared.cache.arena import header_of
from kvferry.shared.compression.formats.interface import InvalidTensors, Tensors
from kvferry.shared.compression.formats.ragged import Ragged
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import make_scorer

HEADS, DIM, WINDOW = 3, 6, 4


def make_inputs(num_tokens: int, group: int, seed: int, *, new_tokens: int | None = None) -> LayerInputs:
    """Heads of different sharpness, so that they deserve different budgets."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = torch.tensor([0.2, 2.0, 6.0])[:, None, None, None]
    new = num_tokens if new_tokens is None else new_tokens
    return LayerInputs(
        layer=0,
        queries=sharpness * torch.randn(HEADS, group, new, DIM, generator=generator),
        keys=torch.randn(HEADS, num_tokens, DIM, generator=generator),
        values=torch.randn(HEADS, num_tokens, DIM, generator=generator),
        scaling=DIM**-0.5,
    )


def resolve(num_tokens: int, budget: int) -> ResolvedPlan:
    return resolve_plan(
        plan_for("adakv", budget=Budget(tokens=budget), overrides={"window": WINDOW}),
        num_prompt_tokens=num_tokens,
        max_new_tokens=3,
        num_layers=1,
        head_dim=DIM,
    )


def stored(resolved: ResolvedPlan, inputs: LayerInputs) -> tuple[Ragged, Tensors]:
    fmt = formats_for(resolved, inputs)[0]
    assert isinstance(fmt, Ragged)
    return fmt, compress_layer(resolved, inputs)


def plain_selection(scores: Tensor, rows: int, window: int, floor: float) -> list[list[int]]:
    """Each head's last rows and best fifth, then the best of what is left, whichever head has it."""
    num_heads, num_tokens = scores.shape
    before = num_tokens - window
    guaranteed = int(floor * (rows - window))
    kept, contested = [], []
    for head in range(num_heads):
        ranked = sorted(range(before), key=lambda t: (-float(scores[head, t]), t))
        kept.append(ranked[:guaranteed])
        contested += [(-float(scores[head, t]), head, t) for t in ranked[guaranteed:]]
    for _, head, token in sorted(contested)[: num_heads * (rows - window - guaranteed)]:
        kept[head].append(token)
    return [sorted(tokens) + list(range(before, num_tokens)) for tokens in kept]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("num_tokens", [WINDOW + 2, 31, 97])
def test_each_head_keeps_what_the_plain_reference_keeps(num_tokens: int, group: int) -> None:
    inputs, rows = make_inputs(num_tokens, group, seed=num_tokens), num_tokens // 2 + 2
    resolved = resolve(num_tokens, rows)
    _, kept = stored(resolved, inputs)
    scorer = resolved.plan.scorer
    assert scorer is not None
    protected = min(8, rows // 4)
    expected = plain_selection(make_scorer(scorer, rows=rows)(inputs), rows, protected, 0.2)
    counts = kept["head_rows"].tolist()
    heads = [part.tolist() for part in kept["index"].split(counts)]
    assert heads == expected
    if num_tokens == 97:
        assert len(set(counts)) > 1
    flat = torch.cat([inputs.keys[head, tokens] for head, tokens in enumerate(expected)])
    assert torch.equal(kept["keys"], flat)
    flat = torch.cat([inputs.values[head, tokens] for head, tokens in enumerate(expected)])
    assert torch.equal(kept["values"], flat)


@given(
    num_tokens=st.integers(2, 70),
    share=st.floats(0, 1),
    new_share=st.floats(0, 1),
    group=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_budgets_are_met_exactly_and_the_tensors_go_round(
    num_tokens: int, share: float, new_share: float, group: int, seed: int
) -> None:
    rows = 1 + int(share * (num_tokens - 2))
    inputs = make_inputs(num_tokens, group, seed, new_tokens=1 + int(new_share * (num_tokens - 1)))
    resolved = resolve(num_tokens, rows)
    ragged, prompt = stored(resolved, inputs)
    counts = prompt["head_rows"].tolist()
    assert sum(counts) == HEADS * rows
    ragged.check_content(prompt)
    floor = int(0.2 * (rows - min(8, max(rows // 4, 1))))
    assert min(counts) >= floor
    assert ragged.tensors() == header_of(prompt)
    assert list(ragged.tensors()) == list(prompt)


def test_attention_is_that_of_each_heads_own_rows() -> None:
    inputs = make_inputs(61, 2, seed=5)
    fmt, prompt = stored(resolve(61, 20), inputs)
    generator = torch.Generator().manual_seed(1)
    queries, new = (torch.randn(HEADS, 2, DIM, generator=generator) for _ in range(2))
    output = fmt.attention(prompt)(queries, new, -new, 0.4)
    for head, tokens in enumerate(prompt["index"].split(prompt["head_rows"].tolist())):
        keys = torch.cat([inputs.keys[head, tokens.long()], new[head]])
        values = torch.cat([inputs.values[head, tokens.long()], -new[head]])
        expected = dense_decode(queries[head : head + 1], keys[None], values[None], scaling=0.4)
        torch.testing.assert_close(output[head : head + 1], expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("head_rows", [6, 15], "all 20"),
        ("head_rows", [-1, 21], "0 to 40"),
        ("index", [3, 2], "ascend within 0 to 39"),
        ("index", [-1], "ascend within 0 to 39"),
        ("index", [40], "ascend within 0 to 39"),
    ],
)
def test_what_no_selection_makes_is_refused(name: str, value: list[int], named: str) -> None:
    part = Part(name="ragged", params={"floor": 0.2})
    fmt = one_format(rows=10, num_prompt_tokens=40, head_dim=DIM, representation=part, num_kv_heads=2)
    keys = torch.zeros(20, DIM)
    tensors = {
        "head_rows": torch.tensor([5, 15], dtype=torch.int32),
        "index": torch.cat([torch.arange(5), torch.arange(15)]).to(torch.int32),
        "keys": keys,
        "values": keys,
    }
    Placed.of(fmt).open(tensors)
    tensors[name][: len(value)] = torch.tensor(value, dtype=torch.int32)
    if value == [40]:
        tensors[name] = tensors[name].roll(4)
    with pytest.raises(InvalidTensors, match=named) as caught:
        Placed.of(fmt).open(tensors)
    assert caught.value.reason == "packed"
