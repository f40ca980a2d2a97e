"""A worker's choice of kernels, and its metric: which path each op takes, and how often it took it.

Between the services' options and `kernels/dispatch.py`, which decides. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvferry.kernels import dispatch
from kvferry.kernels.dispatch import KernelMode, KernelPath, KernelUnavailable
from kvferry.shared.errors import ConfigurationError

Role = Literal["prefill", "decode"]
_PREFILL_OPS = ("chunk_scores", "column_sums", "pack", "quantise", "window_scores")
OPS: dict[Role, tuple[str, ...]] = {
    "prefill": _PREFILL_OPS,
    "decode": tuple(sorted({*dispatch.TRITON_OPS, *dispatch.TORCH_OPS}.difference(_PREFILL_OPS))),
}
"""Who calls which ops while serving."""


def choose_kernels(mode: KernelMode, device: torch.device) -> None:
    """Take the process's kernels, before it serves.

    Raises: ConfigurationError: Triton was asked for where it cannot run.
    """
    try:
        dispatch.configure(mode, device)
    except KernelUnavailable as error:
        raise ConfigurationError(str(error)) from error


def kernel_paths(role: Role, device: torch.device) -> dict[str, KernelPath]:
    """The path of each of a role's ops on a device, by name."""
    paths = dispatch.kernel_paths(device)
    return {op: paths[op] for op in OPS[role]}


def shown_paths(role: Role, device: torch.device) -> dict[str, str]:
    """What `/version` shows of a worker: its ops' paths, and how decode's steps run ("graph" or "eager").

    A batch with an attention that torch serves is stepped eagerly whatever the device.
    """
    steps = {"decode_step": dispatch.planned_step_path(device)} if role == "decode" else {}
    return {**kernel_paths(role, device), **steps}


class KernelCalls(Collector):
    """`kvferry_<role>_kernel_calls_total{op,path}`: every op with the path it takes now, and any it took.

    A count of zero says which path a call would take. One process's count: two services in one process share
    it.
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
