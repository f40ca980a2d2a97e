"""`kvferry train-demo`: train the demo model from a recipe and write its transformers folder."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from kvferry.shared.errors import ConfigurationError, KvferryError
from kvferry.tools.recall.conversations import Mixture, draw_batch
from kvferry.tools.recall.denormals import flushed_denormals
from kvferry.tools.recall.gradients import StepResult
from kvferry.tools.recall.network import RecallNetwork, save_folder
from kvferry.tools.recall.recipe import RECIPES, Recipe, load_recipe
from kvferry.tools.recall.tokenizer import save_tokenizer
from kvferry.tools.recall.trainer import Trainer, load_network
from kvferry.tools.recall.vocabulary import PAD_ID

_log = structlog.get_logger(__name__)

_SAME_DIRECTION = 0.6
"""Cosine to the pad token's embedding from which on a word counts as unused."""
_NUM_GROWTH_ROWS = 32
"""Rows that a network sees before it grows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(sorted(p.stem for p in RECIPES.glob("*.json")))
    parser.add_argument("--recipe", default="cpu", help=f"one of {names}, or a JSON file (default: cpu)")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, curve and model/")
    parser.add_argument(
        "--init",
        type=Path,
        help="exported folder or checkpoint.pt to start from, instead of random weights; if the recipe has "
        "more layers, new layers that do not change the output yet are inserted after the first",
    )
    parser.add_argument(
        "--renew-unused-words",
        action="store_true",
        help="with --init: draw new embeddings for words that earlier training never saw",
    )
    parser.add_argument(
        "--average-init",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="with --init: export the average of its weights, with this share from 0 to 1, and the trained",
    )
    parser.add_argument("--from-stage", help="name of the first stage to run (default: the recipe's first)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--workers", type=int, default=-1, help="processes that draw data (default: 8 on cuda)"
    )
    parser.add_argument("--checkpoint-every-s", type=float, default=60.0, help="seconds (default: 60)")
    parser.add_argument("--restart", action="store_true", help="ignore the folder's checkpoint")


def run(args: argparse.Namespace) -> int:
    """Train, or resume training, and export; returns the process's exit code."""
    if not 0 <= args.average_init <= 1:
        raise ConfigurationError(f"--average-init is {args.average_init}; allowed is 0 to 1")
    if args.average_init and args.init is None:
        raise ConfigurationError("--average-init needs --init, the folder whose weights are averaged in")
    recipe = load_recipe(_recipe_path(args.recipe))
    device = torch.device(_device_name(args.device))
    num_threads = args.threads or torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    network = _initial_network(recipe, args.init, renew=args.renew_unused_words)
    initial = copy.deepcopy(network) if args.average_init else None
    trainer = Trainer(
        recipe,
        network,
        folder=args.out,
        device=device,
        num_shards=num_threads if device.type == "cpu" else 1,
        first_stage=recipe.stage_index(args.from_stage) if args.from_stage else 0,
        num_workers=args.workers if args.workers >= 0 else (8 if device.type == "cuda" else 0),
        checkpoint_every_s=args.checkpoint_every_s,
    )
    if not args.restart and trainer.resume():
        _log.info("resumed", stage=trainer.position.stage, step=trainer.position.step)
    with flushed_denormals():
        _train(recipe, trainer)
    if initial is not None:
        average_weights(trainer.network, initial, share=args.average_init)
    save_folder(trainer.network, args.out / "model")
    save_tokenizer(args.out / "model")
    _log.info("exported", folder=str(args.out / "model"), total_tokens=trainer.position.total_tokens)
    return 0


def _train(recipe: Recipe, trainer: Trainer) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>5.1f} %  answer loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {s.name: progress.add_task(s.name, total=1.0, loss=0.0) for s in recipe.stages}

        def on_step(done: float, result: StepResult) -> None:
            stage = recipe.stages[trainer.position.stage]
            progress.update(bars[stage.name], completed=done, loss=result.answer_loss)

        trainer.run(on_step=on_step)


def _recipe_path(name: str) -> Path:
    path = RECIPES / f"{name}.json"
    return path if path.exists() else Path(name)


def _device_name(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigurationError(f"--device is {name!r}; allowed are auto, cpu, cuda")
    return name


def _initial_network(recipe: Recipe, folder: Path | None, *, renew: bool) -> RecallNetwork:
    generator = torch.Generator().manual_seed(recipe.init_seed)
    if folder is None:
        network = RecallNetwork(recipe.network, generator=generator)
        network.structure_positions()
        return network
    network = load_network(folder)
    if network.config.num_layers != recipe.network.num_layers:
        text, _ = draw_batch("growth", _NUM_GROWTH_ROWS, 512, Mixture())
        network = network.grown(recipe.network.num_layers, text, generator=generator)
    if network.config != recipe.network:
        raise ConfigurationError(
            f"--init {folder} has {network.config}; recipe {recipe.name!r} needs {recipe.network}"
        )
    if renew:
        ids = unused_words(network)
        renew_embeddings(network, ids, generator)
        _log.info("embeddings renewed", words=len(ids))
    return network


@torch.no_grad()
def unused_words(network: RecallNetwork) -> Tensor:
    """Return the ids, int64 `[N]`, of the words that training never saw, as input or as answer; ascending.

    With tied embeddings these words only get the gradient of not being the next token, which is the same for
    all of them. They end up with the direction of the pad token, and the network cannot distinguish them.
    """
    weight = network.embed_tokens.weight[:, 1:]  # dimension 0 is a constant
    return (F.cosine_similarity(weight, weight[PAD_ID : PAD_ID + 1]) > _SAME_DIRECTION).nonzero().flatten()


@torch.no_grad()
def renew_embeddings(network: RecallNetwork, ids: Tensor, generator: torch.Generator) -> None:
    """Draw new embeddings for some ids, int64 `[N]`, with the other words' mean and spread."""
    weight = network.embed_tokens.weight
    others = torch.ones(len(weight), dtype=torch.bool).index_fill(0, ids, False)
    mean, spread = weight[others].mean(0), weight[others].std(0)
    weight[ids] = mean + spread * torch.randn(len(ids), weight.shape[1], generator=generator)


@torch.no_grad()
def average_weights(network: RecallNetwork, other: RecallNetwork, *, share: float) -> None:
    """Move a network's weights by a share, 0 to 1, of the way to another's of the same shape.

    An average of a network and the one that its training began with preserves more of the abilities that the
    training no longer asked for (Wortsman et al. 2022, https://arxiv.org/abs/2109.01903).
    """
    weights = other.state_dict()
    for name, tensor in network.state_dict().items():
        tensor.lerp_(weights[name].to(tensor), share)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Expected errors print one line and return code 2."""
    parser = argparse.ArgumentParser(prog="kvferry train-demo", description="Train the demo model.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args)
    except KvferryError as error:
        _log.error("training failed", error=error.message)
        return 2


if __name__ == "__main__":
    sys.exit(main())
