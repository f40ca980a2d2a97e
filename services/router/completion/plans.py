"""The compression plan of a request: the server's default, or the request's own choice within what is
allowed.

A requested quality becomes a retention here, by the model's calibrated curve and the prompt's tokens, before
decode reserves anything; everything after this sees an ordinary plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvferry.models import SHIPPED_CURVES
from kvferry.services.router.completion.requests import KvCompression
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.http.errors import describe
from kvferry.shared.compression.curves import CurveBook, QualityCurve
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.errors import ConfigurationError, InvalidRequest
from kvferry.shared.model.spec import ModelSpec


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
        budget = Budget(tokens=config.default_token_budget or None)
        try:
            self._default_plan = plan_for(config.default_method, budget=budget)
        except InvalidRequest as error:
            raise ConfigurationError(f"default_token_budget: {error.message}") from None

        folders = [SHIPPED_CURVES, *([Path(config.calibration)] if config.calibration else [])]
        self._curves = CurveBook.read(folders)

    @property
    def default(self) -> CompressionPlan:
        """The plan of requests that name nothing."""
        return self._default_plan

    def all(self) -> tuple[CompressionPlan, ...]:
        """The plan of each allowed method where a request gives no budget."""
        return tuple(self.plan(KvCompression(method=method)) for method in self.allowed)

    async def choose(
        self, wanted: KvCompression | None, prompt_token_ids: Sequence[int], model: ModelSpec
    ) -> CompressionPlan:
        """The plan of one prompt.

        Raises: InvalidRequest naming `kv_compression` or its field.
        """
        if wanted is None or wanted.quality is None:
            return self.plan(wanted)
        if wanted.parameters:
            raise InvalidRequest(
                "kv_compression.quality uses curves calibrated with the methods' own parameters; with "
                "kv_compression.parameters give token_budget or retention",
                param="kv_compression.quality",
            )
        curve = self._curve(self._method(wanted), model)
        # In a thread, because it reads the whole prompt.
        retention = await asyncio.to_thread(
            curve.retention, wanted.quality, prompt_token_ids, vocab_size=model.vocab_size
        )
        return plan_for(self._method(wanted), budget=Budget(retention=retention))

    def plan(self, wanted: KvCompression | None) -> CompressionPlan:
        """The plan where no quality is requested.

        Raises: InvalidRequest naming `kv_compression` or its field.
        """
        if wanted is None:
            return self._default_plan
        method = self._method(wanted)
        budget = Budget(tokens=wanted.token_budget, retention=wanted.retention)
        if budget == Budget() and method == self._default_method:
            budget = self._default_plan.budget
        return plan_for(method, budget=budget, overrides=wanted.parameters)

    def _method(self, wanted: KvCompression) -> str:
        method = self._default_method if wanted.method is None else wanted.method
        if method not in self.allowed:
            raise InvalidRequest(
                f"kv_compression.method is {describe(method)}; it must be one of {', '.join(self.allowed)}",
                param="kv_compression.method",
            )
        return method

    def _curve(self, method: str, model: ModelSpec) -> QualityCurve:
        curve = self._curves.find(model.fingerprint, method)
        if curve is not None:
            return curve
        if not preset(method).takes_budget:
            problem = f"was given for method {method!r}, which takes no budget"
        else:
            problem = (
                f"needs a curve of method {method!r} calibrated on this model, and there is none; give "
                "token_budget or retention, or run 'kvferry calibrate quality --model MODEL --methods "
                f"{method} --calibration DIR' and start the router with --calibration DIR"
            )
        calibrated = [name for name in self._curves.methods(model.fingerprint) if name in self.allowed]
        raise InvalidRequest(
            f"kv_compression.quality {problem} (calibrated: {', '.join(calibrated) or 'none'})",
            param="kv_compression.quality",
        )
