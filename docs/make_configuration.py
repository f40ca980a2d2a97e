"""Writes docs/configuration.md from the settings classes.

python docs/make_configuration.py docs/configuration.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.argument import Argument

from kvferry.services.launcher.cli import app
from kvferry.shared.process.command_line import variable_name

SECTIONS = {
    "Services": ("router", "prefill", "decode", "serve"),
    "Chat": ("chat",),
    "Operating": ("sessions", "documents", "keys"),
    "Load": ("bench",),
    "Plan": ("plan",),
    "Machine": ("doctor", "compile"),
    "Evaluation": ("eval",),
    "Calibration": ("calibrate", "calibrate machine"),
}
KINDS = {"BYTES": "bytes", "TIME": "time", str: "text", int: "integer", float: "number", bool: "on or off"}

INTRODUCTION = """# Configuration

Every setting is an option of a command and a variable: `--arena-bytes 10GiB` is `KVFERRY_ARENA_BYTES=10GiB`.
An option wins over a variable, a variable over the default. One environment may hold the variables of all
services; an unknown option or `KVFERRY_*` variable is an error at start that suggests the nearest name.

Sizes are bytes (`4096`) or have a unit (`512MB`, `10GiB`). Times are seconds (`90`) or have a unit (`250ms`,
`30s`, `5min`, `2h`, `7d`).

`kvferry COMMAND --help` shows a command's options; `kvferry --install-completion` makes bash, zsh, fish and
PowerShell complete commands, options and values.

Sessions belong to the API key that made them. `--history-redis` makes sessions, documents and their KV
outlive restarts and serves other routers and workers ([forms of the URL](operations.md#redis)). Prometheus
metrics are at `/metrics` of the router (`?all=1` includes the workers' under `serve`) and at each worker's
`--metrics-listen`. `/health` says that the process is alive, `/ready` that requests succeed, and `/version`
which path each kernel takes.
"""


def main(target: Path) -> None:
    target.write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the whole page."""
    tables = (line for title, commands in SECTIONS.items() for line in _section(title, commands))
    return "\n".join([INTRODUCTION, *tables])


def _section(title: str, commands: Sequence[str]) -> Iterator[str]:
    """Yield a table for each group; commands that agree about an option share its row."""
    owners: dict[tuple[Any, str], list[str]] = {}
    for command in commands:
        for argument in _command(command).assemble_argument_collection():
            groups: Any = argument.parameter.group
            owners.setdefault((groups[0], _cells(argument)), []).append(command)
    yield f"## {title}\n"
    for group in sorted({group for group, _ in owners}, key=_place):
        yield f"### {title}: {group.name[:1].lower()}{group.name[1:]}\n"
        yield "| option | of | variable | value | default | what it sets |"
        yield "|---|---|---|---|---|---|"
        for (owner_group, cells), of in owners.items():
            if owner_group == group:
                option, _, rest = cells.partition(" | ")
                yield f"| {option} | {', '.join(of)} | {rest} |"
        yield ""


def _command(words: str) -> App:
    found = app
    for word in words.split():
        found = found[word]
    return found


def _place(group: Any) -> int:
    """Return a sort key: options without a group first, then as in `--help`."""
    return group.sort_key[1] if isinstance(group.sort_key, tuple) else -1


def _cells(argument: Argument) -> str:
    """Return an option's name, variable, kind of value, default and meaning."""
    parameter, default = argument.parameter, argument.field_info.default
    choices = argument.get_choices()
    kind = (
        ", ".join(f"`{choice}`" for choice in choices)
        if choices
        else KINDS[parameter.metavar or argument.hint]
    )
    show: Any = parameter.show_default
    cells = (
        f"`{argument.name}`",
        f"`{variable_name(argument.field_info.name)}`",
        ", ".join(f"`{choice}`" for choice in choices) if choices else kind,
        "" if default == "" else f"`{show(default)}`",
        parameter.help or "",
    )
    return " | ".join(cells)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
