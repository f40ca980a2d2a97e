"""Settings from a command line and the environment: every field of a settings class is an option.

    --field-name  >  KVFERRY_FIELD_NAME  >  the field's default

One environment may serve all services: a `KVFERRY_*` variable that any of them knows is accepted, any other
is an error that suggests the nearest name. Nothing else in the project reads the environment.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kvferry.shared.config import ENV_PREFIX, ServiceSettings
from kvferry.shared.errors import ConfigurationError

S = TypeVar("S", bound=ServiceSettings)

EXIT_USAGE = 2


def parse_settings(
    settings: type[S],
    arguments: Sequence[str],
    *,
    command: str,
    description: str,
    known: Iterable[type[ServiceSettings]] = (),
    hidden: Collection[str] = (),
) -> S:
    """Build a service's settings from its arguments, the environment and the defaults.

    Args:
        arguments: what follows the command's name.
        command: as the user typed it, for `--help`.
        known: settings classes whose variables may be in the environment as well.
        hidden: fields that are no options of this command.
    Raises:
        ConfigurationError: an unknown or invalid option or variable; the message names it, its value and
            what is allowed.
        SystemExit: after `--help` or `--version`.
    """
    check_environment({settings, *known}, os.environ)
    given = _parse_arguments(settings, arguments, command, description, hidden)
    try:
        return settings(**given)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, settings, given)) from None


def check_environment(known: Iterable[type[ServiceSettings]], environ: Mapping[str, str]) -> None:
    """Refuse `KVFERRY_*` variables that no settings class knows.

    Raises: ConfigurationError naming the first such variable and the nearest known one.
    """
    names = sorted({variable_name(field) for settings in known for field in settings.model_fields})
    for name in sorted(environ):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in names:
            raise ConfigurationError(f"{name} is not a known variable; {_nearest(name.upper(), names)}")


def option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def variable_name(field: str) -> str:
    return f"{ENV_PREFIX}{field.upper()}"


def version() -> str:
    """The installed distribution's version."""
    return metadata.version("kvferry")


def exit_with_usage(error: ConfigurationError, command: str) -> NoReturn:
    """End the process with the error's message and exit code 2."""
    sys.stderr.write(f"{command}: {error.message}\n")
    raise SystemExit(EXIT_USAGE)


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage, so that every mistake is told in one way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def _parse_arguments(
    settings: type[ServiceSettings],
    arguments: Sequence[str],
    command: str,
    description: str,
    hidden: Collection[str],
) -> dict[str, Any]:
    """Options that were given, by field, as strings (flags: booleans)."""
    parser = _Parser(
        prog=command,
        usage=f"{command} [OPTIONS]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog=f"Every option is also a variable: --log-level is {ENV_PREFIX}LOG_LEVEL.",
    )
    parser.add_argument("--version", action="version", version=f"kvferry {version()}")
    options = [name for name in settings.model_fields if name not in hidden]
    for name in options:
        _add_option(parser, name, settings.model_fields[name])
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [option_name(name) for name in options]
        wrong = unknown[0].partition("=")[0]
        raise ConfigurationError(f"{wrong} is not an option of {command}; {_nearest(wrong, names)}")
    return vars(given)


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    text = (field.description or "").replace("%", "%%")
    if field.annotation is bool:
        text = f"{text} (default: {'on' if field.default else 'off'})"
        parser.add_argument(option_name(name), action=argparse.BooleanOptionalAction, help=text)
        return
    default = "none" if field.default == "" else str(field.default).replace("%", "%%")
    parser.add_argument(
        option_name(name), metavar=_metavar(field.annotation), help=f"{text} (default: {default})"
    )


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    return {int: "N", float: "X"}.get(annotation, "VALUE")


def _explain(error: ValidationError, settings: type[ServiceSettings], given: Mapping[str, Any]) -> str:
    """One line a mistake: where it was given, its value, what is allowed."""
    lines = []
    for detail in error.errors(include_url=False):
        what = detail["msg"].removeprefix("Value error, ")
        what = what[:1].lower() + what[1:]
        if not detail["loc"]:
            lines.append(what)
            continue
        field = str(detail["loc"][0])
        where = option_name(field) if field in given else variable_name(field)
        secret = field in settings.model_fields and not settings.model_fields[field].repr
        value = "hidden" if secret else repr(detail["input"])
        lines.append(f"{where} is {value}; {what}")
    return "\n".join(lines)


def _nearest(name: str, names: Sequence[str]) -> str:
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(names)}"
