"""How much memory a process takes while it loads a checkpoint, measured in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

_SELF = Path("/proc/self")


@dataclass(frozen=True, kw_only=True)
class LoadMemory:
    """All in bytes.

    Attributes:
        stored: size of the checkpoint's weights on disk.
        full_precision: size of the same weights in float32.
        largest: size of the largest module's weight in float32.
        peak: most that the process held while it loaded, beyond what it held before. Pages of the
            checkpoint's files that are mapped count, too.
    """

    stored: int
    full_precision: int
    largest: int
    peak: int

    @property
    def bound(self) -> int:
        """What loading may take at most: the weights as they are, mapped and copied, and a few modules.

        The first pass after loading expands single modules, and the allocator keeps some of what is freed.
        """
        return self.stored + self.stored * 8 // 5 + 4 * self.largest


def measure_load(folder: Path, *, warm_up: Path) -> LoadMemory:
    """Load a checkpoint with `load_model` on the CPU in a new process, after a small one of the same kind.

    Linux only, as the peak is read from /proc.
    """
    command = [sys.executable, "-W", "ignore", "-m", "kvtest.load_memory", str(warm_up), str(folder)]
    path = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"loading {folder} failed: {done.stderr[-2000:]}")
    return LoadMemory(**json.loads(done.stdout.splitlines()[-1]))


def _held(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _main(warm_up: Path, folder: Path) -> None:
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvferry.shared.model.loading import load_model

    load_model(warm_up, device="cpu")
    (_SELF / "clear_refs").write_text("5")  # the peak starts anew
    before = _held("VmRSS")
    kept = load_model(folder, device="cpu")
    peak = _held("VmHWM") - before
    config = AutoConfig.from_pretrained(folder)
    del kept, config.quantization_config
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    sizes = [
        4 * module.weight.numel()
        for module in whole.modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    ]
    memory = LoadMemory(
        stored=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        full_precision=4 * sum(parameter.numel() for parameter in whole.parameters()),
        largest=max(sizes),
        peak=peak,
    )
    print(json.dumps(asdict(memory)))  # noqa: T201


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
