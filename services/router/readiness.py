"""Whether work goes through: real turns tell, and where none came lately a probe turn does.

A probe is a tiny turn over the real path that no metric counts.
"""

from __future__ import annotations

import asyncio
import secrets
import time

import structlog

from kvferry.services.router.placement import Role, served_model
from kvferry.services.router.turn import TurnRunner
from kvferry.services.router.turn_state import TurnProgress, TurnRequest, TurnStats
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.control.messages import FinishReason
from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.sampling.params import SampledToken, SamplingParams

_PROBE_PROMPT_TOKENS = 4
_PROBE_NEW_TOKENS = 2
_PROBE_TIMEOUT_S = 10.0


class Readiness:
    """Remembers when work last went through, and sees to it that the answer is never old.

    Args:
        plan: what probes are compressed with.
        probe_interval_s: without a turn for so long, a probe is sent.
        window_s: older successes say nothing.
    """

    def __init__(
        self, runner: TurnRunner, plan: CompressionPlan, *, probe_interval_s: float, window_s: float
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._probe_interval_s = probe_interval_s
        self._window_s = window_s
        self._last_success_s: float | None = None
        self._log = structlog.get_logger(__name__)

    def mark(self) -> None:
        """A turn went through."""
        self._last_success_s = time.monotonic()

    def problem(self) -> KvferryError | None:
        """Why the router is not ready, or None where it is."""
        if served_model(self._runner.prefill, self._runner.decode, ready_only=True) is None:
            return WorkerUnavailable("No prefill and decode worker with the same model are ready")
        if self._age_s() > self._window_s:
            return WorkerUnavailable(f"No turn went through within the last {self._window_s:g} s")
        return None

    async def run(self) -> None:
        """Probe whenever no turn went through for a while; runs until cancelled."""
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
                await asyncio.sleep(min(1.0, self._probe_interval_s))
            except Exception:
                # The loop's top: without it readiness would stay as it was last.
                self._log.exception("probe turn failed unexpectedly")
                await asyncio.sleep(self._probe_interval_s)
            else:
                failing = False
                self.mark()

    def _age_s(self) -> float:
        return float("inf") if self._last_success_s is None else time.monotonic() - self._last_success_s

    async def _probe(self) -> None:
        model = served_model(self._runner.prefill, self._runner.decode, ready_only=True)
        if model is None:
            raise WorkerUnavailable("No prefill and decode worker with the same model are ready")
        request = TurnRequest(
            request_id=f"probe-{secrets.token_hex(4)}",
            model=model,
            prompt_token_ids=tuple(index % model.vocab_size for index in range(_PROBE_PROMPT_TOKENS)),
            plan=self._plan,
            sampling=SamplingParams(max_tokens=_PROBE_NEW_TOKENS, temperature=0.0, ignore_eos=True),
            deadline_s=asyncio.get_running_loop().time() + _PROBE_TIMEOUT_S,
            probe=True,
        )
        await self._runner.run(TurnProgress(request, _Silent()))


class _Silent:
    """A sink that ignores everything."""

    def admitted(self) -> None:
        pass

    def token(self, token: SampledToken, stats: TurnStats) -> bool:
        return False

    def finished(self, reason: FinishReason, stats: TurnStats) -> None:
        pass

    def cut_off(self, error: KvferryError) -> None:
        pass

    def recovered(self, role: Role) -> None:
        pass
