"""The training recipe as data: stages, each with its budget, learning rates and phases.

Read from JSON (`recipes/`). Its seeds determine every random choice of training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall.conversations import Mixture
from kvferry.tools.recall.network import NetworkConfig

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a stage with its own lengths and mixture.

    Attributes:
        share: part of the stage's budget, relative to the other phases' shares.
        lengths: row lengths in tokens and how often each is drawn.
    """

    share: float
    lengths: tuple[tuple[int, float], ...]
    mixture: Mixture

    def __post_init__(self) -> None:
        if self.share <= 0 or not self.lengths:
            raise ConfigurationError(
                f"a phase needs share > 0 and lengths, got {self.share} and {self.lengths}"
            )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One learning-rate cycle: warm-up, constant, linear decay.

    Attributes:
        num_tokens: budget in tokens; reproduces exactly on one machine.
        minutes: budget in wall-clock minutes; 0: none. A stage ends when either budget is spent.
        decay_from: part of the budget after which the learning rate falls, linearly, to `final_lr` of itself.
        lm_weight, lm_fraction: weight of the language-modelling loss and the part of the tokens that it sees.
        stretched: share of the rows whose positions have gaps, up to the network's longest context.
    """

    name: str
    seed: int
    phases: tuple[Phase, ...]
    num_tokens: int = 0
    minutes: float = 0.0
    tokens_per_step: int = 8192
    lr_matrix: float = 0.008
    lr_other: float = 1e-3
    warmup_steps: int = 50
    decay_from: float = 0.3
    final_lr: float = 0.03
    lm_weight: float = 0.2
    lm_fraction: float = 0.15
    stretched: float = 0.0

    def __post_init__(self) -> None:
        if self.num_tokens <= 0 and self.minutes <= 0:
            raise ConfigurationError(f"stage {self.name!r} has no budget; give num_tokens or minutes")
        if not self.phases:
            raise ConfigurationError(f"stage {self.name!r} has no phases; at least one is needed")
        if not 0 <= self.stretched <= 1:
            raise ConfigurationError(
                f"stretched of stage {self.name!r} is {self.stretched}; allowed is 0 to 1"
            )

    def progress(self, num_tokens: int, elapsed_s: float) -> float:
        """Return the part of the budget that is spent; 1 or more ends the stage."""
        spent = [0.0]
        if self.num_tokens:
            spent.append(num_tokens / self.num_tokens)
        if self.minutes:
            spent.append(elapsed_s / 60 / self.minutes)
        return max(spent)

    def phase_at(self, progress: float) -> Phase:
        reached, total = 0.0, sum(p.share for p in self.phases)
        for phase in self.phases:
            reached += phase.share / total
            if progress < reached:
                return phase
        return self.phases[-1]

    def lr_scale(self, step: int, progress: float) -> float:
        """Return the factor on the learning rates for the step that follows `step` done ones."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if progress < self.decay_from:
            return warmup
        left = max(0.0, 1 - progress) / (1 - self.decay_from)
        return warmup * (self.final_lr + (1 - self.final_lr) * left)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A network and the stages that train it, from the structured initialisation on."""

    name: str
    stages: tuple[Stage, ...]
    network: NetworkConfig = field(default_factory=NetworkConfig)
    init_seed: int = 0

    def __post_init__(self) -> None:
        names = [s.name for s in self.stages]
        if not names or len(set(names)) != len(names):
            raise ConfigurationError(f"a recipe's stages need distinct names, got {names}")

    def stage_index(self, name: str) -> int:
        names = [s.name for s in self.stages]
        if name not in names:
            raise ConfigurationError(f"recipe {self.name!r} has no stage {name!r}; stages are {names}")
        return names.index(name)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; raises ConfigurationError at an unknown or missing field."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Recipe(
            name=fields["name"],
            init_seed=fields.get("init_seed", 0),
            network=NetworkConfig(**fields.get("network", {})),
            stages=tuple(_stage(s) for s in fields["stages"]),
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigurationError(f"recipe {path} cannot be read: {error!r}") from error


def _stage(fields: dict[str, Any]) -> Stage:
    phases = tuple(
        Phase(
            share=p["share"],
            lengths=tuple((int(n), float(w)) for n, w in p["lengths"]),
            mixture=Mixture.from_json(p.get("mixture", {})),
        )
        for p in fields["phases"]
    )
    return Stage(**{**fields, "phases": phases})
