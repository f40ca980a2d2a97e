"""A worker's launches as far as Triton's cache: python look_up.py PREBUILT CAPABILITY KV_HEADS HEAD_DIM

Only the driver is a stand-in, which says what the GPU is and runs nothing. Prints how many launches there
were, how many of them were dependent ones, how many compiled something, and which modules that a C compiler
built were loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvferry.kernels import dependent_launch, split_attention
from kvferry.kernels.prebuilt_cache import PrebuiltCache

PrebuiltCache.folder = Path(sys.argv[1])
capability, num_kv_heads, head_dim = map(int, sys.argv[2:])
hits: list[bool] = []
loaded: list[str] = []
kernels: list[Any] = []
jit_run = JITFunction.run


class Gpu:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def listen(*, cache_hit: bool, **_: Any) -> None:
    hits.append(cache_hit)


def load(name: str, path: str) -> SimpleNamespace:
    loaded.append(path)
    return SimpleNamespace(launch=None)


def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    kernels.append(jit_run(kernel, *args, grid=grid, warmup=True, **kwargs))


knobs.compilation.listener = listen
driver.set_active(Gpu())
JITFunction.run = run
# tensors are on the CPU
patch.object(dependent_launch, "compute_capability", lambda device: capability).start()
build._load_module_from_path = load
nvidia.library_dirs = lambda: []
for num_slots in (1, 2, 3, 8, 32):
    arena = torch.zeros(num_slots, 2, num_kv_heads, 64, head_dim, dtype=torch.bfloat16)
    heads = torch.tensor([(0, 64 * head_dim, 5)] * (num_slots * num_kv_heads))
    rows = torch.zeros(2, num_slots, num_kv_heads, head_dim, dtype=torch.bfloat16)
    split_attention.append_rows(arena.view(-1), heads, *rows)
if all(hits):
    for one in kernels:
        nvidia.CudaLauncher(one.src, one.metadata)
    of_driver = (Path(nvidia.dirname) / "driver.c").read_text()
    build.compile_module_from_src(of_driver, "cuda_utils", [], nvidia.include_dirs, nvidia.libraries)
dependent = sum(one.metadata.launch_pdl for one in kernels)
result = {
    "launches": len(kernels), "dependent": dependent, "compiled": hits.count(False), "loaded": loaded,
}  # fmt: skip
sys.stdout.write(json.dumps(result) + "\n")
