"""Runs the doctor's checks in their order and shows what they found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial

import structlog
import torch

from kvferry.kernels import dispatch
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.doctor import kernels, links, machine
from kvferry.tools.doctor.config import DoctorConfig
from kvferry.tools.doctor.model import describe
from kvferry.tools.doctor.report import Finding, as_json, as_table, guarded, is_well

Check = tuple[str, Callable[[], Iterable[Finding]]]


def run(config: DoctorConfig) -> int:
    """Run the checks. Returns the exit code: 1 if something is wrong."""
    # the table has what the self-test logs
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if config.threads:
        torch.set_num_threads(config.threads)
    findings: list[Finding] = []
    for name, check in _checks(config):
        if not config.json_report and sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{name} ...")
            sys.stderr.flush()
        findings += guarded(name, check)
    if not config.json_report and sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    sys.stdout.write(as_json(findings) if config.json_report else as_table(findings))
    return 0 if is_well(findings) else 1


def _checks(config: DoctorConfig) -> Iterable[Check]:
    yield "device", partial(machine.device_findings, config.device)
    device = _device(config.device)
    if dispatch.triton_installed() and dispatch.interpreting():
        dispatch.configure("triton", device)
    model = describe(config.model, device, config.dtype)
    yield "threads", machine.thread_findings
    yield "compiler", partial(machine.compiler_findings, device)
    yield "memory", partial(machine.memory_findings, model, device)
    yield "kernels", partial(kernels.kernel_findings, model.shape)
    yield "bandwidth", partial(kernels.bandwidth_findings, model.shape)
    yield "graph", partial(kernels.graph_findings, model.shape)
    yield "clocks", partial(machine.clock_findings, device)
    yield "host to device", partial(links.host_findings, device)
    yield "wire, loopback", links.wire_findings
    yield "redis", partial(links.redis_findings, config.history_redis)


def _device(device: str) -> torch.device:
    """Return the device that the checks run on: the CPU if the requested one cannot be used."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ConfigurationError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:N")
    if kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    chosen = torch.device("cuda", int(index or 0))
    torch.cuda.set_device(chosen)
    return chosen
