"""Options of `kvferry calibrate epsilon` and `kvferry calibrate quality`."""

from __future__ import annotations

from pydantic import Field

from kvferry.shared.compression.curves import Measure
from kvferry.shared.process.config import LogLevel, ServiceSettings


class CalibrateConfig(ServiceSettings):
    """Options of both commands."""

    model: str = Field(
        "demo", description="local folder, GGUF file or hub id of the model; demo is the shipped one"
    )
    device: str = Field("auto", description="auto (CUDA where there is one), cpu, cuda, cuda:N")
    dtype: str = Field(
        "auto", description="auto (the model's own on CUDA, float32 on CPU), float32, float16, bfloat16"
    )
    text: str = Field(
        "", description="UTF-8 file to cut prompts from; generated recall conversations if empty"
    )
    data: str = Field(
        "", description="file of questions to measure on, as kvferry eval --data takes them; the last of each"
    )
    length: int = Field(1024, ge=2, description="tokens of each prompt (generated: of the demo tokenizer)")
    samples: int = Field(32, ge=1, description="prompts to measure on")
    threads: int = Field(0, ge=0, description="CPU threads for torch; 0: torch's default")
    log_level: LogLevel = Field("warning", description="debug, info, warning or error")


class CalibrateEpsilonConfig(CalibrateConfig):
    """Options of `kvferry calibrate epsilon`."""

    epsilon_tables: str = Field(
        "epsilon-tables", description="output folder for NAME.json; give it to the services"
    )
    table_name: str = Field("", description="name of the table; the model folder's if empty")


class CalibrateQualityConfig(CalibrateConfig):
    """Options of `kvferry calibrate quality`."""

    methods: str = Field("snapkv,rocketkv,compactor", description="methods to calibrate, or all")
    measure: Measure = Field(
        "agreement",
        description="what quality means: agreement (the share of answers that equal the full KV's), exact "
        "(right answers as a share of the full KV's), nll (likelihood of right answers)",
    )
    retentions: str = Field(
        "0.02,0.05,0.1,0.2,0.35,0.5,0.75", description="retentions to measure, each above 0 and below 1"
    )
    groups: int = Field(
        4, ge=1, description="number of groups of similarly predictable prompts; each group is averaged"
    )
    calibration: str = Field("calibration", description="output folder for the curves; give it to the router")
