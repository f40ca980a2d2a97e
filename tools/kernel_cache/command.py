"""Compiles shapes and architectures side by side, one process each, and prints the results."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from kvferry.kernels import dispatch
from kvferry.shared.device.kernel_paths import check_cache
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.kernel_cache.config import CompileConfig
from kvferry.tools.kernel_cache.shapes import SHIPPED

if TYPE_CHECKING:
    from kvferry.tools.kernel_cache.compile import Compiled

TIMEOUT_S = 4 * 3600.0


def run(config: CompileConfig) -> int:
    """Compile; return the exit code. Raises: ConfigurationError: unknown names, or Triton cannot compile."""
    if not dispatch.triton_installed():
        raise ConfigurationError("Triton is not installed; install kvferry[gpu]")
    if dispatch.interpreting():
        raise ConfigurationError("TRITON_INTERPRET is set, so Triton compiles nothing; unset it")
    # a CPU install has no Triton
    from kvferry.tools.kernel_cache.rehearsal import GPUS

    shapes = _chosen("shapes", config.shapes, SHIPPED)
    architectures = _chosen("architectures", config.architectures, GPUS)
    if config.folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(config.folder).absolute())
        check_cache(Path(config.folder))
    tasks = [(shape, gpu, config.only) for shape, gpu in itertools.product(shapes, architectures)]
    for number, done in enumerate(_all(tasks, config.jobs or len(os.sched_getaffinity(0))), 1):
        sys.stdout.write(
            f"{number} of {len(tasks)}: {done.shape} on {done.architecture}, {done.num_kernels} kernels and "
            f"{done.num_launchers} launchers in {done.seconds:.0f} s\n"
        )
        sys.stdout.flush()
    return 0


def _chosen(name: str, given: str, known: Iterable[str]) -> list[str]:
    names = list(known)
    wanted = names if given == "all" else [part.strip() for part in given.split(",")]
    if unknown := [each for each in wanted if each not in names]:
        raise ConfigurationError(f"{name} has {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
    return wanted


def _all(tasks: list[tuple[str, str, str]], jobs: int) -> Iterator[Compiled]:
    if len(tasks) == 1:
        yield _compile(*tasks[0])
        return
    with ProcessPoolExecutor(min(jobs, len(tasks)), multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_compile, *task) for task in tasks]
        try:
            for future in as_completed(futures, TIMEOUT_S):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(shape: str, architecture: str, only: str) -> Compiled:
    from triton import knobs

    from kvferry.tools.kernel_cache.compile import compile_shape

    # the kernels are compiled beside one another already
    torch.set_num_threads(1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    # the text of the steps before machine code is only for people to read
    knobs.compilation.store_binary_only = True
    return compile_shape(shape, architecture, only=only)
