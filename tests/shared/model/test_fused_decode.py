"""A fused decode step gives transformers' logits and tokens in few launches; other models have none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from kvtest import faulty_kernels
from kvtest.counted_device import CountedTensor, Counting, on_device
from kvtest.tiny_models import make_model
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.quarantine import quarantined, release_all
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model

FUSED = ("llama", "llama-mha", "llama-yarn", "mistral", "qwen2", "qwen3")
LAUNCHES_A_LAYER = 11
"""Beside attention's."""


class Averages:
    """Attention in place of the kernels': the mean of the values that a sequence has had, and the keys."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: object) -> Tensor:
        self.sums[layer] = self.sums.get(layer, 0) + values + keys
        return (queries + self.sums[layer][:, :, None]) * 0.5


def load(folder: Path, name: str) -> TransformersModel:
    return load_model(make_model(name, folder / name), device="cpu")


def logits_of(model: TransformersModel, mode: dispatch.KernelMode) -> tuple[Tensor, list[list[int]]]:
    """The logits of four steps of three sequences, and the tokens."""
    attention, tokens, steps = Averages(), torch.tensor([5, 300, 17]), []
    drawn = []
    dispatch.configure(mode, torch.device("cpu"))
    try:
        for step in range(4):
            logits = model.decode(tokens, torch.tensor([3, 700, 41]) + step, attention=attention)
            tokens = logits.argmax(1)
            steps.append(logits)
            drawn.append(tokens.tolist())
    finally:
        dispatch.configure("auto", torch.device("cpu"))
    return torch.stack(steps), drawn


@pytest.mark.parametrize("name", FUSED)
def test_logits_and_tokens_are_those_of_the_modules(tmp_path: Path, name: str) -> None:
    model = load(tmp_path, name)
    before = dispatch.calls().get(("decoder_ops", "interpreter"), 0)
    fused, tokens = logits_of(model, "triton")
    assert dispatch.calls()["decoder_ops", "interpreter"] == before + 4
    modules, expected = logits_of(model, "torch")
    assert tokens == expected
    torch.testing.assert_close(fused, modules, rtol=2e-5, atol=2e-5)
    assert not quarantined()


def test_a_kernel_that_fails_in_a_step_is_torch_s_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tmp_path, "llama")
    _, expected = logits_of(model, "torch")
    faulty_kernels.install("decoder_ops", "out_of_resources", monkeypatch.setattr)
    try:
        _, tokens = logits_of(model, "triton")
        assert quarantined()["decoder_ops"].reason == "out_of_resources"
    finally:
        release_all()
    assert tokens == expected


def test_other_models_go_through_their_modules(tmp_path: Path) -> None:
    model = load(tmp_path, "mixtral")
    before = dispatch.calls().get(("decoder_ops", "interpreter"), 0)
    logits_of(model, "triton")
    assert dispatch.calls().get(("decoder_ops", "interpreter"), 0) == before


@pytest.mark.parametrize("name", ["llama-8-layers", "qwen3"])
def test_launches_of_a_layer(tmp_path: Path, name: str) -> None:
    model = load(tmp_path, name)
    modules = model._model
    for module in modules.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[key]
                setattr(module, key, CountedTensor(parameter.data))
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[key] = CountedTensor(buffer)
    attended = []

    def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: object) -> Tensor:
        attended.append(counting.launches.total())
        return queries

    tokens, positions = on_device(torch.tensor([5, 300]), torch.tensor([3, 9]))
    dispatch.configure("triton", torch.device("cpu"))
    try:
        with torch.no_grad(), Counting() as counting:
            assert model._fused is not None
            model._fused.run(tokens, positions, attention)
    finally:
        dispatch.configure("auto", torch.device("cpu"))
    assert not counting.reads
    assert {after - before for before, after in itertools.pairwise(attended)} == {LAUNCHES_A_LAYER}
