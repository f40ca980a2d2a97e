"""The GPUs of the roofline, and what of their memory's bandwidth a compiled kernel can ask for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvferry.tools.kernel_cache.shapes import Shape
from kvferry.tools.plan.machine import GPUS

RESULTS = Path(__file__).parents[1] / "results" / "kernels"
COMPILED = (RESULTS / "compile.json", RESULTS / "compile-others.json")
REACHABLE = 0.9
"""The share of a memory's bandwidth that a kernel reaches at best, assumed."""
LAUNCH_S = 2e-6
"""A kernel in a CUDA graph, beside its bytes; assumed."""
LATENCY_S = 600e-9
"""Of a memory's first byte: what must be in flight is the bandwidth times this."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What the model knows of a GPU beside its bandwidth. Attributes: device_name: the driver's; arch: whose
    compiled code counts; registers, shared_bytes: of one multiprocessor."""

    name: str
    device_name: str
    num_sms: int
    arch: str
    shared_bytes: int
    registers: int = 65536
    threads: int = 2048

    @property
    def bandwidth(self) -> float:
        return GPUS[self.name].bandwidth


CHIPS = (
    Chip(
        name="H100-SXM", device_name="NVIDIA H100 80GB HBM3", num_sms=132, arch="sm_90",
        shared_bytes=228 << 10,
    ),
    Chip(name="H200", device_name="NVIDIA H200", num_sms=132, arch="sm_90", shared_bytes=228 << 10),
    Chip(
        name="A100-80GB", device_name="NVIDIA A100-SXM4-80GB", num_sms=108, arch="sm_80",
        shared_bytes=164 << 10,
    ),
    Chip(
        name="L4", device_name="NVIDIA L4", num_sms=58, arch="sm_89", shared_bytes=100 << 10, threads=1536
    ),
    Chip(
        name="RTX-4090", device_name="NVIDIA GeForce RTX 4090", num_sms=128, arch="sm_89",
        shared_bytes=100 << 10, threads=1536,
    ),
)  # fmt: skip


def chip_of(device_name: str) -> Chip | None:
    """Return the GPU that the driver calls so, None if it is not modelled. GPUs whose names differ in a word
    have other memories."""
    return next((chip for chip in CHIPS if chip.device_name == device_name), None)


def occupancy(chip: Chip, row: dict[str, Any]) -> int:
    """Programs of a compiled kernel that are on one multiprocessor at a time."""
    threads = 32 * row["num_warps"]
    by_registers = chip.registers // (max(row["registers"], 1) * threads)
    by_shared = chip.shared_bytes // max(row["shared_bytes"] + 1024, 1)
    return max(min(by_registers, by_shared, chip.threads // threads), 0)


def asked_share(chip: Chip, row: dict[str, Any]) -> float:
    """The share of the bandwidth that a kernel can ask for: its programs have half of their shared memory in
    flight, or 64 bytes a thread."""
    in_flight = max(row["shared_bytes"] // 2, 64 * 32 * row["num_warps"])
    needed = chip.bandwidth / chip.num_sms * LATENCY_S
    return min(1.0, occupancy(chip, row) * in_flight / needed)


def compiled_row(kernel: str, arch: str, shape: Shape, *, special: str = "") -> dict[str, Any]:
    """Of the table of compiled kernels."""
    return _compiled()[kernel, arch, shape.name, special]


@cache
def _compiled() -> dict[tuple[str, ...], dict[str, Any]]:
    rows = [row for path in COMPILED for row in json.loads(path.read_text())["kernels"]]
    # the first of equal names is the one of plain attention
    return {(row["kernel"], row["arch"], row["model"], row.get("special", "")): row for row in reversed(rows)}
