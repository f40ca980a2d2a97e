"""The parts of the router that requests share, made once by `app.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.services.router.completion.plans import PlanChooser
from kvferry.services.router.completion.prompt import PromptBuilder
from kvferry.services.router.config import RouterConfig
from kvferry.services.router.sessions.redis_store import SessionStore
from kvferry.services.router.turn.history import WorkerHistory
from kvferry.services.router.turn.readiness import Readiness
from kvferry.services.router.turn.turn import TurnRunner
from kvferry.services.router.turn.worker_pool import served_model
from kvferry.shared.errors import Overloaded
from kvferry.shared.metrics import RouterMetrics
from kvferry.shared.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Services:
    """Attributes: clock: Unix time in seconds."""

    config: RouterConfig
    metrics: RouterMetrics
    clock: Callable[[], float]
    runner: TurnRunner
    readiness: Readiness
    sessions: SessionStore
    history: WorkerHistory
    prompts: PromptBuilder
    plans: PlanChooser

    def model(self) -> ModelSpec:
        """The model that the workers serve now.

        Raises: Overloaded where workers of both roles have none in common.
        """
        model = served_model(self.runner.prefill, self.runner.decode)
        if model is None:
            raise Overloaded("No ready prefill/decode pair serves the same model")
        return model
