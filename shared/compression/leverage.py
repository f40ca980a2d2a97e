"""Statistical leverage: high for a token whose key points in a direction that few other keys share.

Compactor's outlier scores (sections 3.1 and 3.2, appendices C and D), computed once per layer by its scorer.
Works on any `[H_kv, T, D]` rows and uses neither positions nor attention.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Sketch = Literal["gaussian", "srht", "none"]
Solver = Literal["svd", "qr", "gram"]

SINGULAR_TOLERANCE = 1e-5
"""Singular values below this fraction of the largest count as zero; library defaults drop more of them if
there are outliers."""
RIDGE = SINGULAR_TOLERANCE**2
"""What is added to the Gram matrix's diagonal, relative to its largest entry: directions with eigenvalues far
below it count as zero."""
RUN_ROWS = 512
_LEAST = torch.finfo(torch.float32).tiny


def leverage_scores(
    keys: Tensor, *, sketch: Sketch, num_columns: int, solver: Solver, centered: bool, seed: int
) -> Tensor:
    """Compute `o_i = x_i^T (X^T X)^+ x_i` of each row of `X = K Phi`, per head, in float32 (Compactor eq. 1).

    A sketch of at least D columns spans the same space as K, so K itself is used. If there are no more rows
    than columns, every row has a direction of its own and every score is 1.

    Args:
        keys: `[H_kv, T, D]`; pre-RoPE for Compactor.
        sketch: Phi `[D, k]`: "gaussian" entries of N(0, 1/k), "srht" (`srht_sketch`), or "none".
        num_columns: k, at least 1.
        solver: see `solve_leverage`.
        centered: subtract each head's mean key first, as the authors' code does and Algorithm 1 does not.
        seed: of Phi; the same seed gives the same Phi everywhere.

    Returns: float32 `[H_kv, T]`, in [0, 1] up to rounding; a head's sum is the rank of its X.
    """
    rows = keys.float()
    if centered:
        rows = rows - rows.mean(dim=1, keepdim=True)
    if sketch != "none" and num_columns < rows.shape[2]:
        rows = rows @ _sketch_on(rows.device, sketch, rows.shape[2], num_columns, seed)
    if rows.shape[1] <= rows.shape[2]:
        return rows.new_ones(rows.shape[:2])
    return solve_leverage(rows, solver)


def solve_leverage(rows: Tensor, solver: Solver) -> Tensor:
    """Compute the leverage of X by one of three factorisations (Compactor appendix C).

    "svd": `||U_i||^2` of `X = U S V^T`, by a QR of X; singular values within the tolerance are dropped.
    "qr": `||Q_i||^2`; as "svd" if R's diagonal shows that columns are linearly dependent.
    "gram": `||L^{-1} x_i||^2` of `X^T X + ridge = L L^T`: one product and a small factorisation, the fastest.
    It runs in float64, because the product squares the condition number, so it is as exact as "svd". Unlike
    eigenvalues, a factorisation of a batch is one launch on a GPU.

    Args: rows: X, float32 `[H_kv, T, k]`, T > k.
    Returns: float32 `[H_kv, T]`.
    """
    if solver == "gram":
        gram = _gram(rows)
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal += (RIDGE * diagonal.amax(dim=1, keepdim=True)).clamp_min(_LEAST)
        # errors are not asked for, which would wait for the device; NaN stays in its head
        factor = torch.linalg.cholesky_ex(gram).L
        identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        inverse = torch.linalg.solve_triangular(factor, identity.expand_as(gram), upper=False)
        return _squared_norms(rows @ inverse.mT.to(rows.dtype))
    basis, triangle = torch.linalg.qr(rows)
    if solver == "qr":
        diagonal = triangle.diagonal(dim1=1, dim2=2).abs()
        if bool((diagonal.amin(dim=1) > SINGULAR_TOLERANCE * diagonal.amax(dim=1)).all()):
            return _squared_norms(basis)
    vectors, singular_values, _ = torch.linalg.svd(triangle)
    kept = singular_values > SINGULAR_TOLERANCE * singular_values[:, :1]
    return _squared_norms(basis @ (vectors * kept[:, None]))


def _gram(rows: Tensor) -> Tensor:
    """Compute `X^T X` in float64, `[H_kv, k, k]`.

    It is a sum over runs of rows, because a GPU gives a product with few columns one program a head, however
    many rows there are.
    """
    num_heads, num_rows, num_columns = rows.shape
    runs = F.pad(rows, (0, 0, 0, -num_rows % RUN_ROWS)).double().view(num_heads, -1, RUN_ROWS, num_columns)
    return (runs.mT @ runs).sum(dim=1)


def _squared_norms(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=2)


@lru_cache(maxsize=64)
def _sketch_on(device: torch.device, sketch: Sketch, head_dim: int, num_columns: int, seed: int) -> Tensor:
    """Return Phi on a device. Cached, because the host waits for a copy until the device has done all work
    before it."""
    make = gaussian_sketch if sketch == "gaussian" else srht_sketch
    with torch.inference_mode(False):
        return make(head_dim, num_columns, seed).to(device)


def gaussian_sketch(head_dim: int, num_columns: int, seed: int) -> Tensor:
    """Draw Phi with entries of N(0, 1/k): float32 `[D, k]` on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(head_dim, num_columns, generator=generator).mul(num_columns**-0.5)


def srht_sketch(head_dim: int, num_columns: int, seed: int) -> Tensor:
    """Draw `Phi = sqrt(n/k) D H P`: random signs D, the orthonormal Walsh-Hadamard matrix H of size n, and k
    of its columns, chosen without replacement (Compactor appendix D).

    n is the least power of two that is at least D; keys count as padded with zeros to n. Phi is a plain
    matrix, because a fast transform would save nothing at a D of 128.

    Args: num_columns: k, 1 to D.
    Returns: float32 `[D, k]` on the CPU.
    """
    size = 1 << (head_dim - 1).bit_length()
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (head_dim, 1), generator=generator) * 2.0 - 1.0
    columns = torch.randperm(size, generator=generator)[:num_columns]
    hadamard = torch.ones(1, 1)
    while hadamard.shape[0] < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    # n cancels: sqrt(n/k) of the sketch and sqrt(1/n) of an orthonormal H
    return (signs * hadamard[:head_dim, columns]).mul(num_columns**-0.5)
