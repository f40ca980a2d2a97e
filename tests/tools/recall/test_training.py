"""Training lowers the loss, comes back from a checkpoint to the same state, and reads its recipe strictly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall.batches import BatchSource
from kvferry.tools.recall.conversations import Mixture, draw_batch
from kvferry.tools.recall.gradients import ShardedGradients, Target, draw_target, true_positions
from kvferry.tools.recall.network import NetworkConfig, RecallNetwork, load_folder
from kvferry.tools.recall.optimiser import orthogonalise
from kvferry.tools.recall.recipe import RECIPES, Phase, Recipe, Stage, load_recipe
from kvferry.tools.recall.train import main
from kvferry.tools.recall.trainer import Trainer, load_network

SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64}
EASY = {"question_share": [0.5, 0.7], "fact_share": [0.6, 1.0], "chains": 0.0, "sayings": 0.0}


def stage(name: str, num_tokens: int) -> dict[str, object]:
    phases = [
        {"share": 1, "lengths": [[96, 1]], "mixture": EASY},
        {"share": 1, "lengths": [[96, 1], [128, 1]], "mixture": EASY},
    ]
    return {
        "name": name,
        "seed": 5,
        "num_tokens": num_tokens,
        "tokens_per_step": 768,
        "warmup_steps": 2,
        "phases": phases,
    }


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    stages = [stage("first", 3800), stage("second", 2300)]
    path.write_text(json.dumps({"name": "tiny", "network": SMALL, "stages": stages}))
    return path


def trainer(recipe: Recipe, folder: Path, *, num_shards: int = 1) -> Trainer:
    network = RecallNetwork(recipe.network, generator=torch.Generator().manual_seed(1))
    network.structure_positions()
    return Trainer(
        recipe, network, folder=folder, device=torch.device("cpu"), num_shards=num_shards, log_every_steps=4
    )


def target_of(token_ids: torch.Tensor, is_answer: torch.Tensor, **fields: float) -> Target:
    phase = Phase(share=1, lengths=((64, 1.0),), mixture=Mixture())
    stage = Stage(name="s", seed=0, phases=(phase,), num_tokens=1, **fields)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    return draw_target(token_ids, is_answer, stage=stage, longest=4096, generator=generator)


def test_training_lowers_the_loss_and_writes_its_curve(recipe_path: Path, tmp_path: Path) -> None:
    tiny = json.loads(recipe_path.read_text())
    tiny["stages"] = [stage("first", 9000), stage("second", 6000)]
    recipe_path.write_text(json.dumps(tiny))
    losses: list[float] = []
    run = trainer(load_recipe(recipe_path), tmp_path / "out")
    assert run.run(on_step=lambda _, result: losses.append(result.answer_loss))
    assert sum(losses[:2]) / 2 - sum(losses[-4:]) / 4 > 0.8  # nats a token
    points = [json.loads(line) for line in (tmp_path / "out" / "curve.jsonl").read_text().splitlines()]
    assert {p["stage"] for p in points} == {"first", "second"}
    assert [p["total_tokens"] for p in points] == sorted(p["total_tokens"] for p in points)


@pytest.mark.parametrize("stop_after", [2, 6])
def test_resumed_training_ends_in_the_same_state(recipe_path: Path, tmp_path: Path, stop_after: int) -> None:
    recipe = load_recipe(recipe_path)
    whole = trainer(recipe, tmp_path / "whole")
    whole.run()
    first = trainer(recipe, tmp_path / "parts")
    assert not first.run(max_steps=stop_after)
    second = trainer(recipe, tmp_path / "parts")
    assert second.resume()
    assert second.position == first.position
    assert second.run()
    assert second.position == whole.position
    for ours, theirs in zip(second.network.parameters(), whole.network.parameters(), strict=True):
        assert ours.equal(theirs)


def test_checkpoint_of_another_recipe_is_refused(recipe_path: Path, tmp_path: Path) -> None:
    trainer(load_recipe(recipe_path), tmp_path / "out").run(max_steps=1)
    recipe_path.write_text(recipe_path.read_text().replace('"tiny"', '"other"'))
    with pytest.raises(ConfigurationError, match="belongs to recipe 'tiny', not 'other'"):
        trainer(load_recipe(recipe_path), tmp_path / "out").resume()


def test_command_trains_resumes_and_exports(recipe_path: Path, tmp_path: Path) -> None:
    arguments = ["--recipe", str(recipe_path), "--out", str(tmp_path / "out"), "--threads", "1"]
    assert main(arguments) == 0
    exported = load_folder(tmp_path / "out" / "model")
    trained = load_network(tmp_path / "out" / "checkpoint.pt")
    for ours, theirs in zip(exported.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.half().float())
    assert main(arguments) == 0  # nothing is left to train
    assert main([*arguments, "--from-stage", "third"]) == 2


def test_weights_between_the_first_and_the_trained_ones_are_exported(
    recipe_path: Path, tmp_path: Path
) -> None:
    first = ["--recipe", str(recipe_path), "--device", "cpu", "--threads", "1"]
    assert main([*first, "--out", str(tmp_path / "first")]) == 0
    start = tmp_path / "first" / "model"
    again = [*first, "--init", str(start), "--out", str(tmp_path / "again")]
    assert main([*again, "--average-init", "0.25"]) == 0
    trained = load_network(tmp_path / "again" / "checkpoint.pt").state_dict()
    begun = load_network(start).state_dict()
    exported = load_network(tmp_path / "again" / "model").state_dict()
    assert any((trained[name] - begun[name]).abs().max() > 1e-2 for name in begun)
    for name, tensor in exported.items():
        expected = 0.75 * trained[name] + 0.25 * begun[name]
        torch.testing.assert_close(tensor, expected, atol=2e-3, rtol=1e-3)
    assert main([*first, "--out", str(tmp_path / "alone"), "--average-init", "0.25"]) == 2
    assert main([*again, "--average-init", "1.5"]) == 2


def test_training_goes_on_in_a_deeper_network(recipe_path: Path, tmp_path: Path) -> None:
    first = ["--device", "cpu", "--threads", "1"]
    assert main([*first, "--recipe", str(recipe_path), "--out", str(tmp_path / "first")]) == 0
    deeper = {"name": "deeper", "network": SMALL | {"num_layers": 3}, "stages": [stage("first", 6000)]}
    (tmp_path / "deeper.json").write_text(json.dumps(deeper))
    start = tmp_path / "first" / "model"
    again = [*first, "--recipe", str(tmp_path / "deeper.json"), "--init", str(start)]
    assert main([*again, "--out", str(tmp_path / "again"), "--average-init", "0.5"]) == 0
    trained = load_network(tmp_path / "again" / "checkpoint.pt")
    exported = load_network(tmp_path / "again" / "model")
    output = "layers.1.self_attn.o_proj.weight"  # the new layer's, which began as zero
    assert trained.state_dict()[output].abs().max() > 3e-3
    torch.testing.assert_close(
        exported.state_dict()[output], 0.5 * trained.state_dict()[output], atol=1e-5, rtol=1e-3
    )
    tokens = load_network(start).embed_tokens.weight
    half = 0.5 * (trained.embed_tokens.weight + tokens)
    torch.testing.assert_close(exported.embed_tokens.weight, half, atol=2e-3, rtol=1e-3)
    back = ["--recipe", str(recipe_path), "--init", str(tmp_path / "again" / "model")]
    assert main([*first, *back, "--out", str(tmp_path / "back")]) == 2  # two layers from three


def test_shards_give_the_gradients_of_the_whole() -> None:
    network = RecallNetwork(NetworkConfig(**SMALL), generator=torch.Generator().manual_seed(1))
    token_ids, is_answer = draw_batch("0", 5, 120, Mixture())
    target = target_of(token_ids, is_answer, lm_fraction=0.2, stretched=0.5)
    gradients, results = [], []
    for num_shards in (1, 3):
        results.append(ShardedGradients(network, num_shards=num_shards).backward(target, lm_weight=0.2))
        gradients.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert results[0].answer_loss == pytest.approx(results[1].answer_loss, rel=1e-3)
    assert results[0].answer_accuracy == results[1].answer_accuracy
    for whole, sharded in zip(*gradients, strict=True):
        # bf16 activations: sums are taken in another order.
        assert (whole - sharded).norm() <= 0.02 * whole.norm() + 1e-6


def test_losses_look_at_answers_and_at_some_other_tokens_but_never_at_padding() -> None:
    token_ids, is_answer = draw_batch("0", 3, 90, Mixture())
    token_ids[0, 60:], is_answer[0, 60:] = 0, False
    target = target_of(token_ids, is_answer, lm_fraction=0.5)
    assert not (target.answer & target.lm).any()
    assert not target.lm[0, 59:].any()
    assert target.wanted.equal(token_ids[:, 1:])
    assert 0.3 < target.lm[1:].float().mean() < 0.6
    assert target.position_ids.equal(torch.arange(90).expand(3, 90))  # no stage stretches unless it says so


def test_true_positions_lists_every_true_entry() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    positions, valid = true_positions(mask)
    assert positions.shape == (3, 3)
    assert [p[v].tolist() for p, v in zip(positions, valid, strict=True)] == [[0, 2, 3], [3], []]


@pytest.mark.parametrize("shape", [(3, 40, 20), (1, 16, 64), (2, 7, 7)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_learning_rate_warms_up_stays_and_decays() -> None:
    mixture = Mixture()
    phase = Phase(share=1, lengths=((64, 1.0),), mixture=mixture)
    s = Stage(
        name="s", seed=0, phases=(phase,), num_tokens=100, warmup_steps=10, decay_from=0.5, final_lr=0.1
    )
    assert s.lr_scale(0, 0.0) == pytest.approx(0.1)
    assert s.lr_scale(50, 0.4) == 1.0
    assert s.lr_scale(50, 0.75) == pytest.approx(0.55)
    assert s.lr_scale(99, 1.0) == pytest.approx(0.1)


def test_stage_ends_at_whichever_budget_is_spent_first() -> None:
    phase = Phase(share=1, lengths=((64, 1.0),), mixture=Mixture())
    s = Stage(name="s", seed=0, phases=(phase,), num_tokens=1000, minutes=2.0)
    assert s.progress(250, 0.0) == 0.25
    assert s.progress(250, 60.0) == 0.5
    assert s.progress(1000, 60.0) == 1.0


def test_worker_processes_draw_the_same_batches(recipe_path: Path) -> None:
    first_stage = load_recipe(recipe_path).stages[0]
    drawn = []
    for num_workers in (0, 1):
        with BatchSource(first_stage, step=2, num_tokens=1536, num_workers=num_workers) as source:
            drawn.append([source.next(0.0) for _ in range(3)])
    for (plan, ids, marks), (other_plan, other_ids, other_marks) in zip(*drawn, strict=True):
        assert plan == other_plan
        assert ids.equal(other_ids)
        assert marks.equal(other_marks)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 1}, "budget"),
        ({"num_tokens": 0}, "no budget"),
        ({"phases": []}, "no phases"),
        ({"stretched": 1.5}, "stretched of stage 's' is 1.5; allowed is 0 to 1"),
        ({"phases": [{"share": 0, "lengths": [[8, 1]]}]}, "share > 0"),
        ({"phases": [{"share": 1, "lengths": [[8, 1]], "mixture": {"hard": 2.0}}]}, "hard is 2.0"),
    ],
)
def test_bad_recipes_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"name": "bad", "stages": [{**stage("s", 10), **change}]}))
    with pytest.raises(ConfigurationError, match=message):
        load_recipe(path)
