"""Checkpoints in bfloat16 on a CPU: weights stored so, steps as with float32 weights, prompts rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvtest.pair import SAMPLING, started_pair
from kvtest.tiny_models import make_config, save_model
from kvtest.transformers_model import plan_of, prompt_of
from torch import Tensor, nn

from kvferry.kernels import dispatch
from kvferry.kernels.native.library import is_available
from kvferry.shared.model import loading, narrow
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.narrow import PROMPT_ROWS, NarrowLinear
from kvferry.tools.oracle import OneProcessGenerator

CPU = torch.device("cpu")
BITS = 2.0**-8
"""Half of the distance of two bfloat16 numbers, relative to them."""


@pytest.fixture(autouse=True)
def multiplies_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has the instructions; others compute the same without them."""
    monkeypatch.setattr(loading, "multiplies_in_bfloat16", lambda: True)


def folder_of(tmp_path: Path, family: str = "qwen2", dtype: torch.dtype = torch.bfloat16) -> Path:
    return save_model(make_config(family), tmp_path / family, dtype=dtype)


def linear_layers(model: TransformersModel) -> list[nn.Linear]:
    return [module for module in model._model.modules() if isinstance(module, nn.Linear)]


def layer_of(rows: int, columns: int, *, has_bias: bool) -> NarrowLinear:
    """As `narrow` makes it."""
    module = nn.Linear(columns, rows, bias=has_bias).requires_grad_(False)
    module.weight.data = module.weight.data.bfloat16().float()
    narrow.narrow(module)
    assert type(module) is NarrowLinear
    return module


def logits_of(model: TransformersModel, num_steps: int = 3) -> Tensor:
    """Of some steps of three sequences, with attention that depends on all that it is given."""
    before: dict[int, Tensor] = {}

    def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: object) -> Tensor:
        before[layer] = before.get(layer, 0) + values + keys
        return (queries + before[layer][:, :, None]) * 0.5

    tokens, steps = torch.tensor([5, 300, 17]), []
    for step in range(num_steps):
        steps.append(model.decode(tokens, torch.tensor([3, 700, 41]) + step, attention=attention))
        tokens = steps[-1].argmax(1)
    return torch.stack(steps)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_weights_are_stored_as_bfloat16_and_all_else_is_float32(tmp_path: Path, family: str) -> None:
    model = load_model(folder_of(tmp_path, family), device="cpu")
    layers = linear_layers(model)
    assert {type(layer) for layer in layers} == {NarrowLinear}
    assert {layer.weight.dtype for layer in layers} == {torch.bfloat16}
    weights = {layer.weight.data_ptr() for layer in layers}
    others = [parameter for parameter in model._model.parameters() if parameter.data_ptr() not in weights]
    assert {parameter.dtype for parameter in others} == {torch.float32}
    assert model.dtype == torch.float32
    assert model.spec.dtype == "float32"
    twin = model.twin()
    assert {layer.weight.data_ptr() for layer in linear_layers(twin)} == weights


@pytest.mark.parametrize(
    ("family", "dtype", "asked"),
    [
        ("llama", torch.bfloat16, "float32"),
        ("llama", torch.float32, "auto"),
        ("llama", torch.float16, "auto"),
        ("mixtral", torch.bfloat16, "auto"),
    ],
)
def test_others_are_as_they_were(tmp_path: Path, family: str, dtype: torch.dtype, asked: str) -> None:
    model = load_model(folder_of(tmp_path, family, dtype), device="cpu", dtype=asked)
    assert {type(layer) for layer in linear_layers(model)} == {nn.Linear}


def test_without_the_instructions_weights_are_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "multiplies_in_bfloat16", lambda: False)
    model = load_model(folder_of(tmp_path), device="cpu")
    assert {layer.weight.dtype for layer in linear_layers(model)} == {torch.float32}


@pytest.mark.parametrize("mode", ["auto", "torch"])
def test_steps_are_those_of_float32_weights_bit_by_bit(tmp_path: Path, mode: dispatch.KernelMode) -> None:
    folder = folder_of(tmp_path)
    narrowed, wide = (load_model(folder, device="cpu", dtype=dtype) for dtype in ("auto", "float32"))
    dispatch.configure(mode, CPU)
    try:
        assert torch.equal(logits_of(narrowed), logits_of(wide))
    finally:
        dispatch.configure("auto", CPU)


@pytest.mark.skipif(not is_available(), reason="this machine has no C compiler")
def test_steps_read_the_model_s_own_weights(tmp_path: Path) -> None:
    model = load_model(folder_of(tmp_path), device="cpu")
    logits_of(model, 1)
    assert model._fused is not None
    assert model._fused._native is not None
    read = {tensor.data_ptr() for tensor in model._fused._native._read}
    assert {layer.weight.data_ptr() for layer in linear_layers(model)} <= read


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (7, 36)])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (PROMPT_ROWS - 1,)])
def test_few_rows_are_multiplied_exactly(
    has_bias: bool, rows: int, columns: int, shape: tuple[int, ...]
) -> None:
    layer = layer_of(rows, columns, has_bias=has_bias)
    x = torch.randn(*shape, columns, generator=torch.Generator().manual_seed(rows))
    expected = nn.functional.linear(x, layer.weight.float(), layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    with dispatch.torch_only():
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(PROMPT_ROWS,), (1, 3 * PROMPT_ROWS + 5)])
def test_many_rows_are_rounded_before_the_product_and_after_it(
    has_bias: bool, shape: tuple[int, ...]
) -> None:
    layer = layer_of(97, 200, has_bias=has_bias)
    x = torch.randn(*shape, 200, generator=torch.Generator().manual_seed(3))
    y = layer(x)
    assert y.dtype == torch.float32
    products = x.bfloat16().double() @ layer.weight.double().T
    bias = 0.0 if layer.bias is None else layer.bias
    error = (y.double() - products - bias).abs()
    assert bool((error <= BITS * products.abs() + 1e-5).all())
    exact = nn.functional.linear(x, layer.weight.float(), layer.bias)
    assert not torch.allclose(y, exact, rtol=1e-4, atol=1e-4), "they are not rounded"


def test_a_prompt_s_logits_are_near_those_of_float32(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    logits = []
    for dtype in ("auto", "float32"):
        generator = OneProcessGenerator(load_model(folder, device="cpu", dtype=dtype))
        captured = generator.capture(tuple(prompt_of(120, seed=1)))
        assert captured.logits is not None
        logits.append(captured.logits)
    assert 1e-4 < float((logits[0] - logits[1]).norm() / logits[1].norm()) < 3e-2


@pytest.mark.parametrize("method", ["full", "snapkv", "rdkv"])
async def test_the_services_answer_as_the_one_process_generator(tmp_path: Path, method: str) -> None:
    async with started_pair(folder_of(tmp_path), max_model_len=1024) as pair:
        assert {type(layer) for layer in linear_layers(pair.model)} == {NarrowLinear}
        prompt = prompt_of(90, seed=4)
        turn = await pair.turn(prompt, plan_of(method))
        expected = OneProcessGenerator(pair.model).generate(prompt, plan=plan_of(method), sampling=SAMPLING)
        assert turn.tokens == [token.token_id for token in expected]
