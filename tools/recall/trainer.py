"""One training run: steps, learning curve, checkpoints and resume. `train.py` is its command line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall.batches import BatchSource
from kvferry.tools.recall.gradients import ShardedGradients, StepResult, draw_target
from kvferry.tools.recall.network import NetworkConfig, RecallNetwork, load_folder
from kvferry.tools.recall.optimiser import RecallOptimiser
from kvferry.tools.recall.recipe import Recipe, Stage

_log = structlog.get_logger(__name__)

_GRADIENT_NORM = 1.0
_AVERAGE = 0.05
"""Weight of a new step in the running averages of the learning curve."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A run's progress: the stage, and how much of its budget is used."""

    stage: int = 0
    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    total_tokens: int = 0


class Trainer:
    """Runs a recipe's stages one after another.

        new ──► stage s, step k ──► ... ──► stage s + 1, step 0 (fresh optimiser) ──► ... ──► done
                      └── checkpoint ──► process ends ──► resume at the same step and state

    Args:
        folder: checkpoint.pt (atomically replaced) and curve.jsonl go here.
        num_shards: threads that share a step's rows; it changes the result only by rounding.
        num_workers: processes that draw data ahead.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        recipe: Recipe,
        network: RecallNetwork,
        *,
        folder: Path,
        device: torch.device,
        first_stage: int = 0,
        num_shards: int = 1,
        num_workers: int = 0,
        checkpoint_every_s: float = 60.0,
        log_every_steps: int = 50,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.network = network.to(device)
        self.position = Position(stage=first_stage)
        self._recipe, self._folder, self._device, self._clock = recipe, folder, device, clock
        self._num_workers = num_workers
        self._gradients = ShardedGradients(self.network, num_shards=num_shards)
        self._checkpoint_every_s, self._log_every_steps = checkpoint_every_s, log_every_steps
        self._averages: dict[str, dict[str, float]] = {}
        self._optimiser = self._new_optimiser()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint_path(self) -> Path:
        return self._folder / "checkpoint.pt"

    def resume(self) -> bool:
        """Continue from the folder's checkpoint; False if there is none."""
        if not self.checkpoint_path.exists():
            return False
        state = torch.load(self.checkpoint_path, map_location=self._device, weights_only=True)
        if state["recipe"] != self._recipe.name:
            raise ConfigurationError(
                f"{self.checkpoint_path} belongs to recipe {state['recipe']!r}, not {self._recipe.name!r}; "
                "give another --out"
            )
        self.network.load_state_dict(state["network"])
        self.position = Position(**state["position"])
        self._averages = state["averages"]
        self._optimiser = self._new_optimiser()
        self._optimiser.load_state_dict(state["optimiser"])
        return True

    def run(self, *, on_step: Callable[[float, StepResult], None] | None = None, max_steps: int = 0) -> bool:
        """Train to the recipe's end, or for max_steps steps if that is not 0; True at the end.

        Args:
            on_step: called with the stage's progress in [0, 1] and the step's result.
        """
        left = max_steps or -1
        while self.position.stage < len(self._recipe.stages):
            left = self._run_stage(left, on_step)
            if left == 0:
                self.save_checkpoint()
                return False
            self.position = Position(stage=self.position.stage + 1, total_tokens=self.position.total_tokens)
            if self.position.stage < len(self._recipe.stages):
                self._optimiser = self._new_optimiser()
            self.save_checkpoint()
        return True

    def _run_stage(self, left: int, on_step: Callable[[float, StepResult], None] | None) -> int:
        stage, at = self._recipe.stages[self.position.stage], self.position
        started_s = self._clock() - at.elapsed_s
        saved_s = logged_s = self._clock()
        logged_tokens = at.num_tokens
        with BatchSource(
            stage, step=at.step, num_tokens=at.num_tokens, num_workers=self._num_workers
        ) as batches:
            while left and (progress := stage.progress(at.num_tokens, at.elapsed_s)) < 1:
                plan, token_ids, is_answer = batches.next(at.elapsed_s)
                result = self._step(stage, token_ids, is_answer, progress)
                size, now_s = plan.num_rows * plan.num_tokens, self._clock()
                self.position = at = replace(
                    at,
                    step=at.step + 1,
                    num_tokens=at.num_tokens + size,
                    total_tokens=at.total_tokens + size,
                    elapsed_s=now_s - started_s,
                )
                self._average(plan.num_tokens, result)
                if at.step % self._log_every_steps == 0:
                    self._write_curve(stage, (at.num_tokens - logged_tokens) / (now_s - logged_s))
                    logged_s, logged_tokens = now_s, at.num_tokens
                if now_s - saved_s > self._checkpoint_every_s:
                    self.save_checkpoint()
                    saved_s = now_s
                if on_step is not None:
                    on_step(min(1.0, stage.progress(at.num_tokens, at.elapsed_s)), result)
                left -= 1
        return left

    def _step(self, stage: Stage, token_ids: Tensor, is_answer: Tensor, progress: float) -> StepResult:
        generator = torch.Generator().manual_seed(stage.seed * 1_000_003 + self.position.step)
        longest = self.network.config.max_position_embeddings
        target = draw_target(token_ids, is_answer, stage=stage, longest=longest, generator=generator)
        result = self._gradients.backward(target.to(self._device), lm_weight=stage.lm_weight)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _GRADIENT_NORM)
        self._optimiser.step(stage.lr_scale(self.position.step, progress))
        return result

    def _new_optimiser(self) -> RecallOptimiser:
        stage = self._recipe.stages[min(self.position.stage, len(self._recipe.stages) - 1)]
        return RecallOptimiser(self.network, lr_matrix=stage.lr_matrix, lr_other=stage.lr_other)

    def _average(self, num_tokens: int, result: StepResult) -> None:
        values = asdict(result)
        mean = self._averages.setdefault(str(num_tokens), values)
        for name, value in values.items():
            mean[name] += _AVERAGE * (value - mean[name])

    def _write_curve(self, stage: Stage, tokens_per_s: float) -> None:
        at = self.position
        point: dict[str, Any] = {
            "stage": stage.name,
            "step": at.step,
            "minutes": round(at.elapsed_s / 60, 2),
            "num_tokens": at.num_tokens,
            "total_tokens": at.total_tokens,
            "tokens_per_s": round(tokens_per_s),
            "by_length": {
                n: {k: round(v, 4) for k, v in m.items()}
                for n, m in sorted(self._averages.items(), key=lambda item: int(item[0]))
            },
        }
        with (self._folder / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
        _log.info("training", **{k: v for k, v in point.items() if k != "by_length"}, **point["by_length"])

    def save_checkpoint(self) -> None:
        """Replace the folder's checkpoint; a crash while writing leaves the old one."""
        state = {
            "recipe": self._recipe.name,
            "network_config": asdict(self.network.config),
            "network": self.network.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "position": asdict(self.position),
            "averages": self._averages,
        }
        part = self.checkpoint_path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.checkpoint_path)


def load_network(path: Path) -> RecallNetwork:
    """Load the network of an exported folder or of a checkpoint file, on the CPU."""
    if not path.is_file():
        return load_folder(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    network = RecallNetwork(NetworkConfig(**state["network_config"]))
    network.load_state_dict(state["network"])
    return network
