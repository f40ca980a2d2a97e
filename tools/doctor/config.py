"""Options of `kvferry doctor`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from kvferry.shared.process.config import Settings
from kvferry.shared.process.options import CAPACITY, HISTORY, MODEL, group

RESULTS = group("Results")


class DoctorConfig(Settings):
    """Options of `kvferry doctor`; those of a worker have its names."""

    model: Annotated[str, MODEL] = Field(
        "demo",
        description="local folder, GGUF file or Hugging Face id of the model to serve; its weights are not "
        "loaded",
    )
    device: Annotated[str, MODEL] = Field("auto", description="auto (CUDA if available), cpu, cuda or cuda:N")
    dtype: Annotated[str, MODEL] = Field(
        "auto",
        description="auto (the checkpoint's own on CUDA, float32 on CPU), float32, float16 or bfloat16",
    )
    threads: Annotated[int, CAPACITY] = Field(
        0, ge=0, description="CPU threads for torch; 0: torch's default"
    )
    history_redis: Annotated[str, HISTORY] = Field(
        "", repr=False, description="Redis URL to test, as prefill's; empty: none"
    )
    json_report: Annotated[bool, RESULTS, Parameter(name="--json")] = Field(
        False, description="write JSON for a bug report instead of a table"
    )
