"""The GPU benchmark without a GPU: checks in the interpreter, kernels within their gates."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvtest.gpu_rows import check_kernels, check_tokens

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results" / "kernels" / "compile.json"
OTHERS = STORED.with_name("compile-others.json")


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "benchmarks/gpu", *options],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_of_it_runs_at_tiny_shapes_and_kernels_agree_with_their_references(tmp_path: Path) -> None:
    """Kernels in the interpreter; the code that times, steps, prefills, tabulates and draws, on the CPU."""
    output, tables, plots = tmp_path / "check.json", tmp_path / "tables.md", tmp_path / "plots"
    done = run(
        "--check", "--seed", "1", "--limit-s", "1600", "--output", str(output), "--markdown", str(tables),
        "--plots", str(plots),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    check_kernels(result["kernels"])
    check_tokens(result["tokens"])
    assert all(row["same"] for row in result["tokens"])
    assert {"snapkv", "rocketkv", "compactor"} <= {
        row["method"] for row in result["tokens"] if row.get("kept")
    }
    assert result["smallest_launch_us"] > 0
    models = ("tiny llama", "tiny qwen3", "tiny mistral")
    paths = {(row["model"], row["method"]): row["path"] for row in result["decode"]}
    ways = dict.fromkeys(("full", "full (torch SDPA)", "rocketkv", "rdkv", "snapkv-kivi"), "graph")
    ways |= {"rdkv-hsa": "eager", "d2o": "eager"}
    assert paths == {(model, method): way for model in models for method, way in ways.items()}
    assert all(row["ms_per_token"] > 0 and row["speedup"] > 0 for row in result["decode"])
    assert {(row["model"], row["method"]) for row in result["decode_profiles"]} == set(paths)
    compressing = ("rocketkv", "snapkv", "compactor", "rdkv", "d2o")
    assert {(row["model"], row["method"]) for row in result["prefill"]} == set(
        itertools.product(models, compressing)
    )
    assert all(row["copied_bytes"] > 0 for row in result["prefill"])
    assert not any("skipped" in row for row in (*result["tokens"], *result["decode"], *result["prefill"]))
    assert "| rocketkv |" in tables.read_text()
    drawn = {"kernels.png", "decode-tiny-llama-largest.png", "decode-tiny-qwen3-batch-1.png"}
    assert drawn | {"prefill-overhead.png"} <= set(os.listdir(plots))


@pytest.mark.full
def test_what_there_is_no_time_for_is_listed_as_skipped_and_parts_share_the_time() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks" / "gpu")!r})
import record, runs, timing

class Over:
    left_s = 0.0

kept = record.Record()
runs.Run(kept, timing.HostClock(), Over(), runs.Options(seed=1, is_tiny=True)).run(("decode", "prefill"))
result = kept.fields
assert len(result["decode"]) == 3 * 7 and len(result["prefill"]) == 3 * 5, result
assert all(row["skipped"] == "no time left" for row in result["decode"] + result["prefill"]), result
assert not result["failures"]

class Whole:
    left_s = 100.0

run, left = runs.Run(record.Record(), timing.HostClock(), Whole(), runs.Options(seed=1)), []
run.kernels = run.tokens = lambda leave_s: left.append(round(leave_s))
run.end_to_end = lambda parts, leave_s: left.append((*parts, leave_s))
run.run(["kernels"])
run.run(["tokens", "kernels"])
run.run(["prefill", "decode", "kernels"])
assert left == [0, 25, 0, 47, ("decode", "prefill", 0.0)], left
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_time_limit_ends_what_hangs_and_keeps_what_there_is(tmp_path: Path) -> None:
    """In a process of its own, because it ends that."""
    kept = tmp_path / "kept"
    script = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "benchmarks" / "gpu")!r})
import time_limit
time_limit.GRACE_S = 0.2
time_limit.TimeLimit(0.3, lambda: open({str(kept)!r}, "w").write("so far"))
time.sleep(600)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 1
    assert kept.read_text() == "so far"
    assert "time limit" in done.stderr


def test_it_needs_nothing_that_a_gpu_machine_lacks() -> None:
    """Neither kvferry's installation nor the services' packages."""
    missing = (
        "structlog", "msgspec", "pydantic", "pydantic_settings", "fastapi", "uvicorn", "redis", "zmq",
        "prometheus_client", "opentelemetry", "grpc", "google", "xxhash", "httpx", "orjson",
    )  # fmt: skip
    script = f"""
import importlib.util, runpy, sys
for name in {missing!r}:
    sys.modules[name] = None
sys.path.insert(0, {str(ROOT / "benchmarks" / "gpu")!r})
main = runpy.run_path({str(ROOT / "benchmarks" / "gpu" / "__main__.py")!r}, run_name="benchmark")
importlib.util.find_spec, found = lambda name: None, importlib.util.find_spec
main["_find_package"]()
importlib.util.find_spec = found
import kvferry
assert list(kvferry.__path__) == [{str(ROOT)!r}], kvferry.__path__
import compile_only, plots, report, roofline, runs
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_it_measures_nothing_and_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run()
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "only", "architectures"),
    [
        # every kernel for either architecture, at one shape each: a whole table takes minutes
        pytest.param("Llama-3.1-8B", "", {"sm_90"}, marks=pytest.mark.full),
        pytest.param("D256-G16-fp16", "", {"sm_80"}, marks=pytest.mark.full),
        # two that have spilled where head_dim is no power of two
        ("D96-G7-bf16", "chunk_scores|dense_decode", {"sm_90"}),
        pytest.param("D96-G7-bf16", "chunk_scores|kivi_decode", {"sm_80", "sm_90"}, marks=pytest.mark.full),
        pytest.param("D96-G4-fp16", "dense_decode", {"sm_80", "sm_90"}, marks=pytest.mark.full),
        # one KV head is another binary where a kernel is told how many heads there are
        pytest.param(
            "D128-G4-bf16-H1", "dense_decode|gather|kivi|prologue|place|rotate", {"sm_90"},
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_kernels_compile_for_both_architectures_within_their_gates(
    model: str, only: str, architectures: set[str], tmp_path: Path
) -> None:
    """Compiled afresh at a few of the shapes in the stored table, which has all of both architectures. With
    several heads, as what serves nearly everywhere: Triton makes a number that is 1 a part of the code."""
    output = tmp_path / "compile.json"
    done = run(
        "--compile", "--models", model, "--only", only, "--output", str(output),
        "--architectures", *sorted(architectures), TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fresh = json.loads(output.read_text())["kernels"]
    assert {(row["kernel"], row["arch"]) for row in fresh} == {
        (row["kernel"], row["arch"])
        for row in stored_rows()
        if re.search(only, row["kernel"]) and row["arch"] in architectures
    }
    assert {row["arch"] for row in fresh} == architectures
    heads = {"Llama-3.1-8B": 8, "D128-G4-bf16-H1": 1}.get(model, 2)
    assert {row["num_kv_heads"] for row in fresh} == {heads}


def test_the_stored_table_keeps_to_the_gates_at_the_models_and_at_every_head_dim() -> None:
    rows = stored_rows()
    assert not any(row["breaks"] for row in rows)
    kernels = {(row["kernel"], row["arch"]) for row in rows}
    names = {row["model"] for row in rows}
    for name in names:
        assert {(row["kernel"], row["arch"]) for row in rows if row["model"] == name} == kernels
    assert {"Llama-3.1-8B", "Qwen3-8B", "Mistral-7B"} <= names
    assert {row["head_dim"] for row in rows} == {64, 96, 128, 256}
    assert {1, 4, 16} <= {row["group_size"] for row in rows}
    assert {row["dtype"] for row in rows} == {"torch.bfloat16", "torch.float16"}


def stored_rows(path: Path = STORED) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["kernels"]
    return rows


@pytest.mark.full
def test_two_programs_of_dense_decode_are_on_every_multiprocessor(tmp_path: Path) -> None:
    """An L4's has 100 KiB, of which each program takes 1 beside its own, so tiles are smaller there."""
    output = tmp_path / "compile.json"
    done = run(
        "--compile", "--models", "Llama-3.1-8B", "--only", "dense_decode", "--architectures", "sm_89",
        "--output", str(output), TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fresh = json.loads(output.read_text())["kernels"]
    others = stored_rows(OTHERS)
    # plain, and with what a model's layers may have beside
    assert [row.get("special", "") for row in fresh] == ["", "window, cap", "window, sinks"]
    assert all(row in others for row in fresh)
    sizes = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}
    dense = [row for row in (*others, *stored_rows()) if row["kernel"] == "_dense_decode_kernel"]
    assert {row["arch"] for row in dense} == set(sizes)
    for row in dense:
        assert 2 * (row["shared_bytes"] + 1024) <= sizes[row["arch"]] << 10, row


def test_every_kernel_fits_the_other_architectures() -> None:
    """At Llama's shape and at the largest one."""
    rows = stored_rows(OTHERS)
    assert not any(row["breaks"] for row in rows)
    kernels = {row["kernel"] for row in stored_rows()}
    for arch, name in itertools.product(
        ("sm_86", "sm_89", "sm_100", "sm_120"), ("Llama-3.1-8B", "D256-G16-fp16")
    ):
        found = {row["kernel"] for row in rows if (row["arch"], row["model"]) == (arch, name)}
        assert found == kernels, (arch, name)


@pytest.mark.full
def test_constants_and_launch_options_are_replaced_for_a_measurement(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    changes = ("trizone.work_list:MIN_ITEM_BYTES=512", "trizone.triton_kernel:_trizone_kernel.num_stages=1")
    words = ("--check", "--methods", "rdkv", "--set", changes[0], "--option", changes[1], "--output", output)
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/variants.py", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(output.read_text())["rows"]
    assert row["path"] == "graph"
    assert (row["set"], row["option"]) == ([changes[0]], [changes[1]])
    assert row["us"]


def test_a_shape_that_there_is_not_is_refused() -> None:
    done = run("--compile", "--models", "D100-G3-bf16")
    assert done.returncode != 0
    assert "D100-G3-bf16" in done.stderr
    assert "D64-G1-bf16" in done.stderr
