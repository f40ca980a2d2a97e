"""top_k and top_p select what they select of all weights in order, whatever is ordered of them."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels import dispatch, quarantine
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.decoder_ops import triton_kernel
from kvferry.shared.device.self_test import run_op
from kvferry.shared.sampling import truncation
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import Flavour, draw, numbers_of

CPU = torch.device("cpu")


def by_sorting(weights, top_k, top_p):
    """The definition, on the whole vocabulary in order."""
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1])
    ordered = torch.where((rank < top_k) | (top_k == 0), ordered, 0.0)
    reached = ordered.cumsum(1)
    inside = (reached - ordered < top_p * reached[:, -1:]) | (top_p >= 1.0) | (rank == 0)
    return torch.zeros_like(weights).scatter_(1, order, torch.where(inside, ordered, 0.0))


class Sizes(TorchDispatchMode):
    """How many weights of a row each operation puts in order."""

    def __init__(self):
        super().__init__()
        self.ordered = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::topk", "aten::sort"):
            self.ordered.append(result[0].shape[-1])
        return result


def check(weights, rows):
    params = [SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p) for top_k, top_p in rows]
    flavour, numbers = Flavour.of(params), numbers_of(params)
    if not flavour.truncates:
        return
    top_k, top_p = numbers[1:3, :, None]
    expected = by_sorting(weights, top_k, top_p)
    found = truncation.truncated(weights, top_k, top_p, most=flavour.most, nuclei=flavour.nuclei)
    assert torch.equal(found, expected)
    if flavour.nuclei:  # what a GPU does, but for its kernel
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(truncation, "_nuclei_on_cpu", truncation._nuclei)
            found = truncation.truncated(weights, top_k, top_p, most=flavour.most, nuclei=True)
        assert torch.equal(found, expected)


ROWS = st.tuples(st.sampled_from([0, 1, 3, 7, 40, 300]), st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]))


@given(
    rows=st.lists(ROWS, min_size=1, max_size=4),
    size=st.sampled_from([1, 5, 37, 200]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    halves=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_weights_of_the_definition_are_left(rows, size, spread, halves, seed):
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(seed)).double() * spread
    logits = (2 * logits).round() / 2 if halves else logits  # with equals among them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "_HEAD", 4)
        patch.setattr(truncation, "_FEW", 2)
        patch.setattr(truncation, "_SAMPLES", 3)
        check((logits - logits.amax(1, keepdim=True)).exp(), rows)


@pytest.mark.parametrize(
    "rows", [[(0, 0.95), (0, 0.5)], [(50, 0.9), (7, 1.0)], [(0, 1.0), (40, 0.9)]], ids=str
)
def test_only_the_largest_weights_are_put_in_order(rows):
    """A trained model's certainty: 1,024 of 50,000 weights are enough."""
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)).double() * 3
    logits[:, 7:500] += 16
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    params = [SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p) for top_k, top_p in rows]
    top_k, top_p = numbers_of(params)[1:3, :, None]
    flavour = Flavour.of(params)
    with Sizes() as sizes:
        found = truncation.truncated(weights, top_k, top_p, most=flavour.most, nuclei=flavour.nuclei)
    assert torch.equal(found, by_sorting(weights, top_k, top_p))
    assert sizes.ordered
    assert max(sizes.ordered) <= 1024


def test_of_a_flat_distribution_few_weights_are_put_in_order_too():
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)).double() * 0.5
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    top_k, top_p = torch.zeros(2, 1), torch.tensor([[0.5], [0.999]])
    with Sizes() as sizes:
        found = truncation.truncated(weights, top_k, top_p, most=0, nuclei=True)
    expected = by_sorting(weights, top_k, top_p)
    assert int((found > 0).sum(1).min()) > 10_000
    assert torch.equal(found, expected)
    assert max(sizes.ordered) <= 1024


def test_most_is_one_of_few_numbers_above_every_top_k():
    def flavour(*rows):
        return Flavour.of([SamplingParams(max_tokens=1, top_k=k, top_p=p) for k, p in rows])

    assert [flavour((k, 0.9)).most for k in (1, 2, 40, 64, 65)] == [64, 64, 64, 64, 128]
    assert flavour((40, 1.0), (0, 1.0)) == flavour((40, 1.0))
    mixed = flavour((40, 1.0), (0, 0.9))
    assert (mixed.most, mixed.nuclei) == (64, True)
    assert not flavour((40, 0.5)).nuclei


def drawn_by_sorting(logits, numbers, uniforms):
    """A token of each row by the definition, on the whole vocabulary in order."""
    temperature, top_k, top_p, min_p = numbers[:4, :, None]
    relative = logits - logits.amax(1, keepdim=True)
    weights = (relative / torch.where(temperature > 0, temperature, 1.0)).exp()
    weights = by_sorting(weights, top_k, top_p)
    weights = torch.where(weights >= min_p * weights.amax(1, keepdim=True), weights, 0.0)
    cumulative = weights.cumsum(1)
    tokens = []
    for row in range(len(logits)):
        if temperature[row] == 0:
            tokens.append(int(logits[row].argmax()))
            continue
        target = uniforms[row] * cumulative[row, -1]
        after = (cumulative[row] > target).nonzero()[:, 0]
        possible = (weights[row] > 0).nonzero()[:, 0]
        tokens.append(int(min(after[0], possible[-1]) if len(after) else possible[-1]))
    return tokens


PARAMS = st.builds(
    partial(SamplingParams, max_tokens=1),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 64, 65, 300]),
    top_p=st.sampled_from([1e-12, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
)


@given(
    batch=st.lists(PARAMS, min_size=1, max_size=4),
    size=st.sampled_from([1, 2, 33, 200, 3000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    halves=st.booleans(),
    masked=st.floats(0, 0.95),
    seed=st.integers(0, 2**20),
    on_device=st.booleans(),
)
def test_the_token_of_the_definition_is_drawn(batch, size, spread, halves, masked, seed, on_device):
    """With equal logits, masked ones, and completions of all kinds beside one another."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(batch), size, generator=generator).double() * spread
    logits = (2 * logits).round() / 2 if halves else logits
    hidden = torch.rand(len(batch), size, generator=generator) < masked
    hidden[:, seed % size] = False
    logits.masked_fill_(hidden, -torch.inf)
    uniforms = torch.rand(len(batch), dtype=torch.float64, generator=generator)
    numbers = numbers_of(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "_HEAD", 16)
        patch.setattr(truncation, "_FEW", 8)
        patch.setattr(truncation, "_SAMPLES", 3)
        if on_device:
            patch.setattr(truncation, "_nuclei_on_cpu", truncation._nuclei)
        found = draw(logits, numbers, uniforms, Flavour.of(batch))
    assert found.tolist() == drawn_by_sorting(logits, numbers, uniforms)


class NoWait(TorchDispatchMode):
    """Refuses operators that ask the device for a value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("top_k", [0, 40])
def test_a_device_draws_without_a_value_read_on_the_host(top_k, monkeypatch):
    batch = [SamplingParams(max_tokens=1, top_p=0.9, top_k=k) for k in (0, top_k)]
    monkeypatch.setattr(truncation, "_nuclei_on_cpu", truncation._nuclei)
    logits = torch.randn(2, 5000, dtype=torch.float64)
    with NoWait():
        draw(logits, numbers_of(batch), torch.tensor([0.2, 0.7]).double(), Flavour.of(batch))


@pytest.fixture
def interpreted():
    if not dispatch.interpreting():
        pytest.skip("kernels are not interpreted")
    dispatch.configure("triton", CPU)
    yield
    dispatch.configure("auto", CPU)
    quarantine.state.by_op = {}


def raising(weights, goal):
    raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


def test_a_kernel_that_fails_is_quarantined_and_the_same_token_drawn(interpreted, monkeypatch):
    batch = [SamplingParams(max_tokens=1, top_p=0.9)]
    monkeypatch.setattr(truncation, "_nuclei_on_cpu", truncation._nuclei)
    logits = torch.randn(1, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    arguments = logits, numbers_of(batch), torch.tensor([0.9]).double()
    expected = draw(*arguments, Flavour.of(batch))
    assert not quarantine.quarantined(), "the kernel has drawn it"
    monkeypatch.setattr(triton_kernel, "nucleus", raising)
    assert torch.equal(draw(*arguments, Flavour.of(batch)), expected)
    assert set(quarantine.quarantined()) == {"decoder_ops"}


@pytest.mark.parametrize("fault", [raising, lambda weights, goal: goal * 0, lambda weights, goal: goal / 0])
def test_the_self_test_finds_a_kernel_that_is_wrong(interpreted, monkeypatch, fault):
    shape = BatchShape(
        num_layers=1, num_slots=1, num_kv_heads=1, group_size=1, head_dim=16, dtype=torch.float32, device=CPU
    )
    monkeypatch.setattr(triton_kernel, "nucleus", fault)
    finding = run_op("decoder_ops", shape)
    assert finding.reason is not None
    assert "nucleus" in finding.detail
