"""Latent attention (MLA) against transformers: rows, scores and logits, and what the adapter relies on."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest.families import FAMILIES, LATENT_FAMILIES
from kvtest.reference.scores import causal_attention
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kvferry.shared.compression.leverage import leverage_scores
from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model import prefill_attention
from kvferry.shared.model.adapters.latent import LATENT, Latent, pass_latent_rows
from kvferry.shared.model.loading import load_model

TOKENS = torch.randint(8, 600, (61,), generator=torch.Generator().manual_seed(1))
RANK, ROTARY = 16, 4


@pytest.fixture(params=LATENT_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return FAMILIES[request.param].save(tmp_path)


class Recorder:
    """Copies of what a pass observes, with history from another one."""

    def __init__(self, history: list[tuple[Tensor, Tensor]] | None = None) -> None:
        self._history = history
        self.layers: list[tuple[Tensor, Tensor, float]] = []

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self._history[layer] if self._history else None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        assert values.data_ptr() == keys.data_ptr()
        assert values.shape == (*keys.shape[:2], RANK)
        self.layers.append((queries.clone(), keys.clone(), scaling))


def own_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def test_rows_and_scores_are_those_of_the_models_own_queries_and_keys(folder: Path) -> None:
    """Absorbed queries and latent rows give the attention of expanded ones, with the model's own scale."""
    own, model, seen = own_model(folder), load_model(folder, device="cpu", max_model_len=256), Recorder()
    modules = [module for module in own.modules() if hasattr(module, "expand_kv")]
    weights: list[Tensor] = []
    for attention in modules:
        attention.register_forward_hook(lambda _, __, output: weights.append(output[1]))
    with torch.no_grad():
        expected = own(TOKENS[None], use_cache=True)
    logits = model.prefill(TOKENS, start=0, observer=seen)
    torch.testing.assert_close(logits, expected.logits[0, -1], atol=1e-4, rtol=1e-4)
    assert len(seen.layers) == len(weights) == model.spec.num_layers
    assert model.spec.kv_token_bytes == model.spec.num_layers * (RANK + ROTARY) * 4
    for layer, (queries, keys, scaling) in enumerate(seen.layers):
        cached = expected.past_key_values.layers[layer]
        torch.testing.assert_close(keys, torch.cat([cached.keys, cached.values], -1)[0], atol=1e-4, rtol=1e-4)
        scores = causal_attention(queries, keys, scaling)
        torch.testing.assert_close(scores, weights[layer], atol=1e-4, rtol=1e-3)


def test_yarns_scale_is_part_of_the_softmax_scale(tmp_path: Path) -> None:
    seen = Recorder()
    load_model(FAMILIES["deepseek_v3-yarn"].save(tmp_path), device="cpu").prefill(
        TOKENS, start=0, observer=seen
    )
    assert seen.layers[0][2] == pytest.approx(12**-0.5 * (0.1 * torch.tensor(8.0).log().item() + 1) ** 2)


def test_a_pass_over_history_equals_the_whole_one(folder: Path) -> None:
    model, whole, last = load_model(folder, device="cpu", max_model_len=256), Recorder(), None
    expected = model.prefill(TOKENS, start=0, observer=whole)
    history = [(keys[:, :40], keys[:, :40, :RANK]) for _, keys, _ in whole.layers]
    last = Recorder(history)
    logits = model.twin().prefill(TOKENS[40:], start=40, observer=last)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for (_, keys, _), (_, given, _) in zip(last.layers, whole.layers, strict=True):
        torch.testing.assert_close(keys, given, atol=1e-4, rtol=1e-4)


def test_the_observer_is_given_as_many_of_the_last_queries_as_asked_for(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "llama"):
        model = load_model(FAMILIES[family].save(tmp_path / family), device="cpu", max_model_len=256)
        for wanted in (1, 7, 61, 99):
            given: list[Tensor] = []

            class Observer(Recorder):
                def layer_done(self, layer: int, queries: Tensor, *others: Any) -> None:
                    given.append(queries.clone())  # noqa: B023 (called in the same iteration)

            model.prefill(TOKENS, start=0, observer=Observer())
            model.prefill(TOKENS, start=0, observer=Observer(), num_queries=wanted)
            whole, last = given[: model.spec.num_layers], given[model.spec.num_layers :]
            for observed, expected in zip(last, whole, strict=True):
                assert observed.shape[2] == min(wanted, 61)
                torch.testing.assert_close(observed, expected[:, :, -wanted:], atol=1e-5, rtol=1e-5)


def test_heads_are_expanded_a_few_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder, device="cpu", max_model_len=256)
    expected = model.prefill(TOKENS, start=0, observer=Recorder())
    monkeypatch.setattr(prefill_attention, "_EXPANDED_CHANNELS", 3 * 61 * 12)
    sizes = []
    expand = Latent.expand

    def watched(self: Latent, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        keys, values = expand(self, rows, heads)
        sizes.append(keys.shape[0])
        return keys, values

    monkeypatch.setattr(Latent, "expand", watched)
    logits = model.prefill(TOKENS, start=0, observer=Recorder())
    assert sizes == [3, 3, 2] * model.spec.num_layers
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_leverage_of_latent_rows_is_that_of_all_heads_expanded_keys(tmp_path: Path) -> None:
    """Compactor's outliers: keys of all heads side by side span the same space as the rows, if the
    projections to them have full rank."""
    model, seen = load_model(FAMILIES["deepseek_v2"].save(tmp_path), device="cpu"), Recorder()
    model.prefill(TOKENS, start=0, observer=seen)
    own = own_model(tmp_path)
    modules = [module for module in own.modules() if hasattr(module, "expand_kv")]
    for layer, (_, keys, _) in enumerate(seen.layers):
        rows = model.pre_rope_keys(layer, keys)
        with torch.no_grad():
            expanded, _ = modules[layer].expand_kv(rows[None, ..., :RANK], rows[None, ..., RANK:])
        wide = expanded[0].transpose(0, 1).flatten(1)[None]
        given = leverage_scores(rows, sketch="none", num_columns=1, solver="svd", centered=False, seed=0)
        assert given.sum() < TOKENS.shape[0] / 2
        torch.testing.assert_close(given, exact_leverage(wide), atol=1e-3, rtol=1e-3)


def exact_leverage(rows: Tensor) -> Tensor:
    """Leverage of rows of low rank with more channels than tokens."""
    vectors, singular_values, _ = torch.linalg.svd(rows, full_matrices=False)
    kept = singular_values > 1e-5 * singular_values[:, :1]
    return (vectors * kept[:, None]).square().sum(2)


def test_a_twin_shares_the_projections_weights(tmp_path: Path) -> None:
    model = load_model(FAMILIES["deepseek_v3"].save(tmp_path), device="cpu", max_model_len=256)
    twin = model.twin()
    for own, other in zip(model._model.modules(), twin._model.modules(), strict=True):
        if LATENT in own.__dict__:
            assert own.__dict__[LATENT].args == (own,)
            assert other.__dict__[LATENT].args == (other,)
            assert other.kv_b_proj.weight is own.kv_b_proj.weight


# ---- what the adapter relies on; a new version of transformers may change it -----------------------------


def test_transformers_expands_rows_in_one_method_between_its_cache_and_its_attention(folder: Path) -> None:
    own = own_model(folder)
    for attention in (module for module in own.modules() if hasattr(module, "expand_kv")):
        assert list(inspect.signature(attention.expand_kv).parameters)[1:] == ["k_rot"]
        source = inspect.getsource(type(attention).forward)
        cache, expand, attend = (
            source.index(call)
            for call in ("past_key_values.update(", "self.expand_kv(", "= attention_interface(")
        )
        assert cache < expand < attend
        keys, values = attention.expand_kv(torch.randn(2, 1, 5, RANK), torch.randn(2, 1, 5, ROTARY))
        assert keys.shape == (2, 8, 5, attention.qk_nope_head_dim + ROTARY)
        assert values.shape == (2, 8, 5, attention.v_head_dim)


def test_a_model_without_that_method_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FAMILIES["deepseek_v3"].save(tmp_path)
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    monkeypatch.delattr(DeepseekV3Attention, "expand_kv")
    with pytest.raises(UnsupportedModel, match="has no attention with expand_kv"):
        load_model(folder, device="cpu")


def test_projections_that_are_no_plain_matrix_are_refused(tmp_path: Path) -> None:
    own = own_model(FAMILIES["deepseek_v3"].save(tmp_path))
    attention = next(module for module in own.modules() if hasattr(module, "expand_kv"))
    attention.kv_b_proj = nn.Linear(RANK, 8 * 24)
    with pytest.raises(UnsupportedModel, match=r"it must be a torch\.nn\.Linear without a bias"):
        pass_latent_rows(own)
    del attention.v_head_dim
    with pytest.raises(UnsupportedModel, match="'v_head_dim': None"):
        pass_latent_rows(own)
