"""Checks that the router can serve: by recent turns, and if there are none by a probe turn.

A probe is a tiny turn over the real path. No metric counts it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog

from kvferry.services.router.turn.attempt import TurnRequest
from kvferry.services.router.turn.runner import TurnRunner, served_model
from kvferry.services.router.turn.turn import Turn
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.draining import Drain
from kvferry.shared.sampling.params import SamplingParams

_PROBE_PROMPT_TOKENS = 4
_PROBE_NEW_TOKENS = 2
_PROBE_TIMEOUT_S = 10.0
_FAILED_PROBE_S = 1.0
"""After a failed probe the next one is sent no later than this."""


class Readiness:
    """Whether a turn has succeeded lately; probes when none has.

    Args:
        plan_for: the compression of a model's probes.
        window_s: a success counts for this long.
        probe_interval_s: a probe is sent when no turn has succeeded for this long.
        drain: the router's; it is not ready once that has begun.
    """

    def __init__(
        self,
        runner: TurnRunner,
        plan_for: Callable[[ModelSpec], CompressionPlan],
        *,
        window_s: float,
        probe_interval_s: float,
        drain: Drain,
    ) -> None:
        self._drain = drain
        self._runner = runner
        self._plan_for = plan_for
        self._probe_interval_s = probe_interval_s
        self._window_s = window_s
        self._log = structlog.get_logger(__name__)

    def problem(self) -> KvferryError | None:
        """Return why the router is not ready; None if it is."""
        if self._drain.has_begun:
            return self._drain.refusal()
        if served_model(self._runner.prefill, self._runner.decode, ready_only=True) is None:
            return WorkerUnavailable(
                "No prefill and decode worker with the same model are ready"
                f"{self._runner.prefill.misunderstood or self._runner.decode.misunderstood}",
                retry_after_s=self._runner.prefill.status_interval_s,
            )
        if self._age_s() > self._window_s:
            return WorkerUnavailable(
                f"No turn succeeded within the last {self._window_s:g} s",
                retry_after_s=min(_FAILED_PROBE_S, self._probe_interval_s),
            )
        return None

    async def run(self) -> None:
        """Probe whenever no turn has succeeded for a while; runs until cancelled."""
        failing = False
        while True:
            wait_s = self._probe_interval_s - self._age_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            try:
                await self._probe()
            except KvferryError as error:
                if not failing:
                    self._log.warning("probe turn failed", error=error.message)
                failing = True
                await asyncio.sleep(min(_FAILED_PROBE_S, self._probe_interval_s))
            except Exception:
                # This loop must go on, or readiness would never change again.
                self._log.exception("probe turn failed unexpectedly")
                await asyncio.sleep(self._probe_interval_s)
            else:
                failing = False

    def _age_s(self) -> float:
        last_s = self._runner.last_success_s
        return float("inf") if last_s is None else time.monotonic() - last_s

    async def _probe(self) -> None:
        model = served_model(self._runner.prefill, self._runner.decode, ready_only=True)
        if model is None:
            raise WorkerUnavailable("No prefill and decode worker with the same model are ready")
        request = TurnRequest(
            request_id=f"probe-{secrets.token_hex(4)}",
            model=model,
            prompt_token_ids=tuple(index % model.vocab_size for index in range(_PROBE_PROMPT_TOKENS)),
            plan=self._plan_for(model),
            sampling=SamplingParams(max_tokens=_PROBE_NEW_TOKENS, temperature=0.0, ignore_eos=True),
            deadline_s=asyncio.get_running_loop().time() + _PROBE_TIMEOUT_S,
            probe=True,
        )
        await Turn(self._runner, request).run()
