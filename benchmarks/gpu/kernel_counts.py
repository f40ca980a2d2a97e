"""Every kernel's traffic, counted at two sizes of one KV head, and from these at any size.

What a kernel asks for grows by the same number of bytes with each row, page or sequence, beside what each
head takes whatever its length; so two sizes that the interpreter gets through say all. HSA's is counted at
the sizes that RocketKV's plans have at the roofline's contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from case import MODELS, Case
from decode_cases import Method
from decoder_cases import decoder_cases
from dense_cases import append_case, dense_case
from hsa_cases import HsaSize, hsa_cases
from kivi_cases import kivi_case
from packed_cases import check_case, knapsack_case, pack_case, trizone_case
from score_cases import chunk_case, window_case
from traffic import Traffic, counted_traffic

from kvferry.kernels.quantise import WIDTHS
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.spec import ModelSpec

HSA_PARTS = ("hsa_score", "hsa_select", "hsa_attend")
"""One launch each."""
PAGES_OF_ONE = HsaSize(batch_size=1, length=1024, page_size=1, num_channels=64, num_tokens=128)
_DECODER_CASES = ("add_norm", "rotate", "rotate after norms", "silu_product", "nucleus")
_SEED = 0
_CPU = torch.device("cpu")
_MODEL = replace(MODELS[0], num_kv_heads=1, dtype=torch.float16)
"""One head of Llama-3.1-8B. float16: the interpreter is slow with bfloat16, which takes as many bytes."""
_WIDE = replace(MODELS[0], dtype=torch.float16)
"""All heads, for what runs over hidden states."""
_NEW_ROWS = 128
"""Of generated tokens, beside what is packed or quantised."""


@dataclass(frozen=True, kw_only=True)
class Sized:
    """One case. Attributes: units: what its bytes grow with, beside `least_bytes`."""

    name: str
    units: int
    make: Callable[[], Case]


def _cases(hsa_sizes: Sequence[HsaSize]) -> Iterator[Sized]:
    own: dict[str, Any] = {"device": _CPU, "seed": _SEED}
    for n in (512, 1024):
        dense = partial(dense_case, _MODEL, batch_size=1, target=None, **own)
        yield Sized(name="dense_decode", units=n, make=partial(dense, length=n))
        window = partial(dense, length=2048, window=n)
        yield Sized(name="dense_decode window", units=n, make=window)
        packed = partial(trizone_case, _MODEL, batch_size=1, kept=n, new=_NEW_ROWS, target=None, **own)
        yield Sized(name="trizone", units=n, make=packed)
        for bits in WIDTHS:
            kivi = partial(kivi_case, _MODEL, bits=bits, batch_size=1, length=n, new=_NEW_ROWS, **own)
            yield Sized(name=f"kivi_{bits}", units=n, make=kivi)
    for heads in (1, 2):
        yield Sized(
            name="append_rows", units=heads, make=partial(append_case, _MODEL, batch_size=heads, **own)
        )
        for number, name in enumerate(_DECODER_CASES):
            yield Sized(name=name, units=heads, make=partial(_decoder_case, heads, number))
    for size in hsa_sizes:
        for number, name in enumerate(HSA_PARTS):
            yield Sized(name=name, units=size.length, make=partial(_hsa_case, size, number))
    for n in (256, 512):
        for name, prompt in (
            ("window_scores", partial(window_case, _MODEL, window=32, target=None, **own)),
            ("pack", partial(pack_case, _MODEL, target=None, **own)),
            ("packed_check", partial(check_case, _MODEL, **own)),
            ("knapsack", partial(knapsack_case, _MODEL, **own)),
            ("chunk_scores", partial(chunk_case, _MODEL, chunk=256, **own)),
        ):
            yield Sized(name=name, units=n, make=partial(prompt, length=n))


def _decoder_case(batch_size: int, number: int) -> Case:
    return decoder_cases(_WIDE, batch_size=batch_size, device=_CPU, seed=_SEED)[number]


def _hsa_case(size: HsaSize, number: int) -> Case:
    parts = hsa_cases(_MODEL, size, device=_CPU, seed=_SEED, targets=(None, None))
    for before in parts[:number]:
        before.launch()
    return parts[number]


def hsa_size(spec: ModelSpec, method: Method, *, context: int, new_tokens: int) -> HsaSize:
    """Of one layer of a method with sparse attention, with half of its answer's rows."""
    resolved = resolve_plan(
        method.plan(),
        num_prompt_tokens=context,
        max_new_tokens=new_tokens,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
        layers=spec.layers,
    )
    layer = resolved.layers[-1]
    return HsaSize(
        batch_size=1,
        length=layer.rows + new_tokens // 2,
        **{name: int(value) for name, value in layer.attention.params.items()},
    )


@dataclass(frozen=True, kw_only=True)
class Count:
    """What one kernel did in one case."""

    case: str
    shape: str
    units: int
    least_bytes: int
    kernel: str
    traffic: Traffic

    @property
    def moved_bytes(self) -> int:
        return self.traffic.read_bytes + self.traffic.written_bytes

    def row(self) -> dict[str, Any]:
        traffic = self.traffic
        return {
            "case": self.case, "shape": self.shape, "kernel": self.kernel, "launches": traffic.launches,
            "programs": traffic.programs, "read_bytes": traffic.read_bytes,
            "written_bytes": traffic.written_bytes, "distinct_bytes": traffic.distinct_bytes,
            "least_bytes": self.least_bytes,
        }  # fmt: skip


class KernelCounts:
    """Counts of every case, and what follows for other sizes. Args: hsa_sizes: counted as they are."""

    def __init__(self, hsa_sizes: Sequence[HsaSize]) -> None:
        self.counts: list[Count] = []
        sizes = [PAGES_OF_ONE, *sorted(set(hsa_sizes), key=lambda size: size.length)]
        for sized in _cases(sizes):
            case = sized.make()
            with counted_traffic() as found:
                case.launch()
            self.counts += [
                Count(
                    case=sized.name, shape=case.shape, units=sized.units, least_bytes=case.num_bytes,
                    kernel=kernel, traffic=traffic,
                )
                for kernel, traffic in found.items()
            ]  # fmt: skip

    def hsa(self, size: HsaSize) -> dict[str, float]:
        """Bytes by kernel of one head, at a size that was counted."""
        return {
            count.kernel: count.moved_bytes
            for count in self.counts
            if count.case in HSA_PARTS and count.shape == str(size)
        }

    def at(self, case: str, units: float, *, by_least: bool = False) -> dict[str, float]:
        """Bytes by kernel of one head or sequence at any number of units. Args: by_least: units are the
        least bytes."""
        found = {}
        of_case = [count for count in self.counts if count.case == case]
        for kernel in dict.fromkeys(count.kernel for count in of_case):
            less, more = (count for count in of_case if count.kernel == kernel)
            x0, x1 = (count.least_bytes if by_least else count.units for count in (less, more))
            slope = (more.moved_bytes - less.moved_bytes) / (x1 - x0)
            found[kernel] = less.moved_bytes + slope * (units - x0)
        return found
