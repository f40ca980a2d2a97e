"""Modelled times of each kernel of a decode step's layer, from what it was counted to ask of memory.

    time = bytes / share that it can ask for / (0.9 x bandwidth) + launches x 2 us

Bytes are all sectors that its loads and stores touch, as `kernel_counts.py` counts them, though some come
from a cache: a kernel that reads its rows twice is modelled at twice the time. Arithmetic is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chips import CHIPS, LAUNCH_S, REACHABLE, Chip, asked_share, chip_of, compiled_row
from decode_cases import Method
from hsa_cases import HsaSize
from kernel_counts import KernelCounts, hsa_size

from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.kernel_cache.shapes import Shape
from kvferry.tools.plan.sizes import sizes_of

KIVI_BITS = 4
BOUND_BY_ARITHMETIC = ("chunk_scores",)
_LAYER_OPS = {"add_norm": 2, "rotate": 1, "silu_product": 1}
"""Launches a layer of what is fused beside attention."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One kernel in one layer of one step. Attributes: size_bytes: of all its launches together; special: as
    of a row of the table of compiled kernels."""

    kernel: str
    launches: int
    size_bytes: float
    special: str = ""

    def seconds(self, chip: Chip, shape: Shape) -> float:
        """Modelled."""
        return self.memory_s(chip, shape) + LAUNCH_S * self.launches

    def memory_s(self, chip: Chip, shape: Shape) -> float:
        """Modelled, without launches."""
        share = asked_share(chip, compiled_row(self.kernel, chip.arch, shape, special=self.special))
        return self.size_bytes / share / (REACHABLE * chip.bandwidth)


class KernelTimes:
    """One model's kernels.

    Args: methods: whose steps are modelled, by name; contexts: batch and prompt tokens; new_tokens: of an
        answer, half of which is there.
    """

    def __init__(
        self,
        shape: Shape,
        spec: ModelSpec,
        methods: Mapping[str, Method],
        contexts: tuple[tuple[int, int], ...],
        new_tokens: int,
    ) -> None:
        self.shape, self._spec, self._methods = shape, spec, methods
        self._contexts, self._new_tokens = contexts, new_tokens
        prompts = {context for _, context in contexts}
        self._hsa = {context: self._hsa_size(context) for context in prompts}
        self.counts = KernelCounts(list(self._hsa.values()))

    def _hsa_size(self, context: int) -> HsaSize:
        return hsa_size(self._spec, self._methods["rocketkv"], context=context, new_tokens=self._new_tokens)

    def attention(self, method: str, batch: int, context: int) -> list[Moved]:
        """Of one layer. Args: method: full, rocketkv, rdkv or kivi."""
        counts, heads = self.counts, batch * self.shape.num_kv_heads
        special = f"{KIVI_BITS} bits" if method == "kivi" else ""
        if method == "rocketkv":
            by_kernel: Mapping[str, float] = counts.hsa(self._hsa[context])
        elif method == "rdkv":
            by_kernel = counts.at("trizone", self._packed_bytes(context), by_least=True)
        elif method == "kivi":
            by_kernel = counts.at(f"kivi_{KIVI_BITS}", context)
        else:
            by_kernel = counts.at("dense_decode", context + self._new_tokens // 2)
        moved = [
            Moved(kernel=kernel, launches=1, size_bytes=heads * size, special=special)
            for kernel, size in by_kernel.items()
        ]
        if method not in ("rocketkv", "rdkv"):  # their first kernels append the row
            appended = counts.at("append_rows", heads)
            moved += [Moved(kernel=kernel, launches=1, size_bytes=size) for kernel, size in appended.items()]
        return moved

    def beside(self, batch: int) -> list[Moved]:
        """Of one layer beside attention and products."""
        moved = []
        for name, launches in _LAYER_OPS.items():
            # counted at the hidden size
            wider = self.shape.intermediate_size / self.shape.hidden_size if name == "silu_product" else 1.0
            for kernel, size in self.counts.at(name, batch).items():
                moved.append(Moved(kernel=kernel, launches=launches, size_bytes=launches * wider * size))
        return moved

    def window_bytes(self, rows: int) -> float:
        """Of a head of a layer with a window."""
        return sum(self.counts.at("dense_decode window", rows).values())

    def rows(self) -> Iterator[dict[str, Any]]:
        """For a table: a kernel of one layer at one size, and its time on each GPU."""
        for batch, context in self._contexts:
            moved = {name: self.attention(name, batch, context) for name in (*self._methods, "kivi")}
            for method, kernels in {**moved, "all": self.beside(batch)}.items():
                for kernel in kernels:
                    times = {f"{chip.name}_us": 1e6 * kernel.seconds(chip, self.shape) for chip in CHIPS}
                    yield {
                        "kernel": kernel.kernel, "method": method, "batch": batch, "context": context,
                        "launches": kernel.launches, "moved_bytes": round(kernel.size_bytes),
                    } | times  # fmt: skip

    def _packed_bytes(self, context: int) -> float:
        """Of a head: what RDKV packs of a prompt, and the rows of new tokens."""
        plan, new_tokens = self._methods["rdkv"].plan(), self._new_tokens
        sizes = sizes_of(self._spec, plan, num_prompt_tokens=context, max_new_tokens=new_tokens)
        return sizes.read / (self.shape.num_layers * self.shape.num_kv_heads)


def add_modelled(
    rows: list[dict[str, Any]], counts: list[dict[str, Any]], device_name: str, shape: Shape
) -> None:
    """Put a modelled time beside measured rows of kernels that memory bounds, in proportion to their bytes.

    Args: rows: of one attention shape; counts: as stored; device_name: the driver's.
    """
    chip = chip_of(device_name)
    for row in rows:
        if "kernel" not in row:
            continue
        kind = _kind(row["kernel"], row["shape"])
        of_case = [count for count in counts if _kind(count["case"], count["shape"]) == kind]
        if chip is None or not of_case or row["kernel"] in BOUND_BY_ARITHMETIC:
            continue
        largest = max(count["least_bytes"] for count in of_case)
        special = f"{row['kernel'].partition('_')[2]} bits" if row["kernel"].startswith("kivi") else ""
        row["modelled_us"] = 1e6 * sum(
            Moved(
                kernel=count["kernel"],
                launches=count["launches"],
                size_bytes=row["num_bytes"] * (count["read_bytes"] + count["written_bytes"]) / largest,
                special=special,
            ).seconds(chip, shape)
            for count in of_case
            if count["least_bytes"] == largest
        )


def _kind(case: str, shape: str) -> tuple[str, bool, bool]:
    """Whose bytes are in proportion: a case, with or without a window, with pages of one token or more."""
    name = case.removesuffix(" window")
    return name, name == "dense_decode" and " W=" in shape, " P=1 " in shape
