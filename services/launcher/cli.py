"""The `kvferry` command: picks a subcommand, reads its settings, runs it.

    kvferry serve | router | prefill | decode | chat | eval | calibrate | train-demo [--option value ...]

Exit codes: 0 done, 1 failed, 2 wrong options or configuration.
"""

from __future__ import annotations

import asyncio
import difflib
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvferry.shared.command_line import EXIT_USAGE, exit_with_usage, parse_settings, version
from kvferry.shared.config import ServiceSettings
from kvferry.shared.errors import ConfigurationError, KvferryError

EXIT_FAILED = 1

_USAGE = """usage: kvferry COMMAND [OPTIONS]

Long-context chat whose KV cache is compressed before it travels.

commands:
  serve       router, prefill and decode on this machine
  chat        talk to a router from the terminal, with a session
  eval        measure what compression costs in accuracy
  calibrate   measure epsilon tables (calibrate epsilon) or quality curves (calibrate quality) of a model
  train-demo  train the demo model from its recipe
  router      the OpenAI HTTP API
  prefill     a worker that runs prompts, compresses and ships their KV, and keeps sessions' history
  decode      a worker that receives compressed KV and generates

kvferry COMMAND --help shows a command's options; all but train-demo's are also variables KVFERRY_*.
"""

_CALIBRATE_USAGE = """usage: kvferry calibrate epsilon|quality [OPTIONS]

  epsilon  RDKV's distortion table of a model, for the services' --epsilon-tables
  quality  how much of a prompt methods need for a wanted quality, for the router's --calibration

kvferry calibrate epsilon --help and kvferry calibrate quality --help show their options.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process with an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.stderr.write(_USAGE)
        raise SystemExit(EXIT_USAGE)
    command, *rest = arguments
    if command in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return
    if command == "--version":
        sys.stdout.write(f"kvferry {version()}\n")
        return
    if command not in _COMMANDS:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(_COMMANDS)}"
        exit_with_usage(ConfigurationError(f"{command!r} is not a command; {hint}"), "kvferry")
    try:
        code = _COMMANDS[command](rest)
    except ConfigurationError as error:
        exit_with_usage(error, f"kvferry {command}")
    except KvferryError as error:
        sys.stderr.write(f"kvferry {command}: {error.message}\n")
        code = EXIT_FAILED
    except KeyboardInterrupt:
        code = 128 + 2
    raise SystemExit(code)


# Commands import what they need when they run: `kvferry --help` should not wait for torch.


def _serve(arguments: Sequence[str]) -> int:
    from kvferry.services.launcher.config import HIDDEN_FROM_SERVE, KNOWN_CONFIGS, ServeConfig
    from kvferry.services.launcher.serve import serve

    config = parse_settings(
        ServeConfig,
        arguments,
        command="kvferry serve",
        description="Run router, prefill and decode on this machine; options of all three are accepted.",
        known=KNOWN_CONFIGS,
        hidden=HIDDEN_FROM_SERVE,
    )
    return asyncio.run(serve(config))


def _chat(arguments: Sequence[str]) -> int:
    from kvferry.services.launcher.chat import chat
    from kvferry.services.launcher.config import KNOWN_CONFIGS, ChatConfig

    config = parse_settings(
        ChatConfig,
        arguments,
        command="kvferry chat",
        description="Chat in the terminal; type /help for commands.",
        known=KNOWN_CONFIGS,
        hidden=("log_level", "log_format", "ready_file"),
    )
    return asyncio.run(chat(config))


def _router(arguments: Sequence[str]) -> int:
    from kvferry.services.router.config import RouterConfig
    from kvferry.services.router.server import run

    return _service(RouterConfig, run, arguments, "router", "Serve the OpenAI HTTP API.")


def _prefill(arguments: Sequence[str]) -> int:
    from kvferry.services.prefill.config import PrefillConfig
    from kvferry.services.prefill.server import run

    return _service(PrefillConfig, run, arguments, "prefill", "Run prompts, compress and ship their KV.")


def _decode(arguments: Sequence[str]) -> int:
    from kvferry.services.decode.config import DecodeConfig
    from kvferry.services.decode.server import run

    return _service(DecodeConfig, run, arguments, "decode", "Receive compressed KV and generate.")


def _eval(arguments: Sequence[str]) -> int:
    from kvferry.services.launcher.config import KNOWN_CONFIGS
    from kvferry.tools.evaluation.command import run
    from kvferry.tools.evaluation.config import HIDDEN_OPTIONS, EvalConfig

    config = parse_settings(
        EvalConfig,
        arguments,
        command="kvferry eval",
        description="Compare compression methods on recall tasks; lists are comma-separated.",
        known=KNOWN_CONFIGS,
        hidden=HIDDEN_OPTIONS,
    )
    return run(config)


def _calibrate(arguments: Sequence[str]) -> int:
    from kvferry.services.launcher.config import KNOWN_CONFIGS
    from kvferry.tools.evaluation.calibrate import calibrate_epsilon, calibrate_quality
    from kvferry.tools.evaluation.calibration_config import CalibrateEpsilonConfig, CalibrateQualityConfig
    from kvferry.tools.evaluation.config import HIDDEN_OPTIONS

    kind, *rest = arguments or ("",)
    if kind in ("-h", "--help"):
        sys.stdout.write(_CALIBRATE_USAGE)
        return 0
    if kind == "epsilon":
        return calibrate_epsilon(
            parse_settings(
                CalibrateEpsilonConfig,
                rest,
                command="kvferry calibrate epsilon",
                description="Measure RDKV's distortion table on a model's own K and V.",
                known=KNOWN_CONFIGS,
                hidden=HIDDEN_OPTIONS,
            )
        )
    if kind == "quality":
        return calibrate_quality(
            parse_settings(
                CalibrateQualityConfig,
                rest,
                command="kvferry calibrate quality",
                description="Fit how much of a prompt each method needs for a wanted quality.",
                known=KNOWN_CONFIGS,
                hidden=HIDDEN_OPTIONS,
            )
        )
    raise ConfigurationError(f"{kind!r} is not something to calibrate; it must be epsilon or quality")


def _train_demo(arguments: Sequence[str]) -> int:
    from kvferry.tools.recall.train import main as train

    return train(arguments)


def _service(
    settings: type[ServiceSettings],
    run: Callable[[Any], Coroutine[Any, Any, None]],
    arguments: Sequence[str],
    name: str,
    description: str,
) -> int:
    from kvferry.services.launcher.config import KNOWN_CONFIGS

    config = parse_settings(
        settings, arguments, command=f"kvferry {name}", description=description, known=KNOWN_CONFIGS
    )
    asyncio.run(run(config))
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "chat": _chat,
    "eval": _eval,
    "calibrate": _calibrate,
    "train-demo": _train_demo,
    "router": _router,
    "prefill": _prefill,
    "decode": _decode,
}
