"""Options of `kvferry calibrate`."""

from __future__ import annotations

from pydantic import Field

from kvferry.shared.compression.curves import Measure
from kvferry.shared.process.config import LogLevel, ServiceSettings


class CalibrateConfig(ServiceSettings):
    """Options of `kvferry calibrate`."""

    model: str = Field(
        "demo", description="local folder, GGUF file or hub id of the model; demo is the shipped one"
    )
    device: str = Field("auto", description="auto (CUDA where there is one), cpu, cuda, cuda:N")
    dtype: str = Field(
        "auto", description="auto (the model's own on CUDA, float32 on CPU), float32, float16, bfloat16"
    )
    threads: int = Field(0, ge=0, description="CPU threads for torch; 0: torch's default")
    text: str = Field(
        "",
        description="UTF-8 file to cut prompts from; empty: documents that are included, for the demo model "
        "generated conversations",
    )
    data: str = Field(
        "", description="file of questions to measure on, as kvferry eval --data takes them; the last of each"
    )
    length: int = Field(1024, ge=2, description="tokens of each prompt (generated: of the demo tokenizer)")
    samples: int = Field(24, ge=1, description="prompts to measure on")
    methods: str = Field(
        "snapkv,rocketkv,compactor-kivi,rdkv", description="methods to calibrate, comma-separated, or all"
    )
    measure: Measure = Field(
        "agreement",
        description="what quality means: agreement (the share of answers that equal the full KV's), exact "
        "(right answers as a share of the full KV's), nll (likelihood of right answers)",
    )
    retentions: str = Field(
        "0.02,0.05,0.1,0.2,0.35,0.5,0.75", description="retentions to measure, each above 0 and below 1"
    )
    calibration: str = Field(
        "", description="folder to write to; empty: ~/.cache/kvferry/calibration, where services look"
    )
    log_level: LogLevel = Field("warning", description="debug, info, warning or error")
