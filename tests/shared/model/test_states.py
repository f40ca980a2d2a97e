"""States in transformers' cache, as `state_cache.py` gives and takes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest.families import FAMILIES
from kvtest.transformers_model import Reference, prompt_of
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.support import state_layers

NUM_TOKENS, CUT = 60, 37
WITHOUT_INITIAL_STATE = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Their scan of several tokens ignores the state, so that `adapters/states.py` runs them one at a time."""


class Observer:
    """Takes and gives K and V, and the states. Attributes: order: the layers as they came."""

    def __init__(self, earlier: Observer | None = None) -> None:
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, Mapping[str, Tensor]] = {}
        self.order: list[int] = []
        self._earlier = earlier

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self._earlier.rows[layer] if self._earlier is not None else None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.rows[layer] = keys, values
        self.order.append(layer)

    def load(self, layer: int) -> dict[str, Tensor] | None:
        if self._earlier is None:
            return None
        return {name: tensor.clone() for name, tensor in self._earlier.states[layer].items()}

    def store(self, layer: int, state: Mapping[str, Tensor]) -> None:
        self.states[layer] = state
        self.order.append(layer)


def expected_order(model: TransformersModel) -> list[int]:
    """The model's layers in order, the rows of one before its state."""
    numbers = state_layers(model._model.config)
    num_layers = len(model._model.config.layer_types)
    order: list[int] = []
    for layer in range(num_layers):
        order += [layer] if model.spec.layers[layer].has_rows else []
        order += [numbers[layer]] if layer in numbers else []
    return order


def logits_of(model: TransformersModel, tokens: list[int], start: int, observer: Observer) -> Tensor:
    return model.prefill(torch.tensor(tokens), start=start, observer=observer, states=observer)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_next", "granitemoehybrid", "lfm2", "falcon_h1", "mamba2", "minimax", "recurrent_gemma"),
        *WITHOUT_INITIAL_STATE,
    ],
)
def test_a_prompt_in_parts_and_token_by_token_ends_in_the_states_of_the_whole(
    name: str, tmp_path: Path
) -> None:
    model = load_model(FAMILIES[name].save(tmp_path), device="cpu", max_model_len=256)
    prompt = prompt_of(NUM_TOKENS, seed=1)
    whole, first = Observer(), Observer()
    logits = logits_of(model, prompt, 0, whole)
    logits_of(model, prompt[:CUT], 0, first)
    second = Observer(first)
    assert torch.allclose(logits_of(model, prompt[CUT:], CUT, second), logits, atol=1e-3)
    by_token = first
    for position in range(CUT, NUM_TOKENS):
        by_token = Observer(by_token)
        logits_of(model, prompt[position : position + 1], position, by_token)
    assert whole.order == expected_order(model)
    for layer, state in whole.states.items():
        specs = [(spec.name, spec.shape, f"torch.{spec.dtype}") for spec in model.spec.layers[layer].state]
        assert [(name, tuple(t.shape[1:]), str(t.dtype)) for name, t in state.items()] == specs
        for parts in (second, by_token):
            assert all(torch.allclose(parts.states[layer][n], t, atol=1e-3) for n, t in state.items())


@pytest.mark.parametrize("name", WITHOUT_INITIAL_STATE)
def test_transformers_own_scan_still_ignores_the_state(name: str, tmp_path: Path) -> None:
    """Fails once it does not, so that the adapter is not needed any more."""
    reference: Any = Reference(FAMILIES[name].save(tmp_path))
    model, prompt = reference._model, torch.tensor([prompt_of(NUM_TOKENS, seed=1)])
    argument = "cache_params" if "mamba" in name else "past_key_values"
    with torch.inference_mode():
        expected = model(prompt).logits[0, -1]
        cache = DynamicCache(config=model.config)
        model(prompt[:, :CUT], use_cache=True, **{argument: cache})
        continued = model(prompt[:, CUT:], use_cache=True, **{argument: cache}).logits[0, -1]
    assert not torch.allclose(continued, expected, atol=1e-2)


def test_transformers_recurrent_gemma_still_stores_states_in_its_modules(tmp_path: Path) -> None:
    """Fails once it does not, so that the adapter is not needed any more."""
    reference = Reference(FAMILIES["recurrent_gemma"].save(tmp_path))
    reference.tokens(prompt_of(9, seed=1), 2)
    block = reference._model.model.layers[0].temporal_block
    assert block.rg_lru.recurrent_states.shape == (1, block.lru_width)


def test_a_model_without_a_limit_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_model_len is 0, and the model's configuration has no"):
        load_model(FAMILIES["mamba2"].save(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma"])
def test_a_twin_has_the_adapters_of_its_model(name: str, tmp_path: Path) -> None:
    model = load_model(FAMILIES[name].save(tmp_path), device="cpu", max_model_len=256)
    prompt, twin = prompt_of(NUM_TOKENS, seed=2), model.twin()
    first, other = Observer(), Observer()
    logits_of(model, prompt[:CUT], 0, first)
    logits_of(twin, prompt[:CUT], 0, other)
    expected = logits_of(model, prompt[CUT:], CUT, Observer(first))
    assert torch.equal(logits_of(twin, prompt[CUT:], CUT, Observer(other)), expected)
