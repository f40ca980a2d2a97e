"""The plan of a request's compression: the server's default, or the request's own within what is allowed.

A requested quality becomes a retention here, by the model's calibrated curve and the prompt's tokens, before
decode reserves anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.models import SHIPPED_CALIBRATION
from kvferry.services.router.completion.engine_fields import KvCompression
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.http.errors import describe
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.curves import CurveBook
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.errors import ConfigurationError, InvalidRequest
from kvferry.shared.model.spec import ModelSpec

if TYPE_CHECKING:
    from kvferry.services.router.completion.fastest import FastestMethod

_FALLBACKS = ("rocketkv", "full")
"""Methods in place of a default that does not go with the model."""
EXPECTED_ANSWER_TOKENS = 512
"""Of most answers, by which the method "auto" compares times."""
AUTO = "auto"
"""The method of requests that leave it to the router which one has their quality."""


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A request's plan.

    Attributes:
        quality: that the request gave.
        reason: why the router chose the method; empty where the request did.
    """

    plan: CompressionPlan
    quality: float | None = None
    reason: str = ""


class PlanChooser:
    """The server's default plan, the methods that requests may name, and their quality curves.

    Raises: ConfigurationError where an option names a method that does not exist or is not allowed, or
        quality curves cannot be read.
    """

    def __init__(self, config: RouterConfig) -> None:
        known = method_names()
        self.allowed = split_list(config.allowed_methods) or known
        unknown = [name for name in (*self.allowed, config.default_method) if name not in known]
        if unknown:
            raise ConfigurationError(f"Unknown method {unknown[0]!r}; there are {', '.join(known)}")
        if config.default_method not in self.allowed:
            raise ConfigurationError(
                f"default_method is {config.default_method!r}; allowed_methods are {', '.join(self.allowed)}"
            )
        self._default_method = config.default_method
        self._default_budget = Budget(tokens=config.default_token_budget or None)
        try:
            plan_for(config.default_method, budget=self._default_budget)
        except InvalidRequest as error:
            raise ConfigurationError(f"default_token_budget: {error.message}") from None

        folders = [SHIPPED_CALIBRATION, *([Path(config.calibration)] if config.calibration else [])]
        self._curves = CurveBook.read(folders)
        self._fastest: FastestMethod | None = None
        if config.machine:
            from kvferry.services.router.completion.fastest import FastestMethod

            self._fastest = FastestMethod(config.machine, config.link_gbits)

    def all(self) -> tuple[CompressionPlan, ...]:
        """The plan of each allowed method where a request gives no budget."""
        return tuple(self._plan(KvCompression(), method) for method in self.allowed)

    def default(self, model: ModelSpec) -> CompressionPlan:
        """The plan of a prompt whose request says nothing of compression."""
        return self._plan(KvCompression(), self.default_method(model))

    def default_method(self, model: ModelSpec) -> str:
        """The method of requests that name none: the server's default, if it goes with the model."""
        fitting = applicable_methods(model.layers)
        for method in (self._default_method, *_FALLBACKS, *self.allowed):
            if method in fitting and method in self.allowed:
                return method
        return self._default_method

    async def choose(
        self,
        wanted: KvCompression | None,
        prompt_token_ids: Sequence[int],
        model: ModelSpec,
        *,
        max_tokens: int | None,
    ) -> ChosenPlan:
        """The plan of one prompt. Args: max_tokens: the request's limit of its answer; None without one.

        Raises: InvalidRequest naming `kv_compression` or its field.
        """
        wanted = wanted or KvCompression()
        if wanted.method == AUTO:
            expected = EXPECTED_ANSWER_TOKENS if max_tokens is None else max(1, max_tokens)
            answer_tokens = min(expected, EXPECTED_ANSWER_TOKENS)
            return await self._fastest_plan(wanted, prompt_token_ids, model, answer_tokens)
        method = self.default_method(model) if wanted.method is None else wanted.method
        if method not in self.allowed:
            raise InvalidRequest(
                f"kv_compression.method is {describe(method)}; it must be one of {', '.join(self.allowed)}",
                param="kv_compression.method",
            )
        if wanted.quality is None:
            return ChosenPlan(plan=self._plan(wanted, method))
        self._refuse_parameters(wanted)
        plan = await self._with_quality(wanted.quality, method, prompt_token_ids, model)
        return ChosenPlan(plan=plan, quality=wanted.quality)

    async def _fastest_plan(
        self,
        wanted: KvCompression,
        prompt_token_ids: Sequence[int],
        model: ModelSpec,
        answer_tokens: int,
    ) -> ChosenPlan:
        """Of the methods with a curve, and full, which has every quality."""
        if self._fastest is None or wanted.quality is None:
            lacks = "the server has no --machine" if self._fastest is None else "the request has no quality"
            raise InvalidRequest(
                f"kv_compression.method is 'auto', which needs a quality and times of this machine; {lacks}",
                param="kv_compression.method",
            )
        self._refuse_parameters(wanted)
        plans = []
        for method in self._fastest.methods(self.allowed, model):
            if method == "full":
                plans.append(plan_for(method))
            elif self._curves.find(model.fingerprint, method) is not None:
                plans.append(await self._with_quality(wanted.quality, method, prompt_token_ids, model))
        if not plans:
            raise InvalidRequest(
                "kv_compression.method is 'auto', and no allowed method has both a quality curve and times",
                param="kv_compression.method",
            )
        sizes = {"prompt_tokens": len(prompt_token_ids), "answer_tokens": answer_tokens}
        chosen, reason = self._fastest.choose(plans, model, **sizes)
        return ChosenPlan(plan=chosen, quality=wanted.quality, reason=reason)

    @staticmethod
    def _refuse_parameters(wanted: KvCompression) -> None:
        if wanted.parameters:
            raise InvalidRequest(
                "kv_compression.quality uses curves calibrated with the methods' own parameters; with "
                "kv_compression.parameters give token_budget or retention",
                param="kv_compression.quality",
            )

    async def _with_quality(
        self, quality: float, method: str, prompt_token_ids: Sequence[int], model: ModelSpec
    ) -> CompressionPlan:
        if (curve := self._curves.find(model.fingerprint, method)) is None:
            raise self._no_curve(method, model)
        # In a thread, because it reads the whole prompt.
        retention = await asyncio.to_thread(
            curve.retention, quality, prompt_token_ids, vocab_size=model.vocab_size
        )
        return plan_for(method, budget=Budget(retention=retention))

    def _no_curve(self, method: str, model: ModelSpec) -> InvalidRequest:
        if not preset(method).takes_budget:
            problem = f"was given for method {method!r}, which takes no budget"
        else:
            problem = (
                f"needs a curve of method {method!r} calibrated on this model, and there is none; give "
                "token_budget or retention, or run 'kvferry calibrate quality --model MODEL --methods "
                f"{method} --calibration DIR' and start the router with --calibration DIR"
            )
        calibrated = [name for name in self._curves.methods(model.fingerprint) if name in self.allowed]
        return InvalidRequest(
            f"kv_compression.quality {problem} (calibrated: {', '.join(calibrated) or 'none'})",
            param="kv_compression.quality",
        )

    def _plan(self, wanted: KvCompression, method: str) -> CompressionPlan:
        """The plan where no quality is requested.

        Raises: InvalidRequest naming `kv_compression` or its field.
        """
        budget = Budget(
            tokens=wanted.token_budget,
            retention=wanted.retention,
            floor_tokens=wanted.min_token_budget,
        )
        if budget == Budget() and method == self._default_method:
            budget = self._default_budget
        return plan_for(method, budget=budget, overrides=wanted.parameters)
