"""Leverage by every solver and sketch, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvferry.shared.compression import leverage
from kvferry.shared.compression.leverage import (
    Sketch,
    Solver,
    gaussian_sketch,
    leverage_scores,
    solve_leverage,
    srht_sketch,
)

SOLVERS: tuple[Solver, ...] = ("svd", "qr", "gram")
SKETCHES: tuple[Sketch, ...] = ("gaussian", "srht", "none")


def make_keys(num_tokens: int, head_dim: int, num_kv_heads: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 7919 + num_tokens * 31 + head_dim)
    keys = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator)
    # channels of different size, as keys have
    return keys * torch.linspace(0.1, 3.0, head_dim)


def scores(keys: Tensor, **changes: object) -> Tensor:
    arguments: dict[str, object] = {
        "sketch": "none",
        "num_columns": 48,
        "solver": "svd",
        "centered": False,
        "seed": 0,
    }
    return leverage_scores(keys, **(arguments | changes))  # type: ignore[arg-type]


def plain_leverage(rows: Tensor) -> Tensor:
    """Definition 1: the squared norms of the rows of U, for `X = U S V^T` of its rank, in float64."""
    out = []
    for head in rows.double():
        u, s, _ = torch.linalg.svd(head, full_matrices=False)
        out.append(u[:, s > 1e-5 * s.max().clamp_min(1e-300)].square().sum(dim=1))
    return torch.stack(out).float()


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "k"), [(33, 16, 7), (97, 20, 19), (300, 64, 48), (5, 4, 1)]
)
def test_every_solver_gives_the_leverage_of_the_sketched_keys(
    solver: Solver, sketch: Sketch, num_tokens: int, head_dim: int, k: int
) -> None:
    keys = make_keys(num_tokens, head_dim)
    phi = {"gaussian": gaussian_sketch, "srht": srht_sketch}.get(sketch)
    sketched = keys if phi is None else keys @ phi(head_dim, k, 3)
    result = scores(keys, sketch=sketch, num_columns=k, solver=solver, seed=3)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, plain_leverage(sketched), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("sketch", ["gaussian", "srht"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("k", [16, 17, 64])
def test_a_sketch_that_spans_all_of_k_gives_exact_leverage(sketch: Sketch, solver: Solver, k: int) -> None:
    keys = make_keys(90, 16)
    torch.testing.assert_close(
        scores(keys, sketch=sketch, num_columns=k, solver=solver), plain_leverage(keys), atol=1e-4, rtol=1e-3
    )


def test_pseudo_inverse_and_svd_definitions_agree() -> None:
    keys = make_keys(40, 8).double()
    gram = torch.linalg.pinv(keys.mT @ keys)
    expected = torch.einsum("htd,hde,hte->ht", keys, gram, keys).float()
    torch.testing.assert_close(plain_leverage(keys), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_dependent_columns_count_once(solver: Solver) -> None:
    few = make_keys(120, 5)
    keys = few @ torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    result = scores(keys, solver=solver)
    torch.testing.assert_close(result, plain_leverage(few), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_directions_beside_an_outlier_are_not_dropped(solver: Solver) -> None:
    keys = make_keys(200, 16)
    keys[:, 77] *= 1000
    result = scores(keys, solver=solver)
    torch.testing.assert_close(result.sum(dim=1), torch.full((2,), 16.0), atol=1e-2, rtol=0)
    torch.testing.assert_close(result, plain_leverage(keys), atol=1e-3, rtol=1e-2)
    assert (result.argmax(dim=1) == 77).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("value", [0.0, 2.5])
def test_equal_keys_have_equal_leverage(solver: Solver, value: float) -> None:
    result = scores(torch.full((2, 50, 8), value), solver=solver)
    expected = 1 / 50 if value else 0.0
    torch.testing.assert_close(result, torch.full((2, 50), expected), atol=1e-3, rtol=0)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8])
def test_no_more_tokens_than_columns_are_all_their_own_directions(num_tokens: int) -> None:
    result = scores(make_keys(num_tokens, 16), sketch="gaussian", num_columns=8)
    assert torch.equal(result, torch.ones(2, num_tokens))


def test_centred_keys_are_taken_from_each_heads_mean() -> None:
    keys = make_keys(60, 8) + 5
    expected = plain_leverage(keys - keys.mean(dim=1, keepdim=True))
    torch.testing.assert_close(scores(keys, centered=True), expected, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(scores(keys), expected, atol=1e-2)


@pytest.mark.parametrize("make", [gaussian_sketch, srht_sketch])
def test_a_sketch_is_that_of_its_seed_and_keeps_lengths_on_average(make: object) -> None:
    first, again, other = (make(80, 48, seed) for seed in (0, 0, 1))  # type: ignore
    assert first.shape == (80, 48)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    lengths = torch.cat([make(80, 48, seed).square().sum(dim=1) for seed in range(40)])  # type: ignore
    assert abs(lengths.mean().item() - 1) < 0.02


def test_a_whole_srht_is_orthonormal() -> None:
    phi = srht_sketch(64, 64, 5)
    torch.testing.assert_close(phi @ phi.T, torch.eye(64), atol=1e-5, rtol=0)


@given(
    num_tokens=st.integers(1, 90),
    head_dim=st.integers(1, 24),
    k=st.integers(1, 24),
    solver=st.sampled_from(SOLVERS),
    sketch=st.sampled_from(SKETCHES),
    centered=st.booleans(),
    seed=st.integers(0, 5),
)
def test_leverage_is_a_share_of_the_rank_whatever_the_order_and_scale(
    num_tokens: int, head_dim: int, k: int, solver: Solver, sketch: Sketch, centered: bool, seed: int
) -> None:
    keys = make_keys(num_tokens, head_dim, seed=seed)
    options = {"sketch": sketch, "num_columns": k, "solver": solver, "centered": centered, "seed": seed}
    result = scores(keys, **options)
    assert result.shape == (2, num_tokens)
    assert result.isfinite().all()
    assert (result >= -1e-4).all()
    assert (result <= 1 + 1e-3).all()
    columns = head_dim if sketch == "none" else min(k, head_dim)
    if num_tokens > columns + 1:
        assert (result.sum(dim=1) <= columns * (1 + 1e-3)).all()
    permutation = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    permuted = scores(keys[:, permutation] * 7.0, **options)
    torch.testing.assert_close(permuted, result[:, permutation], atol=5e-3, rtol=1e-2)


def test_heads_do_not_touch_each_other() -> None:
    keys = make_keys(70, 16, num_kv_heads=3)
    together = solve_leverage(keys, "svd")
    for head in range(3):
        torch.testing.assert_close(together[head], solve_leverage(keys[head : head + 1], "svd")[0])


@pytest.mark.parametrize("sketch", ["gaussian", "srht"])
def test_a_sketch_is_brought_to_a_device_once(monkeypatch: pytest.MonkeyPatch, sketch: Sketch) -> None:
    """On a GPU the host would wait in each layer, and the device then for the host."""
    made = []
    for name in ("gaussian_sketch", "srht_sketch"):
        make = getattr(leverage, name)
        monkeypatch.setattr(leverage, name, lambda *sizes, make=make: made.append(sizes) or make(*sizes))
    for layer in range(3):
        keys = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(layer))
        leverage_scores(keys, sketch=sketch, num_columns=11, solver="gram", centered=False, seed=12345)
    assert made == [(16, 11, 12345)]
