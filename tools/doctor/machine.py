"""Driver, device, compiler, cache, threads and memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from kvferry.kernels import dispatch
from kvferry.shared.device.cuda_driver import check_device, driver_problem, driver_version
from kvferry.shared.device.kernel_paths import ADVICE, cache_folder, cache_problem
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.history.host_memory import available_memory_bytes
from kvferry.tools.doctor.model import DescribedModel
from kvferry.tools.doctor.report import Finding, Verdict

LEAST_CAPABILITY = (8, 0)
_SMI_FIELDS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "temperature.gpu", "power.draw")
_LOW_CLOCK = 0.6


def device_findings(device: str) -> Iterator[Finding]:
    """Check the device that a worker with this option would take, and its driver."""
    try:
        check_device(device)
    except ConfigurationError as error:
        yield Finding(
            check="device", verdict="fail", found=error.message, advice="see the driver's line below"
        )
    driver, cuda = driver_version(), torch.version.cuda
    pair = {"driver": driver, "torch_cuda": cuda}
    if torch.cuda.is_available() and device != "cpu":
        index = torch.device(device if device != "auto" else "cuda").index or 0
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        found = f"{name}, compute capability {capability[0]}.{capability[1]}"
        data: dict[str, object] = {"name": name, "capability": list(capability)}
        if capability < LEAST_CAPABILITY:
            advice = (
                "kernels are made for 8.0 and newer; they may spill registers here, so set --kernels torch"
            )
            yield Finding(check="device", verdict="warn", found=found, advice=advice, data=data)
        else:
            yield Finding(check="device", verdict="ok", found=found, data=data)
        yield Finding(
            check="driver", verdict="ok", found=f"{driver or 'unknown'}, torch's CUDA {cuda}", data=pair
        )
        return
    if not device.startswith("cuda"):
        yield Finding(check="device", verdict="ok", found="CPU")
    if driver is None and not device.startswith("cuda"):
        yield Finding(check="driver", verdict="skip", found="no NVIDIA driver", data=pair)
        return
    problem = driver_problem(driver, cuda)
    verdict: Verdict = "fail" if device.startswith("cuda") else "skip" if device == "cpu" else "warn"
    shown = f"driver {driver or 'none'}, torch's CUDA {cuda or 'none'}"
    yield Finding(
        check="driver",
        verdict=verdict,
        found=shown,
        advice="" if verdict == "skip" else problem or "look at nvidia-smi and CUDA_VISIBLE_DEVICES",
        data=pair,
    )


def compiler_findings(device: torch.device) -> Iterator[Finding]:
    """Check what Triton needs to build a kernel's launcher, and where it stores it."""
    if device.type != "cuda" and not (dispatch.triton_installed() and dispatch.interpreting()):
        yield Finding(check="compiler", verdict="skip", found="nothing is compiled on a CPU")
        return
    if not dispatch.triton_installed():
        advice = "install kvferry[gpu]; until then every kernel is torch's"
        yield Finding(check="compiler", verdict="warn", found="Triton is not installed", advice=advice)
        return
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "gcc", "clang", "cc"))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler is None or not header.is_file():
        missing = "a C compiler" if compiler is None else f"Python's headers ({header})"
        advice = "install gcc, libc's and Python's development packages; until then every kernel is torch's"
        verdict: Verdict = "warn" if dispatch.interpreting() else "fail"
        yield Finding(check="compiler", verdict=verdict, found=f"there is no {missing}", advice=advice)
    else:
        yield Finding(check="compiler", verdict="ok", found=compiler)
    yield cache_finding(cache_folder())


def cache_finding(folder: Path) -> Finding:
    """Check that compiled kernels can be stored in a folder and loaded from it."""
    if (problem := cache_problem(folder)) is not None:
        return Finding(check="kernel cache", verdict="fail", found=problem, advice=ADVICE)
    return Finding(check="kernel cache", verdict="ok", found=str(folder))


def thread_findings() -> Iterator[Finding]:
    """Compare torch's threads with the processors that this process may use."""
    threads, processors = torch.get_num_threads(), len(os.sched_getaffinity(0))
    found = f"{threads} threads of torch on {processors} processors"
    data: dict[str, object] = {"threads": threads, "processors": processors}
    if threads > processors:
        advice = f"set --threads {processors} or less: more threads than processors wait for one another"
        yield Finding(check="threads", verdict="warn", found=found, advice=advice, data=data)
    else:
        yield Finding(check="threads", verdict="ok", found=found, data=data)


def memory_findings(model: DescribedModel, device: torch.device) -> Iterator[Finding]:
    """Check that the model's weights for both roles fit, and how much KV fits beside them."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        free, total = available_memory_bytes(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    data: dict[str, object] = {"free_bytes": free, "total_bytes": total, "weight_bytes": model.weight_bytes}
    memory = f"{free / 1e9:.1f} GB of {total / 1e9:.1f} GB are free"
    if not model.weight_bytes:
        advice = "download the weights first, then run this again"
        yield Finding(check="memory", verdict="skip", found=memory, advice=advice, data=data)
        return
    weights = f"one copy of {model.name}'s weights as {model.dtype} takes {model.weight_bytes / 1e9:.2f} GB"
    left = free - 2 * model.weight_bytes
    where = "a GPU" if device.type == "cuda" else "a machine"
    if free < model.weight_bytes:
        advice = f"take a smaller model, quantised weights, or {where} with more memory"
        yield Finding(check="memory", verdict="fail", found=f"{memory}; {weights}", advice=advice, data=data)
    elif left < free // 20:
        advice = f"prefill and decode each have a copy: use kvferry serve --in-process, or {where} for each"
        yield Finding(check="memory", verdict="warn", found=f"{memory}; {weights}", advice=advice, data=data)
    else:
        tokens = left // 2 // max(model.kv_token_bytes, 1)
        data["full_kv_tokens"] = tokens
        room = f"half of what both roles leave holds the full KV of {tokens:,} tokens"
        yield Finding(check="memory", verdict="ok", found=f"{memory}; {weights}; {room}", data=data)


def clock_findings(device: torch.device) -> Iterator[Finding]:
    """Check the GPU's clocks after the kernels have run."""
    if device.type != "cuda":
        yield Finding(check="clocks", verdict="skip", found="no GPU")
        return
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Finding(check="clocks", verdict="skip", found="there is no nvidia-smi")
        return
    done = subprocess.run(
        [
            smi,
            f"--query-gpu={','.join(_SMI_FIELDS)}",
            "--format=csv,noheader,nounits",
            f"--id={device.index or 0}",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    values = [value.strip() for value in done.stdout.partition("\n")[0].split(",")]
    if done.returncode or len(values) != len(_SMI_FIELDS):
        yield Finding(
            check="clocks", verdict="skip", found=f"nvidia-smi: {done.stderr.strip() or done.stdout}"
        )
        return
    data: dict[str, object] = dict(zip(_SMI_FIELDS, values, strict=True))
    found = f"SM {values[0]} of {values[1]} MHz, memory {values[2]} of {values[3]} MHz, {values[4]} degrees"
    try:
        is_low = float(values[2]) < _LOW_CLOCK * float(values[3])
    except ValueError:
        is_low = False
    advice = (
        "the memory clock is low: look for a power limit, heat, or clocks that were set" if is_low else ""
    )
    yield Finding(check="clocks", verdict="warn" if is_low else "ok", found=found, advice=advice, data=data)
