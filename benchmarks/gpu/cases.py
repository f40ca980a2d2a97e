"""The rows of the table of targets: every kernel at the shapes of real models, and at tiny ones.

Run on a GPU, checked in the interpreter, or compiled for a GPU that is not there, all from the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from case import MODELS, TINY, Case, Device, Model
from decoder_cases import decoder_cases
from dense_cases import append_case, dense_case
from hsa_cases import HsaSize, hsa_cases
from kivi_cases import kivi_case
from packed_cases import check_case, knapsack_case, pack_case, trizone_case
from score_cases import chunk_case, window_case

__all__ = ["MODELS", "gpu_cases", "tiny_cases"]


def tiny_cases(device: Device, seed: int) -> list[Case]:
    """Every kernel at shapes that the interpreter gets through."""
    small, other = TINY
    return [
        dense_case(small, batch_size=2, length=70, device=device, seed=seed, target=None),
        dense_case(
            small,
            batch_size=2,
            length=70,
            device=device,
            seed=seed,
            target=None,
            window=40,
            capped=True,
            sinks=True,
        ),
        append_case(other, batch_size=2, device=device, seed=seed),
        *hsa_cases(
            other,
            HsaSize(batch_size=1, length=50, page_size=3, num_channels=20, num_tokens=13),
            device=device,
            seed=seed,
            targets=(None, None),
        ),
        hsa_cases(
            small,
            HsaSize(batch_size=2, length=50, page_size=1, num_channels=20, num_tokens=13, is_special=True),
            device=device,
            seed=seed,
            targets=(None, None),
        )[-1],
        trizone_case(small, batch_size=1, kept=150, new=3, device=device, seed=seed, target=None),
        window_case(other, window=5, length=40, device=device, seed=seed, target=None),
        pack_case(small, length=20, device=device, seed=seed, target=None),
        check_case(small, length=20, device=device, seed=seed),
        knapsack_case(small, length=20, device=device, seed=seed),
        chunk_case(small, chunk=20, length=33, device=device, seed=seed),
        *decoder_cases(small, batch_size=2, device=device, seed=seed),
        kivi_case(small, bits=4, batch_size=2, length=70, new=3, device=device, seed=seed),
        kivi_case(other, bits=2, batch_size=1, length=33, new=1, device=device, seed=seed),
    ]


def gpu_cases(device: Device, seed: int, model: Model) -> list[Callable[[], list[Case]]]:
    """The rows of the table of targets at one model's shapes, made a few at a time: some take gigabytes."""

    def dense(batch_size: int, length: int, target: float | None, us: float | None = None) -> list[Case]:
        case = dense_case(
            model, batch_size=batch_size, length=length, device=device, seed=seed, target=target, target_us=us
        )
        return [case]

    def sparse(
        batch_size: int,
        length: int,
        targets: tuple[float | None, float | None],
        us: tuple[float, float, float] | None = None,
        page_size: int = 4,
    ) -> list[Case]:
        size = HsaSize(
            batch_size=batch_size,
            length=length,
            page_size=page_size,
            num_channels=model.head_dim // 2,
            num_tokens=length // 8,
        )
        return hsa_cases(model, size, device=device, seed=seed, targets=targets, targets_us=us)

    def packed(batch_size: int, target: float | None, us: float | None = None) -> list[Case]:
        case = trizone_case(
            model, batch_size=batch_size, kept=4096, new=64, device=device, seed=seed, target=target,
            target_us=us,
        )  # fmt: skip
        return [case]

    def quantised(bits: int) -> list[Case]:
        return [kivi_case(model, bits=bits, batch_size=8, length=4096, new=64, device=device, seed=seed)]

    return [
        lambda: dense(32, 4096, 0.85),
        lambda: dense(1, 131072, 0.80),
        lambda: dense(1, 4096, None, 10.0),
        lambda: [
            dense_case(
                model,
                batch_size=32,
                length=131072 // 32,
                device=device,
                seed=seed,
                target=0.85,
                window=1024,
                sinks=True,
            )
        ],
        lambda: [append_case(model, batch_size=64, device=device, seed=seed)],
        lambda: sparse(64, 8192, (0.60, 0.65)),
        lambda: sparse(64, 8192, (None, None), page_size=1),
        lambda: sparse(1, 8192, (None, None), (4.0, 4.0, 12.0)),
        lambda: packed(64, 0.60),
        lambda: packed(8, None, 16.0),
        lambda: packed(1, None, 10.0),
        lambda: [window_case(model, window=32, length=131072, device=device, seed=seed, target=0.50)],
        lambda: [pack_case(model, length=32768, device=device, seed=seed, target=0.60)],
        lambda: [check_case(model, length=4096, device=device, seed=seed)],
        lambda: [knapsack_case(model, length=32768, device=device, seed=seed)],
        lambda: [chunk_case(model, chunk=512, length=32768, device=device, seed=seed)],
        lambda: decoder_cases(model, batch_size=32, device=device, seed=seed),
        *(partial(quantised, bits) for bits in (2, 4)),
    ]
