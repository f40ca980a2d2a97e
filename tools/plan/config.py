"""Options of `kvferry plan` and `kvferry calibrate machine`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvferry.shared.process.config import PlanSettings, Settings
from kvferry.shared.process.options import COMPRESSION, JSON, MODEL, Seconds, group

HARDWARE = group("Hardware")
LOAD = group("Load")
RESULTS = group("Results")


class PlanConfig(PlanSettings):
    """Options of `kvferry plan`."""

    model: Annotated[str, MODEL] = Field(
        "demo", description="folder with a config.json, GGUF file, hub id, or demo; no weights are loaded"
    )
    plan_dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], MODEL] = Field(
        "auto",
        description="dtype of weights, K and V; auto is the checkpoint's own, or that of a measured machine",
    )
    machine: Annotated[str, HARDWARE] = Field(
        "H100-SXM",
        description="machine of a worker: a GPU of the table, or a file of kvferry calibrate machine",
    )
    link_gbits: Annotated[float, HARDWARE] = Field(
        100.0, gt=0, description="speed of the link between prefill and decode, Gbit/s"
    )
    link_latency_s: Annotated[Seconds, HARDWARE] = Field(0.0002, ge=0, description="latency of that link")
    max_batch_size: Annotated[int, HARDWARE] = Field(
        32, ge=1, description="sequences that decode together in one step"
    )
    prompt_tokens: Annotated[int, LOAD] = Field(8192, ge=1, description="tokens of a prompt")
    answer_tokens: Annotated[int, LOAD] = Field(256, ge=1, description="tokens of an answer")
    rate: Annotated[float, LOAD] = Field(1.0, gt=0, description="requests that come in a second on average")
    first_token_bound_s: Annotated[Seconds, LOAD] = Field(
        0.0, ge=0, description="mean time to the first token that is wanted; 0: no bound"
    )
    per_token_bound_s: Annotated[Seconds, LOAD] = Field(
        0.0, ge=0, description="mean time per further token that is wanted; 0: no bound"
    )
    methods: Annotated[str, COMPRESSION] = Field(
        "full,snapkv,rocketkv,compactor-kivi,rdkv", description="methods to compare, or all"
    )
    max_loss: Annotated[float, COMPRESSION] = Field(
        1.0,
        ge=0,
        le=100,
        description="percentage points of answers that may differ from the full KV's; decides the retention, "
        "by quality curves (kvferry calibrate) of the model or of one of its family. Without them a method "
        "has its own budget, and a stated --max-loss is refused",
    )
    curves_of: Annotated[str, COMPRESSION] = Field(
        "",
        description="model by whose quality curves --max-loss decides, though they may be far off for this "
        "one: demo, or a name of kvferry calibrate's files",
    )
    json_output: Annotated[bool, RESULTS, JSON] = Field(
        False, description="print JSON in place of the tables"
    )


class CalibrateMachineConfig(Settings):
    """Options of `kvferry calibrate machine`."""

    model: Annotated[str, MODEL] = Field(
        "demo", description="local folder, GGUF file or hub id of the model; demo is the shipped one"
    )
    device: Annotated[str, MODEL] = Field(
        "auto", description="auto (CUDA where there is one), cpu, cuda, cuda:N"
    )
    methods: Annotated[str, COMPRESSION] = Field(
        "full,snapkv,rocketkv,rdkv", description="methods to measure; full is always among them"
    )
    lengths: Annotated[str, LOAD] = Field(
        "256,1024,4096", description="prompt lengths to measure, at least three, within the model's context"
    )
    rounds: Annotated[int, LOAD] = Field(
        2, ge=1, description="how often everything is measured; medians count"
    )
    check: Annotated[bool, RESULTS] = Field(
        False, description="also measure 20 other settings, and write how far the predictions are off"
    )
    machine_name: Annotated[str, RESULTS] = Field("this-machine", description="name of the machine in plans")
    machine_file: Annotated[str, RESULTS] = Field(
        "machine.json", description="file to write; give it to kvferry plan as --machine"
    )


PLAN_HIDDEN = ("log_format", "log_level", "ready_file")
"""Settings that are no options of `kvferry plan`."""
