"""A worker's choice of kernels, where they are stored, and its metrics: each op's path, how often it was
taken, and quarantine.

Between the services' options and `kernels/dispatch.py`, which decides. Knows no kernel.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import structlog
import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.kernels import dispatch
from kvferry.kernels.dispatch import KernelMode, KernelPath, KernelUnavailable
from kvferry.kernels.quarantine import Quarantined, on_quarantine, quarantined
from kvferry.shared.errors import ConfigurationError

_log = structlog.get_logger(__name__)

Role = Literal["prefill", "decode"]
_PREFILL_OPS = ("chunk_scores", "column_sums", "knapsack", "pack", "quantise", "window_scores")
_DRAFT_OPS = ("decoder_ops", "dense_decode")
"""Ops of decode that a draft calls at prefill, too."""
OPS: dict[Role, tuple[str, ...]] = {
    "prefill": tuple(sorted(_PREFILL_OPS + _DRAFT_OPS)),
    "decode": tuple(sorted({*dispatch.TRITON_OPS, *dispatch.TORCH_OPS}.difference(_PREFILL_OPS))),
}
"""The ops that each role calls while serving."""
ADVICE = "set TRITON_CACHE_DIR to a writable folder on a file system without noexec"


def choose_kernels(mode: KernelMode, device: torch.device) -> None:
    """Choose the process's kernels, before it serves, and log those that are quarantined from then on.

    Raises: ConfigurationError: Triton was asked for where it cannot run, or cannot use its cache.
    """
    try:
        dispatch.configure(mode, device)
    except KernelUnavailable as error:
        raise ConfigurationError(str(error)) from error
    if dispatch.compiles(device):
        check_cache(cache_folder())
    on_quarantine(_log_quarantine)


def cache_folder() -> Path:
    """Return Triton's cache folder in this process. Triton must be installed."""
    from triton import knobs

    return Path(knobs.cache.dir)


def cache_problem(folder: Path) -> str | None:
    """Say why kernels cannot be stored in a folder and loaded from it; None if they can. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"{folder} is on a file system with noexec"
    return None


def check_cache(folder: Path) -> None:
    """Refuse an unusable cache. Raises: ConfigurationError: every kernel would fail, silently."""
    if (problem := cache_problem(folder)) is not None:
        raise ConfigurationError(
            f"Triton's cache cannot be used: {problem}; {ADVICE}, or --kernels torch to do without kernels"
        )


def _log_quarantine(entry: Quarantined) -> None:
    _log.error(
        "a kernel is quarantined; its calls take the torch path until the worker is restarted",
        op=entry.op,
        reason=entry.reason,
        detail=entry.detail,
    )


def kernel_paths(role: Role, device: torch.device) -> dict[str, KernelPath]:
    """Return the path of each of a role's ops on a device, by name."""
    paths = dispatch.kernel_paths(device)
    return {op: paths[op] for op in OPS[role]}


def shown_paths(role: Role, device: torch.device) -> dict[str, str]:
    """Return what `/version` shows of a worker: its ops' paths, the reason where an op is quarantined, and
    how decode's steps run ("graph" or "eager").

    A batch with an attention that torch serves is stepped eagerly whatever the device.
    """
    shown: dict[str, str] = dict(kernel_paths(role, device))
    for op, entry in quarantined().items():
        if op in shown:
            shown[op] = f"torch (quarantined: {entry.reason})"
    return shown | ({"decode_step": dispatch.planned_step_path(device)} if role == "decode" else {})


class ShownPaths:
    """`shown_paths`, kept until an op is quarantined.

    Attributes: by_op: never changed in place.
    """

    def __init__(self, role: Role, device: torch.device) -> None:
        self.by_op = shown_paths(role, device)
        this = weakref.ref(self)

        def show_again(_: Quarantined) -> None:
            if (shown := this()) is not None:
                shown.by_op = shown_paths(role, device)

        on_quarantine(show_again)


class KernelCalls(Collector):
    """`kvferry_<role>_kernel_calls_total{op,path}`: every op with the path it takes now, and any it took.

    A count of zero says which path a call would take. The counts are the process's: two services in one
    process share them.
    """

    def __init__(self, role: Role, device: torch.device) -> None:
        self._role: Role = role
        self._device = device

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            f"kvferry_{self._role}_kernel_calls", "Kernel calls by the path they took", labels=("op", "path")
        )
        planned = dict.fromkeys(kernel_paths(self._role, self._device).items(), 0)
        taken = {pair: count for pair, count in dispatch.calls().items() if pair[0] in OPS[self._role]}
        for pair, count in sorted((planned | taken).items()):
            family.add_metric(pair, count)
        yield family


class KernelQuarantine(Collector):
    """`kvferry_kernel_quarantined{op,reason}`: 1 for each of the role's ops that is quarantined."""

    def __init__(self, role: Role) -> None:
        self._role: Role = role

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "kvferry_kernel_quarantined",
            "1 for an op whose Triton kernel is not used any more",
            labels=("op", "reason"),
        )
        for op, entry in sorted(quarantined().items()):
            if op in OPS[self._role]:
                family.add_metric((op, entry.reason), 1)
        yield family
