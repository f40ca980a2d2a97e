"""What goes over the wire for a prompt, against a plain transformers run of the same prompt."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from kvtest.prefill import key_of, make_prompt, plan_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvferry.shared.compression.plan import Budget, CompressionPlan, plan_digest
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.sampling.params import SamplingParams

if TYPE_CHECKING:
    from kvtest.prefill import Harness

WINDOW = 32


@dataclass
class Plain:
    """A plain run: per layer K, V `[H_kv, T, D]` and attention `[H, T, T]`; logits of the last token."""

    keys: list[Tensor]
    values: list[Tensor]
    attentions: list[Tensor]
    logits: Tensor


@pytest.fixture(scope="module")
def plain_run(demo_model_dir: Path):
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_dir, dtype=torch.float32, attn_implementation="eager"
    )

    def run(prompt: tuple[int, ...]) -> Plain:
        with torch.inference_mode():
            out = model(torch.tensor([prompt]), use_cache=True, output_attentions=True)
        layers = out.past_key_values.layers
        return Plain(
            keys=[layer.keys[0] for layer in layers],
            values=[layer.values[0] for layer in layers],
            attentions=[attention[0] for attention in out.attentions],
            logits=out.logits[0, -1],
        )

    return run


def pooled_scores(attention: Tensor, num_kv_heads: int, pooling: str, kernel: int, protected: int) -> Tensor:
    """`[H, T, T]` probabilities -> `[H_kv, T - protected]`."""
    before = attention.shape[-1] - protected
    sums = attention[:, -WINDOW:, :before].sum(1)
    grouped = sums.view(num_kv_heads, -1, before).sum(1)
    if pooling == "max":
        return F.max_pool1d(grouped[None], kernel, 1, kernel // 2)[0]
    return F.avg_pool1d(grouped[None], kernel, 1, kernel // 2)[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("method", "pooling", "kernel"),
    [("rocketkv", "avg", 9), ("rocketkv", "max", 63), ("snapkv", "avg", 9), ("snapkv", "avg", 7)],
)
@pytest.mark.parametrize("num_tokens", [211, 257])
async def test_rows_on_the_wire_are_the_selection_of_a_plain_run(
    harness: Harness, plain_run, method: str, pooling: str, kernel: int, num_tokens: int
) -> None:
    prompt = make_prompt(num_tokens)
    overrides = {"pooling": pooling, "kernel_size": kernel}
    plan = plan_for(method, budget=Budget(tokens=48), overrides=overrides)
    request = harness.request(prompt, plan=plan)
    first, done = await harness.run(request)

    spec, plain = harness.model.spec, plain_run(prompt)
    resolved = resolve_plan(
        plan,
        num_prompt_tokens=num_tokens,
        max_new_tokens=8,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
    )
    key = key_of(request)
    assert first.method == method
    for layer in range(spec.num_layers):
        rows = resolved.layers[layer].rows
        assert rows < num_tokens
        positions = harness.sink.rows(key, layer, "index").long()
        assert positions.shape == (spec.num_kv_heads, rows)
        index = positions[:, :, None].expand(-1, -1, spec.head_dim)
        keys = harness.sink.rows(key, layer, "keys")
        values = harness.sink.rows(key, layer, "values")
        torch.testing.assert_close(keys, plain.keys[layer].gather(1, index), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(values, plain.values[layer].gather(1, index), atol=1e-3, rtol=1e-3)
        protected = min(8, rows // 4)
        scores = pooled_scores(plain.attentions[layer], spec.num_kv_heads, pooling, kernel, protected)
        for head in range(spec.num_kv_heads):
            kept = positions[head].tolist()
            assert kept == sorted(set(kept))
            assert kept[-protected:] == list(range(num_tokens - protected, num_tokens))
            chosen = torch.zeros(num_tokens - protected, dtype=torch.bool)
            chosen[positions[head, :-protected]] = True
            assert scores[head][~chosen].max() <= scores[head][chosen].min() + 1e-4
    rows_bytes = sum(layer.rows for layer in resolved.layers) * spec.num_kv_heads * spec.row_bytes(0) * 2
    assert done.bytes_by_kind["rows"] == rows_bytes
    assert done.bytes_by_kind["index"] == sum(layer.rows for layer in resolved.layers) * spec.num_kv_heads * 4
    assert done.bytes_by_kind["manifest"] > 0


async def test_the_map_of_kept_tokens_is_that_of_the_positions_on_the_wire(harness: Harness) -> None:
    plan = plan_for("snapkv", budget=Budget(tokens=48))
    request = dataclasses.replace(harness.request(make_prompt(200), plan=plan), retained_bins=8)
    _, done = await harness.run(request)
    spec = harness.model.spec
    key = key_of(request)
    rows = [harness.sink.rows(key, layer, "index").flatten() for layer in range(spec.num_layers)]
    counts = torch.cat([torch.bincount(indices.long() // 25, minlength=8) for indices in rows])
    assert done.retained_fractions == pytest.approx((counts / (25 * spec.num_kv_heads)).tolist())
    assert sum(done.retained_fractions) == pytest.approx(spec.num_layers * 48 / 25)


@pytest.mark.parametrize("num_tokens", [1, 2, 97])
async def test_full_ships_every_row_without_an_index(harness: Harness, plain_run, num_tokens: int) -> None:
    prompt = make_prompt(num_tokens)
    request = harness.request(prompt)
    first, done = await harness.run(request)
    key = key_of(request)
    plain = plain_run(prompt)
    for layer in range(harness.model.spec.num_layers):
        assert not harness.sink.has(key, layer, "index")
        keys = harness.sink.rows(key, layer, "keys")
        torch.testing.assert_close(keys, plain.keys[layer], atol=1e-3, rtol=1e-3)
        values = harness.sink.rows(key, layer, "values")
        torch.testing.assert_close(values, plain.values[layer], atol=1e-3, rtol=1e-3)
    assert first.method == "full"
    assert done.bytes_by_kind["rows"] == len(prompt) * harness.model.spec.kv_token_bytes
    assert first.full_bytes == done.bytes_by_kind["rows"] // 2, "of float16, the checkpoint's, not of float32"


async def test_the_first_token_is_the_models_and_rides_on_the_end_record(harness: Harness, plain_run) -> None:
    prompt = make_prompt(50)
    request = harness.request(
        prompt, sampling=SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, first_index=3)
    )
    first, _ = await harness.run(request)
    logits = plain_run(prompt).logits
    assert first.token.token_id == int(logits.argmax())
    assert first.token.index == 3
    assert first.token.logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-3)
    end = harness.sink.ends[key_of(request)]
    assert end.first_token is not None
    assert end.first_token.token_id == first.token.token_id
    assert end.first_token.index == 3


async def test_the_manifest_names_the_prompt_the_plan_and_no_history(harness: Harness) -> None:
    plan: CompressionPlan = plan_for("rocketkv", budget=Budget(tokens=48), skip_layers=(0,))
    request = harness.request(make_prompt(211), plan=plan)
    await harness.run(request)
    manifest, spec = harness.sink.manifests[-1], harness.model.spec
    assert (manifest.purpose, manifest.request_id) == ("cache", request.request_id)
    assert (manifest.start, manifest.num_tokens) == (0, 211)
    assert manifest.model_fingerprint == spec.fingerprint
    assert (manifest.dtype, manifest.num_kv_heads, manifest.head_dim) == ("float32", 2, 64)
    assert manifest.num_layers == spec.num_layers
    resolved = plan_of(request)
    assert resolved.plan == plan
    assert manifest.plan_digest == plan_digest(resolved)
    assert manifest.layer_rows == ()
    sent = [harness.sink.rows(manifest.key, layer, "keys").shape[1] for layer in range(manifest.num_layers)]
    assert sent == [layer.rows for layer in resolved.layers]
    assert sent[0] == 211
    assert sent[1] < 211
    assert (manifest.history_endpoint, manifest.history_credit_bytes) == ("", 0)
    assert harness.store.size_bytes == 0


async def test_live_kv_does_not_grow_with_layers(harness: Harness) -> None:
    live = harness.count_live()
    await harness.run(harness.request(make_prompt(300), plan=plan_for("rocketkv", budget=Budget(tokens=48))))
    assert len(live) == harness.model.spec.num_layers >= 4
    assert max(live) <= 2
