"""The `kvferry` command and its subcommands.

    kvferry serve | router | prefill | decode | chat | launch | bench | plan | doctor | eval | calibrate | ...

Exit codes: 0 done, 1 failed, 2 wrong options or configuration.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

from cyclopts import App, Parameter

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.launcher.config import HIDDEN_FROM_SERVE, ServeConfig
from kvferry.services.launcher.other_servers import as_ours
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.router.config import RouterConfig
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.process.command_line import CommandLine, run_app
from kvferry.shared.process.config import Settings, TracedSettings
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


def _runner(name: str, target: str, text: str) -> Callable[[Settings], int | None]:
    """Make a command of a function of settings, MODULE:FUNCTION within kvferry. It is imported when it runs:
    neither `kvferry --help` nor a mistake should wait for torch."""

    def run(config: Settings) -> int | None:
        if isinstance(config, TracedSettings):
            from kvferry.services.launcher.checks import check

            check(config, name)
        module, _, function = target.partition(":")
        done = getattr(import_module(f"kvferry.{module}"), function)(config)
        code: int | None = asyncio.run(done) if inspect.iscoroutine(done) else done
        return code

    run.__name__, run.__doc__ = name, text
    return run


_COMMANDS: tuple[tuple[str, type[Settings], str, dict[str, Any], str], ...] = (
    ("serve", ServeConfig, "services.launcher.serve:run", {"hidden": HIDDEN_FROM_SERVE},
     "Run router, prefill and decode on this machine; takes the options of all three."),
    ("chat", ChatConfig, "tools.chat.conversation:chat", {},
     "Chat with a router in the terminal, in a session; type /help for its commands."),
    ("bench", BenchConfig, "tools.bench.command:bench", {"group": TOOLS},
     "Send load to any OpenAI-compatible server and measure latencies, goodput and bytes."),
    ("plan", PlanConfig, "tools.plan.command:run", {"group": TOOLS, "hidden": PLAN_HIDDEN},
     "Predict memory, bytes, times and workers for a load, and whether to disaggregate and compress."),
    ("doctor", DoctorConfig, "tools.doctor.command:run", {"group": TOOLS},
     "Check this machine for the workers: device, memory, kernels, links; says what to change."),
    ("compile", CompileConfig, "tools.kernel_cache.command:run", {"group": TOOLS},
     "Fill Triton's cache with the kernels of models and GPUs; needs no GPU. Lists are comma-separated."),
    ("eval", EvalConfig, "tools.evaluation.command:run", {"group": TOOLS, "hidden": HIDDEN_OPTIONS},
     "Measure what compression costs in accuracy; lists are comma-separated."),
    ("calibrate", CalibrateConfig, "tools.evaluation.calibrate:calibrate",
     {"parent": calibrate, "is_default": True, "hidden": HIDDEN_OPTIONS}, ""),
    ("machine", CalibrateMachineConfig, "tools.plan.measure:calibrate_machine", {"parent": calibrate},
     "Measure how long this machine takes with a model, for kvferry plan --machine."),
    ("sessions", StoredConfig, "tools.operate.command:sessions", {"group": OPERATING},
     "List an API key's sessions, or delete one."),
    ("documents", StoredConfig, "tools.operate.command:documents", {"group": OPERATING},
     "List an API key's documents, or delete one."),
    ("keys", KeysConfig, "tools.operate.command:keys", {"group": OPERATING},
     "List the names, scopes and limits of a key file, or delete all that a key stored (--forget)."),
    ("router", RouterConfig, "services.router.server:run", {"group": SERVICES}, "Serve the OpenAI HTTP API."),
    ("prefill", PrefillConfig, "services.launcher.cli:run_prefill", {"group": SERVICES},
     "Run prompts, compress and ship their KV, and keep sessions' history."),
    ("decode", DecodeConfig, "services.decode.server:run", {"group": SERVICES},
     "Receive compressed KV and generate."),
)  # fmt: skip
"""Name, settings, the function that is run, options of `CommandLine.command`, help."""

for _name, _settings, _target, _options, _text in _COMMANDS:
    command(_settings, **_options)(_runner(_name, _target, _text))
app.command("kvferry.tools.launch:launch", help="Configure an agent or chat program to use a router.")
app.command("kvferry.tools.certs:certs", group=TOOLS, help="Make or renew the services' keys, for --certs.")
app.command(
    "kvferry.tools.operate.command:new_key",
    group=TOOLS,
    help="Make an API key: prints it, once, and its entry for the router's --api-keys-file.",
)


def run_prefill(config: PrefillConfig) -> None:
    """Run a prefill worker, which first calibrates its model if it is to."""
    from kvferry.services.prefill.server import run

    calibrate = None
    if config.calibrate:
        from kvferry.tools.evaluation.calibrate import worker_calibration

        calibrate = worker_calibration(config.model, config.calibration)
    asyncio.run(run(config, calibrate))


@app.command(group=TOOLS, help_flags=(), version_flags=())
def train_demo(*arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Train the demo model from its recipe."""
    from kvferry.tools.recall.train import main as train

    return train(arguments)
