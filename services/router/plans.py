"""Which compression a request gets: the server's default, or the request's own within what is allowed."""

from __future__ import annotations

from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.schemas import KvCompression, describe
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for
from kvferry.shared.errors import ConfigurationError, InvalidRequest


class PlanChoice:
    """The server's default plan and the methods that requests may name.

    Raises: ConfigurationError where an option names a method that does not exist or is not allowed.
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

    @property
    def default(self) -> CompressionPlan:
        """The plan of requests that ask for nothing."""
        return self._default_plan

    def all(self) -> tuple[CompressionPlan, ...]:
        """What each allowed method comes to without a budget of the request's own."""
        return tuple(self.plan(KvCompression(method=method)) for method in self.allowed)

    def plan(self, wanted: KvCompression | None) -> CompressionPlan:
        """Raises: InvalidRequest naming `kv_compression` or its field."""
        if wanted is None:
            return self._default_plan
        method = self._default_method if wanted.method is None else wanted.method
        if method not in self.allowed:
            raise InvalidRequest(
                f"kv_compression.method is {describe(method)}; it must be one of {', '.join(self.allowed)}",
                param="kv_compression.method",
            )
        if wanted.quality is not None:
            raise InvalidRequest(
                f"kv_compression.quality needs a calibrated curve; there is none for method {method!r}, "
                "give token_budget or retention",
                param="kv_compression.quality",
            )
        budget = Budget(tokens=wanted.token_budget, retention=wanted.retention)
        if budget == Budget() and method == self._default_method:
            budget = self._default_plan.budget
        return plan_for(method, budget=budget, overrides=wanted.parameters)
