"""Compaction of generated tokens: which rows stay, how many at a time, and what it is refused with."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import Placed, compress_layer, formats_for, make_inputs, make_spec
from torch import Tensor

from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.compacting import SelectedSegments
from kvferry.shared.compression.formats.rdkv import PackedSegments
from kvferry.shared.compression.plan import Budget, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import InvalidRequest
from kvferry.tools.evaluation.budgets import Target, plan_for_target

TOKENS, SCALING = 100, 0.3
ANY_SCORER = Part(name="streaming", params={"sinks": 0})


def resolve(
    method: str = "snapkv", *, tokens: int = 40, max_new_tokens: int = 60, **overrides: Any
) -> ResolvedPlan:
    return resolve_plan(
        plan_for(method, budget=Budget(tokens=tokens), overrides={"rebudget_tokens": 20, **overrides}),
        num_prompt_tokens=TOKENS,
        max_new_tokens=max_new_tokens,
        num_layers=1,
        head_dim=16,
    )


def selected(queries: Tensor, keys: Tensor, *, kept: int) -> Tensor:
    """SnapKV's choice in plain code: window 6, average of 9 columns, a quarter of the rows protected."""
    num_tokens, window = keys.shape[1], queries.shape[2]
    logits = torch.einsum("hgwd,htd->hgwt", queries, keys) * SCALING
    causal = torch.arange(num_tokens) <= torch.arange(num_tokens - window, num_tokens)[:, None]
    sums = logits.masked_fill(~causal, -torch.inf).softmax(-1).sum((1, 2))
    protected = min(8, max(kept // 4, 1))
    scores = F.avg_pool1d(sums[:, None, :-protected], 9, stride=1, padding=4)[:, 0]
    others = scores.topk(kept - protected, dim=1).indices
    newest = torch.arange(num_tokens - protected, num_tokens).expand(len(keys), -1)
    return torch.cat([others.sort(1).values, newest], 1)


@pytest.mark.parametrize("group_size", [1, 3])
def test_a_step_attends_to_the_prompts_rows_and_those_that_snapkv_selects_of_each_segment(
    group_size: int,
) -> None:
    resolved = resolve(window=6)
    inputs = make_inputs(TOKENS, group_size=group_size, head_dim=16, seed=4)
    (fmt,) = formats_for(resolved, inputs, returns_generated=True)
    assert fmt.segments is not None
    tensors = compress_layer(resolved, inputs)
    cache = Placed.of(fmt).open(tensors)
    generator = torch.Generator().manual_seed(8)
    queries = torch.randn(2, group_size, 59, 16, generator=generator)
    new = torch.randn(2, 2, 59, 16, generator=generator)
    rows = torch.stack([tensors["keys"], tensors["values"]])
    for step in range(59):
        if step and step % 20 == 0:
            segment = new[:, :, step - 20 : step]
            index = selected(queries[:, :, step - 6 : step], segment[0], kept=8)
            chosen = segment.gather(2, index[None, :, :, None].expand(2, -1, -1, 16))
            rows = torch.cat([rows[:, :, :-20], chosen], 2)
        rows = torch.cat([rows, new[:, :, step : step + 1]], 2)
        output = cache.append_and_attend(
            queries[:, :, step], *new[:, :, step], num_appended=step, scaling=SCALING
        )
        weights = torch.einsum("hgd,htd->hgt", queries[:, :, step], rows[0]).mul(SCALING).softmax(-1)
        torch.testing.assert_close(output, torch.einsum("hgt,htd->hgd", weights, rows[1]))
    assert rows.shape[2] == 40 + 2 * 8 + 19
    for generated, expected in zip(cache.generated_rows(59), new, strict=True):
        assert torch.equal(generated, expected)


def test_bytes_are_those_of_the_rows_and_queries_that_there_are() -> None:
    resolved = resolve(window=6)
    inputs = make_inputs(TOKENS, group_size=2, head_dim=16, seed=4)
    (fmt,) = formats_for(resolved, inputs)
    row, queries = 2 * 2 * 16 * 4, 2 * 2 * 6 * 16 * 4
    for num_appended, num_rows in ((0, 0), (1, 1), (20, 20), (21, 9), (40, 28), (41, 17), (59, 35)):
        expected = (40 + num_rows) * row + (queries if num_appended > 14 else 0)
        assert fmt.used_bytes(num_appended) == expected
    assert fmt.kept_bytes() == 40 * row + 2 * 40 * 4
    assert fmt.regions()["keys"].shape[1] == 40 + 35
    assert not fmt.is_plain


@given(
    segment=st.integers(2, 40),
    kept=st.integers(1, 39),
    num_appended=st.integers(0, 300),
    more=st.integers(0, 99),
)
def test_there_is_room_for_every_step_and_it_grows_with_the_answer(
    segment: int, kept: int, num_appended: int, more: int
) -> None:
    segments = SelectedSegments(segment_tokens=segment, kept_rows=min(kept, segment - 1), scorer=ANY_SCORER)
    counts, position = [0], 0
    for step in range(num_appended):
        full, row = divmod(step, segment)
        position = full * segments.kept_rows + row
        counts.append(position + 1)
        assert segments.num_rows(step + 1) == position + 1
    assert segments.most_rows(num_appended) == max(counts)
    assert segments.most_rows(num_appended + more) >= segments.most_rows(num_appended)


@pytest.mark.parametrize(
    "method",
    [
        *("snapkv", "pyramidkv", "adakv", "rocketkv", "compactor", "compactor-hsa"),
        *("rocketkv-kivi", "snapkv-kivi", "compactor-kivi", "snapkv-think", "rdkv"),
    ],
)
def test_a_long_answer_at_a_tenth_of_the_bytes_holds_less_than_15_percent_at_its_end(method: str) -> None:
    spec = make_spec(num_layers=4, num_kv_heads=2, group_size=4, head_dim=64, dtype="bfloat16")
    plan = plan_for_target(
        plan_for(method, overrides={"rebudget_tokens": 256}),
        Target(label="10%", kind="retention", value=Fraction(1, 10)),
        match="kept",
        spec=spec,
        num_tokens=4096,
        max_new_tokens=4096,
    )
    assert plan is not None
    resolved = resolve_plan(plan, num_prompt_tokens=4096, max_new_tokens=4096, num_layers=4, head_dim=64)
    used = 0
    for fmt in make_formats(spec, resolved):
        used += fmt.used_bytes(4095)
        if isinstance(fmt.segments, PackedSegments):
            used += 15 * fmt.segments.limit_bytes
    assert 0.1 < used / (8191 * spec.kv_token_bytes) < 0.15


@pytest.mark.parametrize(
    ("changes", "segments"),
    [
        ({}, {"segment_tokens": 20, "kept_rows": 8}),
        ({"max_new_tokens": 22}, {"segment_tokens": 20, "kept_rows": 8}),
        ({"max_new_tokens": 21}, None),  # no row comes after the first full segment
        ({"tokens": 41}, {"segment_tokens": 20, "kept_rows": 9}),
        ({"tokens": 1}, {"segment_tokens": 20, "kept_rows": 1}),
        ({"tokens": 96}, None),  # a segment would stay whole
        ({"tokens": 200}, None),
        ({"rebudget_tokens": 0}, None),
        ({"method": "compactor-kivi"}, {"segment_tokens": 20, "kept_rows": 8}),
        ({"method": "rocketkv", "tokens": 10}, {"segment_tokens": 20, "kept_rows": 8}),  # 40 rows
    ],
)
def test_a_layers_segments_follow_from_its_budget(
    changes: dict[str, Any], segments: dict[str, int] | None
) -> None:
    generated = resolve(**changes).layers[0].generated
    assert (generated.params if generated is not None else None) == segments


@pytest.mark.parametrize(
    ("method", "value", "problem"),
    [
        ("snapkv", -1, "rebudget_tokens is -1"),
        ("snapkv", 1.5, "rebudget_tokens"),
        ("snapkv", True, "rebudget_tokens"),
        ("snapkv", 2**20 + 1, "rebudget_tokens"),
        ("h2o", 64, "rebudget_tokens does not go with attention 'evict'"),
        ("d2o", 64, "rebudget_tokens does not go with attention 'merge'"),
        ("rocketkv-d2o", 64, "rebudget_tokens does not go with layer_allocation 'attention_variance'"),
        ("quest", 64, "kv_compression.parameters has rebudget_tokens"),
        ("rdkv-hsa", 64, "rebudget_tokens must be 0"),
    ],
)
def test_what_cannot_be_compacted_is_refused(method: str, value: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as raised:
        resolve(method, rebudget_tokens=value)
    assert raised.value.param is not None
    assert raised.value.param.startswith("kv_compression")
