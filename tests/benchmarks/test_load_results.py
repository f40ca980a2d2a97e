"""The committed results of loads of many requests say what their readmes say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def peers(name: str) -> dict[tuple[int, int], dict[str, float]]:
    """Output tokens a second by server, of each cell."""
    cells = json.loads((RESULTS / "peers" / name).read_text())["cells"]
    return {
        (cell["prompt_tokens"], cell["concurrency"]): {
            server: median["output_tokens_per_s"] for server, median in cell["median"].items()
        }
        for cell in cells
    }


CELLS, LONG = peers("all.json"), peers("long-prompts.json")


def test_every_cell_was_measured_beside_both_peers():
    assert set(CELLS) == {(prompt, number) for prompt in (128, 1024, 4096) for number in (1, 8, 16)}
    servers = {"vllm", "transformers", "full", "in_process", "default"}
    assert all(servers <= set(cell) for cell in CELLS.values())


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_full_is_at_least_as_fast_as_either_peer(cell):
    assert CELLS[cell]["full"] >= max(CELLS[cell]["vllm"], CELLS[cell]["transformers"])


@pytest.mark.parametrize("number", [1, 8, 16])
def test_the_default_method_is_half_as_fast_again_with_long_prompts(number):
    assert LONG[4096, number]["default"] >= 1.5 * LONG[4096, number]["vllm"]
    assert LONG[4096, number]["full"] >= LONG[4096, number]["vllm"]


def test_processes_apart_cost_little():
    result = json.loads((RESULTS / "disaggregation" / "demo.json").read_text())
    for cell in result["cells"]:
        name = f"{cell['prompt_tokens']} x {cell['concurrency']}"
        if cell["concurrency"] > 1:
            assert cell["throughput_apart_over_one_process"] >= 0.95, name
        else:  # the readme says why a lone stream loses more
            assert cell["throughput_apart_over_one_process"] >= 0.9, name
            assert cell["first_token_ms_more_apart"] <= 5, name


def test_short_prompts_do_not_wait_for_long_ones():
    result = json.loads((RESULTS / "mixed-load" / "demo.json").read_text())
    assert result["commits"]["before"].startswith("b4f2d34")
    numbers = {name.removeprefix("numbers/"): number for name, number in result["numbers"].items()}
    assert numbers["open_loop/short/p95_s"]["after_over_before"] <= 1 / 5
    assert numbers["beside/short_s"]["after"] <= 3 * numbers["alone/short_s"]["after"]
    assert numbers["crowd/prompt_tokens_per_s"]["after_over_before"] >= 0.95


def test_a_crowd_of_streams_is_served_whole():
    result = json.loads((RESULTS / "concurrent-streams" / "demo.json").read_text())
    figures = result["figures"]
    assert (result["streams"], result["processors"], result["longest"]) == (256, 2, 2048)
    assert figures["errors"] == figures["other_than_the_oracle"] == []
    assert figures["answer_tokens"]["least"] <= 16
    assert figures["samples_with_a_waiting_request"]
    assert figures["arena_used_while_a_request_waits"]["mean"] >= 0.85
