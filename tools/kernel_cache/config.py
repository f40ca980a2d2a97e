"""Options of `kvferry compile`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from kvferry.shared.process.config import Settings
from kvferry.shared.process.options import group

KERNELS = group("Kernels")
RESULTS = group("Results")


class CompileConfig(Settings):
    """Options of `kvferry compile`; lists are comma-separated."""

    shapes: Annotated[str, KERNELS] = Field(
        "all", description="models whose kernels are compiled, by name; all: every one that is known"
    )
    architectures: Annotated[str, KERNELS] = Field(
        "all", description="GPUs, such as sm_90; all: every one that is known"
    )
    only: Annotated[str, KERNELS] = Field("", description="only kernels whose name holds this")
    jobs: Annotated[int, KERNELS] = Field(0, ge=0, description="processes at a time; 0: one a processor")
    folder: Annotated[str, RESULTS, Parameter(name="--folder")] = Field(
        "", description="folder to fill; empty: Triton's own, TRITON_CACHE_DIR"
    )
