"""The `kvferry` command and its subcommands.

    kvferry serve | router | prefill | decode | chat | launch | bench | plan | doctor | eval | calibrate | ...

Exit codes: 0 done, 1 failed, 2 wrong options or configuration.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.launcher.config import HIDDEN_FROM_SERVE, ServeConfig
from kvferry.services.launcher.other_servers import as_ours
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.router.config import RouterConfig
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.process.command_line import CommandLine, run_app
from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.chat.config import ChatConfig
from kvferry.tools.doctor.config import DoctorConfig
from kvferry.tools.evaluation.calibration_config import CalibrateConfig
from kvferry.tools.evaluation.config import HIDDEN_OPTIONS, EvalConfig
from kvferry.tools.kernel_cache.config import CompileConfig
from kvferry.tools.operate.config import KeysConfig, StoredConfig
from kvferry.tools.plan.config import PLAN_HIDDEN, CalibrateMachineConfig, PlanConfig

TOOLS = "Measuring and training"
SERVICES = "Single services"
OPERATING = "Operating"

command_line = CommandLine("kvferry", "Long-context chat whose KV cache is compressed before it travels.")
app, command = command_line.app, command_line.command
calibrate = App(
    name="calibrate",
    help="Measure how much of a prompt each method needs with a model, and RDKV's distortion table of it; "
    "services find both by the model.",
    group=TOOLS,
)
app.command(calibrate)
app.register_install_completion_command()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script; end the process with an exit code."""
    # The first process of a container has no default actions: the kernel drops signals without a handler.
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"]:
        try:
            ours, notes = as_ours(given[1:])
        except ConfigurationError as error:
            sys.stderr.write(f"kvferry serve: {error.message}\n")
            raise SystemExit(2) from None
        sys.stderr.write("".join(f"kvferry serve: {note}\n" for note in notes))
        given = ["serve", *ours]
    run_app(app, given)


# A command imports what it runs when it runs: `kvferry --help` should not wait for torch.


@command(ServeConfig, hidden=HIDDEN_FROM_SERVE)
def serve(config: ServeConfig) -> int:
    """Run router, prefill and decode on this machine; takes the options of all three."""
    from kvferry.services.launcher.serve import serve
    from kvferry.shared.model.checkpoint import resolve_model_path

    # Not in the services, which have less time to start than a download may take, nor in the event loop.
    resolve_model_path(config.model, weights=True)
    return asyncio.run(serve(config))


@command(ChatConfig)
def chat(config: ChatConfig) -> int:
    """Chat with a router in the terminal, in a session; type /help for its commands."""
    from kvferry.tools.chat.conversation import chat

    return asyncio.run(chat(config))


@app.command
def launch(name: str, *, url: str = "http://127.0.0.1:8000", api_key: str = "", write: bool = False) -> int:
    """Print the configuration with which an agent or chat program uses a router, or write it.

    Parameters
    ----------
    name
        claude, codex, opencode, aider, continue, cline, open-webui, llm or litellm.
    url
        Address of the router.
    api_key
        API key that the program is to send, if the router wants one.
    write
        Write it to the program's file, which must not exist, in place of printing it.
    """
    from kvferry.tools.launch import launch

    return launch(name, url=url, api_key=api_key, write=write)


@command(BenchConfig, group=TOOLS)
def bench(config: BenchConfig) -> int:
    """Send load to any OpenAI-compatible server and measure latencies, goodput and bytes."""
    from kvferry.tools.bench.command import bench

    return asyncio.run(bench(config))


@command(PlanConfig, group=TOOLS, hidden=PLAN_HIDDEN)
def plan(config: PlanConfig) -> int:
    """Predict memory, bytes, times and workers for a load, and whether to disaggregate and compress."""
    from kvferry.tools.plan.command import run

    return run(config)


@command(DoctorConfig, group=TOOLS)
def doctor(config: DoctorConfig) -> int:
    """Check this machine for the workers: device, memory, kernels, links; says what to change."""
    from kvferry.tools.doctor.command import run

    return run(config)


@command(CompileConfig, group=TOOLS)
def compile(config: CompileConfig) -> int:
    """Fill Triton's cache with the kernels of models and GPUs; needs no GPU. Lists are comma-separated."""
    from kvferry.tools.kernel_cache.command import run

    return run(config)


@command(EvalConfig, group=TOOLS, hidden=HIDDEN_OPTIONS)
def eval(config: EvalConfig) -> int:
    """Measure what compression costs in accuracy; lists are comma-separated."""
    from kvferry.tools.evaluation.command import run

    return run(config)


@command(CalibrateConfig, parent=calibrate, is_default=True, hidden=HIDDEN_OPTIONS)
def calibrate_model(config: CalibrateConfig) -> int:
    from kvferry.tools.evaluation.calibrate import calibrate

    return calibrate(config)


@command(CalibrateMachineConfig, parent=calibrate)
def machine(config: CalibrateMachineConfig) -> int:
    """Measure how long this machine takes with a model, for kvferry plan --machine."""
    from kvferry.tools.plan.measure import calibrate_machine

    return asyncio.run(calibrate_machine(config))


@app.command(group=TOOLS, help_flags=(), version_flags=())
def train_demo(*arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Train the demo model from its recipe."""
    from kvferry.tools.recall.train import main as train

    return train(arguments)


@app.command(group=TOOLS)
def certs(folder: str, *, days: int = 365, everything: bool = False) -> int:
    """Make or renew the keys with which services know each other, for --certs.

    Parameters
    ----------
    folder
        Gets a folder for each role, and the authority's.
    days
        How long the certificates are valid.
    everything
        Replace also the authority and the keys for blocks; restart all services then.
    """
    from kvferry.tools.certs import run

    return run(folder, days=days, everything=everything)


@app.command(group=TOOLS)
def new_key(name: str) -> None:
    """Make an API key: prints it, once, and its entry for the router's --api-keys-file.

    Parameters
    ----------
    name
        Its holder, as logs and metrics show it.
    """
    from kvferry.services.router.http.access import new_key

    key, entry = new_key(name)
    sys.stdout.write(f"{key}\n\n{entry}")


@command(StoredConfig, group=OPERATING)
def sessions(config: StoredConfig) -> int:
    """List an API key's sessions, or delete one."""
    from kvferry.tools.operate.command import stored

    return stored("sessions", config)


@command(StoredConfig, group=OPERATING)
def documents(config: StoredConfig) -> int:
    """List an API key's documents, or delete one."""
    from kvferry.tools.operate.command import stored

    return stored("documents", config)


@command(KeysConfig, group=OPERATING)
def keys(config: KeysConfig) -> int:
    """List the names, scopes and limits of a key file, or delete all that a key stored (--forget)."""
    from kvferry.tools.operate.command import keys

    return keys(config)


@command(RouterConfig, group=SERVICES)
def router(config: RouterConfig) -> None:
    """Serve the OpenAI HTTP API."""
    from kvferry.services.router.server import run

    asyncio.run(run(config))


@command(PrefillConfig, group=SERVICES)
def prefill(config: PrefillConfig) -> None:
    """Run prompts, compress and ship their KV, and keep sessions' history."""
    from kvferry.services.prefill.server import run

    calibrate = None
    if config.calibrate:
        from kvferry.tools.evaluation.calibrate import worker_calibration

        calibrate = worker_calibration(config.model, config.calibration)
    asyncio.run(run(config, calibrate))


@command(DecodeConfig, group=SERVICES)
def decode(config: DecodeConfig) -> None:
    """Receive compressed KV and generate."""
    from kvferry.services.decode.server import run

    asyncio.run(run(config))
