"""`kvferry serve`: the whole system on this machine, as processes (default) or in one process.

Starts a stack, waits until a probe request has succeeded, prints its addresses, and stops it on a signal.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import httpx

from kvferry.services.launcher.config import ServeConfig
from kvferry.services.launcher.display import Display
from kvferry.services.launcher.processes import ProcessStack
from kvferry.services.router.config import split_list
from kvferry.shared.errors import DeadlineExceeded
from kvferry.shared.model.checkpoint import resolve_model_path
from kvferry.shared.process.serving import announce_ready, reachable, wait_for_signal

if TYPE_CHECKING:
    from kvferry.services.launcher.in_process import InProcessStack

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0


def run(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises: KvferryError if a service does not start.
    """
    # Prefill and decode have more threads together than there are processors, and one that waits must not
    # keep another from computing. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Not in the services, which have less time to start than a download may take, nor in the event loop.
    resolve_model_path(config.model, weights=True)
    return asyncio.run(_serve(config))


async def _serve(config: ServeConfig) -> int:
    display = Display()
    if config.in_process:
        # Imported here because torch takes seconds to import and the launcher needs it for nothing else.
        from kvferry.services.launcher.in_process import InProcessStack

        stack: ProcessStack | InProcessStack = InProcessStack(config)
    else:
        stack = ProcessStack(config)
    stopped = asyncio.create_task(wait_for_signal())
    starting = asyncio.create_task(_start(stack, config))
    try:
        with display.starting(config.model_name or config.model, calibrates=config.calibrate):
            await asyncio.wait({stopped, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            model = starting.result()
            display.ready(
                model,
                stack.addresses,
                needs_key=config.has_keys,
                with_certs=bool(config.certs),
                scheme=config.http_scheme,
            )
            # Written last, so that everything is printed when the file appears.
            announce_ready(config.ready_file, {"service": "serve", "model": model, **stack.addresses})
            await stopped
        display.stopping()
    finally:
        stopped.cancel()
        starting.cancel()
        await asyncio.gather(stopped, starting, return_exceptions=True)
        await stack.close()
    return 0


async def _start(stack: ProcessStack | InProcessStack, config: ServeConfig) -> str:
    """Start the stack and wait until it can serve; returns the model's public id."""
    try:
        async with asyncio.timeout(config.ready_within_s):
            await stack.start()
            keys = split_list(config.api_keys)
            headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
            base_url = f"{config.http_scheme}://{reachable(stack.addresses['address'])}"
            # its own server, whatever the names in the certificate
            async with httpx.AsyncClient(
                base_url=base_url, headers=headers, trust_env=False, verify=False
            ) as client:
                while not await _is_ready(client):
                    await asyncio.sleep(_POLL_S)
                models = await client.get("/v1/models", timeout=None)  # may try out what the model can do
                if models.status_code == httpx.codes.UNAUTHORIZED and config.api_keys_file:
                    return config.model_name or config.model  # no key of the file is known here
                return str(models.raise_for_status().json()["data"][0]["id"])
    except TimeoutError:
        raise DeadlineExceeded(f"the services were not ready after {config.start_timeout_s:g} s") from None


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready", timeout=_PROBE_TIMEOUT_S)).is_success
    except httpx.TransportError:
        return False
