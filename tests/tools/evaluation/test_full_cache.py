"""The full cache's accuracy: whole answers are judged, and the shipped model finds its needle."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.services.launcher import cli
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.distance import DistantModel
from kvferry.tools.evaluation.experiment import FULL, read_experiment
from kvferry.tools.evaluation.runner import UnitRunner
from kvferry.tools.evaluation.summary import Cell, Scores, wilson_half_width
from kvferry.tools.evaluation.table import markdown, tasks_by_length
from kvferry.tools.recall.network import load_folder
from kvferry.tools.recall.tasks import TASKS
from kvferry.tools.recall.vocabulary import decode


def exact(model: TransformersModel, tokenizer: ChatTokenizer, **options: object) -> list[bool]:
    """Of each example in turn, whether the full cache's whole last answer is right."""
    wanted = read_experiment(EvalConfig(methods=FULL, **options))
    runner = UnitRunner(model, tokenizer, wanted)
    (contender,) = wanted.contenders
    records = [runner.run([(unit, (("aware", contender),))])[0] for unit in wanted.units()]
    return [record.turns[-1].exact for record in records]


def test_shipped_model_finds_a_needle_in_512_tokens(
    model: TransformersModel, tokenizer: ChatTokenizer
) -> None:
    found = exact(model, tokenizer, tasks="single_needle", lengths="512", examples=24)
    assert sum(found) >= 0.9 * len(found)


@torch.no_grad()
def test_a_right_answer_is_what_transformers_decodes_greedily(
    demo_model_dir: Path, model: TransformersModel, tokenizer: ChatTokenizer
) -> None:
    """Token by token through transformers: right answers are the same ones."""
    reference = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    greedy = []
    for seed in range(6):
        example = TASKS["multi_key_dense"].example(num_tokens=256, seed=seed)
        prompt = torch.tensor([example.prompt_token_ids])
        wanted = example.answer_token_ids
        out = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(wanted), do_sample=False
        )
        greedy.append(out[0, prompt.shape[1] :].tolist() == wanted)
    assert exact(model, tokenizer, tasks="multi_key_dense", lengths="256", examples=6) == greedy


@torch.no_grad()
@pytest.mark.parametrize("task", ["single_needle", "third_turn"])
def test_a_gap_moves_the_last_question_and_nothing_before_it(
    demo_model_dir: Path, model: TransformersModel, tokenizer: ChatTokenizer, task: str
) -> None:
    """As transformers decodes when told those positions; no further than the model's context."""
    reference = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    right = []
    for seed in range(4):
        example = TASKS[task].example(num_tokens=300, seed=seed)
        prompt, answer = example.prompt_token_ids, example.answer_token_ids
        asked = example.messages[-1]["content"].rsplit(" . ", 1)[-1]
        first = len(prompt) - 2 - len(asked.split())
        assert decode(prompt[first:]) == f"{asked} <|end|> <|assistant|>"
        token_ids = torch.tensor([[*prompt, *answer[:-1]]])
        position_ids = torch.arange(token_ids.shape[1])[None]
        position_ids[:, first:] += 3000
        logits = reference(token_ids, position_ids=position_ids).logits[0, len(prompt) - 1 :]
        right.append(logits.argmax(-1).tolist() == answer)
    assert exact(model, tokenizer, tasks=task, lengths="300", examples=4, gap=3000) == right


def test_a_gap_moves_logits_as_the_training_network_has_them(
    demo_model_dir: Path, model: TransformersModel, tokenizer: ChatTokenizer
) -> None:
    example = TASKS["single_needle"].example(num_tokens=256, seed=3)
    prompt = torch.tensor(example.prompt_token_ids)
    first = len(prompt) - 10
    positions = torch.arange(len(prompt))
    positions[first:] += 2000
    network = load_folder(demo_model_dir)
    with torch.no_grad():
        last = torch.tensor([[len(prompt) - 1]])
        hidden = network.hidden(prompt[None], last, position_ids=positions[None])[0, -1]
        wanted = hidden @ network.embed_tokens.weight.T
    distant = DistantModel(model)
    distant.skip_positions(first, 2000)

    class Nothing:
        def history(self, layer: int) -> None:
            return None

        def layer_done(self, *arguments: object) -> None:
            pass

    torch.testing.assert_close(
        distant.prefill(prompt, start=0, observer=Nothing()), wanted, atol=2e-3, rtol=1e-3
    )


def test_seeds_are_counted_from_the_first(model: TransformersModel, tokenizer: ChatTokenizer) -> None:
    def correct(first_seed: int, examples: int) -> list[bool]:
        return exact(
            model,
            tokenizer,
            tasks="multi_value_plain",
            lengths="256",
            examples=examples,
            first_seed=first_seed,
        )

    single = [correct(seed, 1)[0] for seed in range(40, 52)]
    assert 0 < sum(single) < len(single)
    assert correct(40, 12) == single
    assert correct(45, 7) == single[5:]


def test_lengths_may_have_numbers_of_examples_of_their_own() -> None:
    wanted = read_experiment(EvalConfig(tasks="single_needle", lengths="256:3,512", examples=1, first_seed=5))
    units = [(unit.num_tokens, unit.seed) for unit in wanted.units()]
    assert units == [(256, 5), (512, 5), (256, 6), (256, 7)]


def test_half_width_follows_wilson() -> None:
    assert wilson_half_width(0.5, 200) == pytest.approx(0.0686, abs=1e-3)
    assert 0 < wilson_half_width(1.0, 200) < 0.02


def test_table_leaves_missing_cells_empty() -> None:
    measured = {
        ("single_needle", 512): (1.0, wilson_half_width(1.0, 4)),
        ("unknown", 1024): (0.25, wilson_half_width(0.25, 4)),
    }
    lines = tasks_by_length(measured).splitlines()
    assert lines[0] == "| task | 512 | 1024 |"
    assert lines[2].startswith("| single needle | 100.0 ±")
    assert lines[2].endswith("|  |")
    assert lines[3].startswith("| document does not say |  | 25.0 ±")


def test_the_full_cache_has_a_table_by_task_and_length() -> None:
    scores = Scores(
        accuracy=1.0, half_width=0.2, contained=1.0, nll=0.0, agreement=1.0, accuracy_by_turn=(1.0,),
        kept_bytes=1.0, kept_share=1.0, read_bytes=1.0, read_share=1.0,
    )  # fmt: skip
    cells = [
        Cell(
            task="single_needle", num_tokens=num_tokens, depth=None, setting="aware", method=method,
            budget="100%", num_examples=4, scores=scores,
        )
        for num_tokens in (512, 1024)
        for method in (FULL, "snapkv")
    ]  # fmt: skip
    text = markdown(cells, title="title", notes=[])
    table = tasks_by_length({("single_needle", num_tokens): (1.0, 0.2) for num_tokens in (512, 1024)})
    assert text.endswith(f"\n## Full KV: accuracy by length\n\n{table}\n")
    assert "by length" not in markdown(cells[1::2], title="title", notes=[])


def test_a_training_checkpoint_is_judged_as_the_model_exported_from_it(
    demo_model_dir: Path, model: TransformersModel, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    network = load_folder(demo_model_dir)
    checkpoint = tmp_path / "checkpoint.pt"
    torch.save({"network_config": asdict(network.config), "network": network.state_dict()}, checkpoint)
    arguments = ["--methods", "full", "--tasks", "multi_value_plain", "--lengths", "256:6", "--threads", "1"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["eval", "--model", str(checkpoint), *arguments, "--out", str(tmp_path / "out")])
    assert caught.value.code == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    (cell,) = result["cells"]
    found = exact(model, tokenizer, tasks="multi_value_plain", lengths="256:6")
    assert cell["scores"]["accuracy"] == pytest.approx(sum(found) / 6)
    assert (result["model"], result["examples"], result["gap"]) == ("checkpoint.pt", {"256": 6}, 0)
    assert "| task | 256 |" in (tmp_path / "out" / "results.md").read_text()


def test_a_gguf_file_is_a_model_and_no_training_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(SystemExit) as caught:
        cli.main(["eval", "--model", str(tmp_path / "broken.gguf"), "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "broken.gguf' is no whole GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--tasks", "juggling"), "--tasks has 'juggling'"),
        (("--lengths", "512:x"), "LENGTH:EXAMPLES needs at least one example"),
        (("--lengths", "512:0"), "LENGTH:EXAMPLES needs at least one example"),
        (("--gap", "-1"), "greater than or equal to 0"),
        (("--first-seed", "-1"), "greater than or equal to 0"),
        (("--gap", "100", "--methods", "full,snapkv"), "it takes --methods full, not full,snapkv"),
        (("--gap", "8000"), "whose window is 8192"),
    ],
)
def test_bad_arguments_end_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, ...], message: str
) -> None:
    arguments = ["eval", "--methods", "full", "--examples", "1", "--out", str(tmp_path / "out"), *change]
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out" / "results.json").exists()
