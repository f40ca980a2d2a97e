"""What first light runs: stages with their limits and the commands of their processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
GPU = FOLDER.parent / "gpu"
OP_CHECK_SHAPES = ("llama-8b", "demo", "one-head", "seven")
CELLS = ("1x32768", "8x32768", "1x131072", "7x131072")
METHODS = ("full", "full (torch SDPA)", "rocketkv", "rdkv", "snapkv-kivi")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user chooses. Attributes: model, cells, methods: of whole steps; limits: seconds by stage."""

    seed: int = 1
    is_tiny: bool = False
    model: str = "Llama-3.1-8B"
    cells: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Attributes: commands: of processes that run side by side. Each gets --limit-s and --output, a file that
    it writes after each row: a JSON object with tables and `failures`. Its status is 1 if one failed."""

    name: str
    limit_s: float
    commands: tuple[tuple[str, ...], ...]


def make_stages(options: Options) -> dict[str, Stage]:
    """Return all stages by name, in the order of what matters."""
    tiny = options.is_tiny
    check = ("--check",) if tiny else ()
    model = ("--models", "tiny llama" if tiny else options.model)

    def own(script: str, *words: str) -> tuple[str, ...]:
        return (sys.executable, str(FOLDER / script), *check, *words)

    def gpu(part: str, *words: str) -> tuple[str, ...]:
        return (sys.executable, str(GPU), *check, "--seed", str(options.seed), "--parts", part, *words)

    shapes = ("tiny",) if tiny else OP_CHECK_SHAPES
    cells = options.cells or (() if tiny else CELLS)
    commands: dict[str, tuple[float, tuple[tuple[str, ...], ...]]] = {
        "env": (60, (own("environment.py"),)),
        # in a process each, so that an illegal address ends one shape alone
        "opchecks": (170, tuple(gpu("op_checks", "--models", shape) for shape in shapes)),
        "kernels": (200, (gpu("kernels"),)),
        "tokens": (150, (gpu("tokens", *(("--methods", "full", "rocketkv", "rdkv") if tiny else ())),)),
        "doctor": (150, (own("doctor.py"),)),
        "serve": (240, (own("serve.py"),)),
        "long": (240, (own("serve.py", "--long"),)),
        "steps": (
            300,
            (gpu("decode", *model, "--cells", *cells, "--methods", *(options.methods or METHODS)),),
        ),
        "prefill": (150, (gpu("prefill", *model),)),
        "peers": (150, (gpu("peers", *model),)),
    }
    if unknown := options.limits.keys() - commands.keys():
        raise ValueError(f"--limit has {', '.join(sorted(unknown))}; there are {', '.join(commands)}")
    return {
        name: Stage(name=name, limit_s=options.limits.get(name, limit_s), commands=of_stage)
        for name, (limit_s, of_stage) in commands.items()
    }
