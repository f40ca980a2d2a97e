"""top_k and top_p select what they select of all weights in order, whatever is ordered of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.shared.sampling import sampler
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import Flavour, numbers_of


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
            self.ordered.append(result[0].shape[1])
        return result


def check(weights, rows):
    params = [SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p) for top_k, top_p in rows]
    flavour, numbers = Flavour.of(params), numbers_of(params)
    if not flavour.truncates:
        return
    top_k, top_p = numbers[1:3, :, None]
    found = sampler._truncated(weights, top_k, top_p, flavour.most)
    assert torch.equal(found, by_sorting(weights, top_k, top_p))


ROWS = st.tuples(st.sampled_from([0, 1, 3, 7, 40, 300]), st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]))


@settings(max_examples=100, deadline=None)
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
        patch.setattr(sampler, "_HEAD", 4)
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
    with Sizes() as sizes:
        found = sampler._truncated(weights, top_k, top_p, Flavour.of(params).most)
    assert torch.equal(found, by_sorting(weights, top_k, top_p))
    assert sizes.ordered
    assert max(sizes.ordered) <= 1024


def test_most_is_a_power_of_two_above_every_top_k_or_nothing():
    def most(*rows):
        return Flavour.of([SamplingParams(max_tokens=1, top_k=k, top_p=p) for k, p in rows]).most

    assert [most((k, 0.9)) for k in (1, 2, 40, 64, 65)] == [1, 2, 64, 64, 128]
    assert most((40, 1.0), (0, 1.0)) == 64
    assert most((40, 1.0), (0, 0.9)) == 0
