"""Options of `kvferry eval`, as text; `experiment.py` parses the lists."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvferry.shared.process.config import LogLevel, PlanSettings

DEFAULT_TASKS = "single_needle,multi_key_8"


class EvalConfig(PlanSettings):
    """Each list is comma-separated."""

    model: str = Field(
        "demo",
        description="local folder, GGUF file or hub id of the model, or a checkpoint.pt of kvferry "
        "train-demo; demo is the shipped one",
    )
    device: str = Field("auto", description="auto (CUDA where there is one), cpu, cuda, cuda:N")
    dtype: str = Field(
        "auto", description="auto (the model's own on CUDA, float32 on CPU), float32, float16, bfloat16"
    )
    methods: str = Field(
        "full,snapkv,rocketkv",
        description="methods to compare, or all; NAME:PARAMETER=VALUE changes a parameter "
        "(snapkv:window=16), with + for a comma (rdkv:widths=0+4+8)",
    )
    budgets: str = Field(
        "50%,25%,10%,5%",
        description="of the full KV: 10% or 0.1, tokens (256t), or bytes (64KiB, 65536B); own: each method's "
        "own (--match given)",
    )
    match: Literal["kept", "read", "given"] = Field(
        "kept",
        description="kept: compare at equal retained bytes; read: at equal bytes read per decode step; "
        "given: give each method the budget unchanged",
    )
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="dtype in which the bytes of K and V rows are counted; auto is the checkpoint's own, "
        "whatever --dtype is",
    )
    tasks: str = Field(DEFAULT_TASKS, description="tasks, or all; of --data all by default")
    data: str = Field(
        "",
        description="questions in place of the generated ones: a file with a JSON object on each line, of "
        "context, question and answers (a list of right ones), or a record of RULER, LongBench or SCBench; "
        "or a folder of documents and questions, such as benchmarks/real, which is cut to --lengths",
    )
    batch: int = Field(1, ge=1, description="prompts that are answered together")
    lengths: str = Field(
        "1024",
        description="prompt lengths in the demo tokenizer's tokens; LENGTH:EXAMPLES gives a length its "
        "own number of examples (512:200,4096:50)",
    )
    depths: str = Field(
        "", description="position of the statements in the document, 0 to 1; scattered if empty"
    )
    settings: str = Field(
        "aware",
        description="aware (every turn selects with its question), once (the first turn selects, later "
        "turns are appended), agnostic (the document is compressed before any question)",
    )
    answers: Literal["right", "own"] = Field(
        "right",
        description="earlier turns of a conversation contain the right answers, or each contender's own",
    )
    first_token: Literal["prefill", "refed"] = Field(
        "prefill",
        description="the answer's first token comes from prefill's logits, as served, or from the last "
        "prompt token fed again to the compressed cache, as papers do",
    )
    examples: int = Field(
        20, ge=1, description="examples per cell; of a folder all, or those of LENGTH:EXAMPLES"
    )
    first_seed: int = Field(0, ge=0, description="seed of the first example; training never uses these")
    held_out: bool = Field(False, description="entities and wordings that training never asks about")
    gap: int = Field(
        0,
        ge=0,
        description="positions skipped before the last question, which then stands further from the document "
        "in a prompt of the same length; with --methods full only",
    )
    max_new_tokens: int = Field(20, ge=1, description="longest answer in tokens")
    max_loss: float = Field(
        1.0,
        ge=0,
        le=100,
        description="the report recommends the cheapest method and budget that lose at most this many "
        "percentage points of right answers against the full KV",
    )
    jobs: int = Field(1, ge=1, description="processes")
    threads: int = Field(
        0, ge=0, description="CPU threads per process; 0 divides the processors among the processes"
    )
    out: str = Field("eval-results", description="folder of the results; an interrupted run is resumed")
    fresh: bool = Field(False, description="measure again what the folder already contains")
    plots: bool = Field(False, description="also draw plots; needs matplotlib (kvferry[eval])")
    log_level: LogLevel = Field("warning", description="debug, info, warning or error")


HIDDEN_OPTIONS = ("log_format", "ready_file")
