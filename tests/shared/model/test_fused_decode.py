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
from kvferry.kernels.decoder_ops.native import PRODUCTS
from kvferry.kernels.native.library import KINDS, Product, is_available, library
from kvferry.kernels.quarantine import quarantined, state
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.fused_decode import JoinedProducts, side_by_side
from kvferry.shared.model.loading import load_model

FUSED = ("llama", "llama-mha", "llama-yarn", "mistral", "qwen2", "qwen3")
LAUNCHES_A_LAYER = 11
"""Beside attention's."""
JOINED_LAUNCHES = 8
"""With q, k and v in one product, and gate and up in one."""


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


@pytest.mark.covering(1)
@pytest.mark.skipif(not is_available(), reason="this machine has no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_native_code_gives_the_modules_logits_and_tokens(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    model = load(tmp_path, name)
    for parameter in model._model.parameters():  # float32 whose numbers may be those of a shorter dtype
        parameter.data = parameter.data.to(dtype).float()
    before = dispatch.calls().get(("decoder_ops", "native"), 0)
    logits, tokens = logits_of(model, "auto")
    assert dispatch.calls()["decoder_ops", "native"] == before + 4
    kinds = {product.kind for product in products_of(model)}
    # small bfloat16 numbers are float16 numbers, too
    narrow = {KINDS[torch.float16]} | ({KINDS[dtype]} if dtype is torch.bfloat16 else set())
    is_narrow = dtype is not torch.float32 and library().kvferry_kinds() >> KINDS[dtype] & 1
    assert kinds <= (narrow if is_narrow else {KINDS[torch.float32]})
    expected_logits, expected = logits_of(model, "torch")
    assert tokens == expected
    torch.testing.assert_close(logits, expected_logits, rtol=2e-5, atol=2e-5)


def products_of(model: TransformersModel) -> list[Product]:
    """As C code has them."""
    assert model._fused is not None
    native = model._fused._native
    assert native is not None
    return [native._head, *(getattr(layer, name) for layer in native._layers for name in PRODUCTS)]


@pytest.mark.skipif(not is_available(), reason="this machine has no C compiler")
@pytest.mark.parametrize("num_rows", [*range(1, 9), 33])
def test_every_batch_of_native_code_computes_each_row_alone(tmp_path: Path, num_rows: int) -> None:
    model = load(tmp_path, "llama")
    tokens = 7 * torch.arange(num_rows) + 3
    positions = 250 * torch.arange(num_rows) % 1900 + 1

    def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: object) -> Tensor:
        return queries * 0.5 + (keys + values)[:, :, None]

    together = model.decode(tokens, positions, attention=attention)
    for row in range(num_rows):
        alone = model.decode(tokens[row, None], positions[row, None], attention=attention)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("name", FUSED)
def test_without_a_compiler_a_step_is_the_modules_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(dispatch._state, "has_native", False)
    model = load(tmp_path, name)
    logits, tokens = logits_of(model, "auto")
    modules, expected = logits_of(model, "torch")
    assert tokens == expected
    assert torch.equal(logits, modules)


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
        state.by_op = {}
    assert tokens == expected


def test_other_models_go_through_their_modules(tmp_path: Path) -> None:
    model = load(tmp_path, "mixtral")
    before = dispatch.calls().get(("decoder_ops", "interpreter"), 0)
    logits_of(model, "triton")
    assert dispatch.calls().get(("decoder_ops", "interpreter"), 0) == before


def join_products(model: TransformersModel) -> list[JoinedProducts]:
    """As on a GPU."""
    assert model._fused is not None
    model._fused.join_products()
    joined = [product for pair in model._fused._products for product in pair]
    return [product for product in joined if isinstance(product, JoinedProducts)]


@pytest.mark.parametrize("name", FUSED)
def test_joined_weights_give_the_modules_logits_and_take_no_memory(tmp_path: Path, name: str) -> None:
    model = load(tmp_path, name)
    expected, tokens = logits_of(model, "torch")
    kept = {key: tensor.clone() for key, tensor in model._model.state_dict().items()}
    num_layers = len(model._model.get_decoder().layers)
    assert len(join_products(model)) == 2 * num_layers
    for key, tensor in model._model.state_dict().items():
        assert torch.equal(tensor, kept[key]), key
    attention = model._model.get_decoder().layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    # the twin of a worker in the same process finds them joined
    again = side_by_side(parts)
    assert again.data_ptr() == parts[0].data_ptr()
    assert torch.equal(again, torch.cat(parts))
    for mode in ("triton", "torch"):
        logits, drawn = logits_of(model, mode)
        assert drawn == tokens
        torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)


def test_only_plain_layers_of_one_kind_are_joined() -> None:
    plain, other = (torch.nn.Linear(8, 4, bias=bias) for bias in (False, True))
    assert JoinedProducts.can_join([plain, torch.nn.Linear(8, 2, bias=False)])
    assert not JoinedProducts.can_join([plain, other])
    assert not JoinedProducts.can_join([plain, torch.nn.Linear(8, 4, bias=False, dtype=torch.float16)])
    assert not JoinedProducts.can_join([plain, torch.nn.Identity()])


def test_parts_of_another_order_are_moved() -> None:
    rows = torch.arange(24.0).view(6, 4)
    parts = [torch.nn.Parameter(rows[3:]), torch.nn.Parameter(rows[:3])]
    joined = side_by_side(parts)
    assert torch.equal(joined, torch.cat([rows[3:], rows[:3]]))
    assert joined.data_ptr() == parts[0].data_ptr() != rows[3:].data_ptr()


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("name", ["llama-8-layers", "qwen3"])
def test_launches_of_a_layer(tmp_path: Path, name: str, joins: bool) -> None:
    model = load(tmp_path, name)
    modules = model._model
    for products in join_products(model) if joins else ():
        products._weight = CountedTensor(products._weight)
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
    assert {after - before for before, after in itertools.pairwise(attended)} == {
        JOINED_LAUNCHES if joins else LAUNCHES_A_LAYER
    }
