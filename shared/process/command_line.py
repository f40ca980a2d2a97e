"""The command line: every field of a settings class is an option, through cyclopts.

    --field-name  >  KVFERRY_FIELD_NAME  >  the field's default

cyclopts parses, writes `--help` and completes in shells; pydantic validates. This module adds that a mistake
is one line without secrets, that an unknown `KVFERRY_*` variable is an error, and the exit codes. Nothing
else in the project reads the environment.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

from cyclopts import UNSET, App, CycloptsError, Parameter, Token
from pydantic import SkipValidation, ValidationError
from pydantic.fields import FieldInfo

from kvferry.shared.errors import ConfigurationError, KvferryError
from kvferry.shared.process.config import ENV_PREFIX, Settings
from kvferry.shared.process.version import VERSION

S = TypeVar("S", bound=Settings)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + 2


class CommandLine:
    """A command with subcommands, which `run_app` runs.

    Attributes:
        app: commands without settings are added to it.
        known: the settings classes of the others; their variables may be in the environment.
    """

    def __init__(self, name: str, description: str) -> None:
        self.known: list[type[Settings]] = []

        def check(app: App, commands: tuple[str, ...], arguments: object) -> None:
            check_environment(self.known, os.environ)

        self.app = App(
            name=name,
            help=description,
            help_format="plaintext",
            help_epilogue=f"Every option is also a variable: --log-level is {ENV_PREFIX}LOG_LEVEL.",
            version=lambda: f"{name} {VERSION}",
            config=check,
            group_parameters="Options",
            result_action="return_value",
            exit_on_error=False,
            print_error=False,
            suppress_keyboard_interrupt=False,
        )

    def command(
        self,
        settings: type[S],
        *,
        parent: App | None = None,
        group: str = "Commands",
        hidden: Collection[str] = (),
        is_default: bool = False,
    ) -> Callable[[Callable[[S], int | None]], Callable[[S], int | None]]:
        """Make a function of settings a subcommand: its name and docstring are the command's, fields are
        options.

        Args:
            parent: the command that it belongs to; None: the app.
            group: the heading in the app's help.
            hidden: fields that are no options of this command.
            is_default: the parent runs it where no subcommand is named.
        """
        self.known.append(settings)

        def add(run: Callable[[S], int | None]) -> Callable[[S], int | None]:
            def from_options(**given: Any) -> int | None:
                try:
                    config = settings(**given)
                except ValidationError as error:
                    raise ConfigurationError(_explain(error, settings, given)) from None
                return run(config)

            fields = [
                _option(name, info) for name, info in settings.model_fields.items() if name not in hidden
            ]
            # cyclopts reads a command's options from its signature.
            from_options.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
            app = self.app if parent is None else parent
            if is_default:
                app.default(from_options)
            else:
                app.command(from_options, name=run.__name__, group=group, help=run.__doc__)
            return run

        return add


def run_app(app: App, arguments: Sequence[str]) -> NoReturn:
    """Run the command that the arguments name, and end the process with its exit code.

    Mistakes of the user, one a line on stderr, are code 2; other errors are code 1.
    """
    chain, apps, rest = app.parse_commands(arguments)
    name = " ".join((app.name[0], *chain))
    try:
        if apps[-1].default_command is None and not rest:
            app.help_print(chain, console=app.error_console)
            raise SystemExit(EXIT_USAGE)
        raise SystemExit(app(arguments) or 0)
    except CycloptsError as error:
        code, told = EXIT_USAGE, f"{error} See {name} --help."
    except ConfigurationError as error:
        code, told = EXIT_USAGE, error.message
    except KvferryError as error:
        code, told = EXIT_FAILED, error.message
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    sys.stderr.write(f"{name}: {told}\n")
    raise SystemExit(code)


def check_environment(known: Collection[type[Settings]], environ: Mapping[str, str]) -> None:
    """Refuse `KVFERRY_*` variables that no settings class knows.

    Raises: ConfigurationError naming the first such variable and the nearest known one.
    """
    names = sorted({variable_name(field) for settings in known for field in settings.model_fields})
    for name in sorted(environ):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in names:
            near = difflib.get_close_matches(name.upper(), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise ConfigurationError(f"{name} is not a known variable; {hint}")


def option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def variable_name(field: str) -> str:
    return f"{ENV_PREFIX}{field.upper()}"


def _option(field: str, info: FieldInfo) -> inspect.Parameter:
    """Make a field's parameter for cyclopts: with the `Parameter`s (unit, group) of its annotation, not
    validated."""
    base = Parameter(
        help=info.description, converter=_as_given, show_default=_show_default, allow_repeating=True
    )
    metadata = (base, *(part for part in info.metadata if isinstance(part, Parameter)))
    skip = SkipValidation()  # type: ignore[type-arg]
    annotated: Any = Annotated  # otherwise mypy reads the next line as a type
    annotation = annotated[(info.annotation, skip, *metadata)]
    return inspect.Parameter(
        field, inspect.Parameter.KEYWORD_ONLY, default=info.default, annotation=annotation
    )


def _as_given(_: object, tokens: Sequence[Token]) -> Any:
    """Return a value as the user typed it: pydantic converts options as it converts variables."""
    (token,) = tokens
    return token.value if token.implicit_value is UNSET else token.implicit_value


def _show_default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value == "" else str(value)


def _explain(error: ValidationError, settings: type[Settings], given: Mapping[str, Any]) -> str:
    """Explain each mistake in one line: where it was given, its value, what is allowed."""
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
        value = "hidden" if secret else repr(given.get(field, detail["input"]))
        lines.append(f"{where} is {value}; {what}")
    return "\n".join(lines)
