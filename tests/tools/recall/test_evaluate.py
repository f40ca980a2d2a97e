"""Evaluation judges whole answers, and the shipped model finds its needle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.tools.recall.evaluate import Cell, evaluate_cell, main, markdown_table, num_correct
from kvferry.tools.recall.network import RecallNetwork, load_folder
from kvferry.tools.recall.tasks import TASKS
from kvferry.tools.recall.vocabulary import decode


@pytest.fixture(scope="module")
def shipped(demo_model_dir: Path) -> RecallNetwork:
    return load_folder(demo_model_dir)


def test_shipped_model_finds_a_needle_in_512_tokens(shipped: RecallNetwork) -> None:
    cell = evaluate_cell(shipped, TASKS["single_needle"], num_tokens=512, num_examples=24)
    assert cell.accuracy >= 0.9


@torch.no_grad()
def test_teacher_forced_match_equals_greedy_decoding(demo_model_dir: Path, shipped: RecallNetwork) -> None:
    """Token by token through transformers: right answers are the same ones."""
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    for seed in range(6):
        example = TASKS["multi_key_dense"].example(num_tokens=256, seed=seed)
        prompt = torch.tensor([example.prompt_token_ids])
        wanted = example.answer_token_ids
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(wanted), do_sample=False
        )
        greedy = out[0, prompt.shape[1] :].tolist()
        assert num_correct(shipped, [example], dtype=torch.float32) == (greedy == wanted)


def test_batches_of_unequal_prompts_count_as_single_ones(shipped: RecallNetwork) -> None:
    examples = [TASKS["multi_key_8"].example(num_tokens=300 + 20 * s, seed=s) for s in range(6)]
    one_by_one = sum(num_correct(shipped, [e], dtype=torch.float32) for e in examples)
    assert num_correct(shipped, examples, dtype=torch.float32) == one_by_one


@torch.no_grad()
@pytest.mark.parametrize("task", ["single_needle", "third_turn"])
def test_a_gap_moves_the_last_question_and_nothing_before_it(demo_model_dir: Path, task: str) -> None:
    """As transformers decodes when told those positions; no further than the model's context."""
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    network = load_folder(demo_model_dir)
    for seed in range(4):
        example = TASKS[task].example(num_tokens=300, seed=seed)
        prompt, answer = example.prompt_token_ids, example.answer_token_ids
        asked = example.messages[-1]["content"].rsplit(" . ", 1)[-1]
        first = len(prompt) - 2 - len(asked.split())
        assert decode(prompt[first:]) == f"{asked} <|end|> <|assistant|>"
        token_ids = torch.tensor([[*prompt, *answer[:-1]]])
        position_ids = torch.arange(token_ids.shape[1])[None]
        position_ids[:, first:] += 3000
        logits = model(token_ids, position_ids=position_ids).logits[0, len(prompt) - 1 :]
        right = logits.argmax(-1).tolist() == answer
        assert num_correct(network, [example], dtype=torch.float32, gap=3000) == right


def test_seeds_are_counted_from_the_first(shipped: RecallNetwork) -> None:
    def correct(first_seed: int, num_examples: int) -> int:
        cell = evaluate_cell(
            shipped,
            TASKS["multi_value_plain"],
            num_tokens=256,
            num_examples=num_examples,
            first_seed=first_seed,
        )
        return cell.num_correct

    single = [correct(seed, 1) for seed in range(40, 52)]
    assert 0 < sum(single) < len(single)
    assert correct(40, 12) == sum(single)
    assert correct(45, 7) == sum(single[5:])


def test_half_width_follows_wilson() -> None:
    cell = Cell(task="unknown", num_tokens=512, held_out=False, num_examples=200, num_correct=100)
    assert cell.half_width == pytest.approx(0.0686, abs=1e-3)
    sure = Cell(task="unknown", num_tokens=512, held_out=False, num_examples=200, num_correct=200)
    assert 0 < sure.half_width < 0.02


def test_table_leaves_missing_cells_empty() -> None:
    cells = [
        Cell(task="single_needle", num_tokens=512, held_out=False, num_examples=4, num_correct=4),
        Cell(task="unknown", num_tokens=1024, held_out=False, num_examples=4, num_correct=1),
    ]
    lines = markdown_table(cells).splitlines()
    assert lines[0] == "| task | 512 | 1024 |"
    assert lines[2].startswith("| single needle | 100.0 ±")
    assert lines[2].endswith("|  |")
    assert lines[3].startswith("| document does not say |  | 25.0 ±")


def test_command_writes_json_and_table(demo_model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", str(demo_model_dir), "--tasks", "single_needle", "--cells", "256:2"]
    assert main([*arguments, "--threads", "1", "--first-seed", "7", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (cell,) = result["cells"]
    assert result["first_seed"] == 7
    assert (cell["task"], cell["num_tokens"], cell["num_examples"]) == ("single_needle", 256, 2)
    assert out.with_suffix(".md").read_text().startswith("| task | 256 |")
    assert torch.tensor(1e-40) * 1 > 0, "the command has left its way with denormal numbers behind"


@pytest.mark.parametrize(
    "change",
    [
        ["--tasks", "juggling"],
        ["--cells", "512"],
        ["--cells", "512:0"],
        ["--gap", "-1"],
        ["--first-seed", "-1"],
    ],
)
def test_bad_arguments_end_the_command(demo_model_dir: Path, tmp_path: Path, change: list[str]) -> None:
    arguments = ["--model", str(demo_model_dir), "--out", str(tmp_path / "r.json"), *change]
    assert main(arguments) == 2
    assert not list(tmp_path.iterdir())
