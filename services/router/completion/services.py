"""The parts of the router that requests share, made once by `app.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.services.router.completion.compression import PlanChooser
from kvferry.services.router.completion.prompts import PromptBuilder
from kvferry.services.router.config import RouterConfig
from kvferry.services.router.http.access import KeyLimits
from kvferry.services.router.http.large_work import LargeWork
from kvferry.services.router.sessions.implicit import ImplicitSessions
from kvferry.services.router.sessions.store import SessionStore
from kvferry.services.router.turn.readiness import Readiness
from kvferry.services.router.turn.runner import TurnRunner
from kvferry.shared.telemetry.metrics import RouterMetrics

if TYPE_CHECKING:
    from kvferry.services.router.completion.completion import Completion


@dataclass(frozen=True, kw_only=True)
class Services:
    """Attributes: clock: Unix time in seconds; limits: of the key file's keys; sampling_defaults: fields of
    `SamplingParams` for requests that do not give them; running: completions that have not ended."""

    config: RouterConfig
    metrics: RouterMetrics
    clock: Callable[[], float]
    runner: TurnRunner
    readiness: Readiness
    sessions: SessionStore
    implicit: ImplicitSessions
    prompts: PromptBuilder
    plans: PlanChooser
    large: LargeWork
    limits: KeyLimits | None
    sampling_defaults: Mapping[str, float]
    running: set[Completion] = field(default_factory=set)
