"""A run's result while it grows: rows by table, and what failed. Written after every row, so that a run that
is killed leaves what it has measured."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from report import as_json


class Record:
    """Attributes: fields: tables and single values by name; `failures` has a line for each.

    Args: output: the file, None for none.
    """

    def __init__(self, output: Path | None = None) -> None:
        self.fields: dict[str, Any] = {"failures": []}
        self._output = output

    def table(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table so far, to be added to by `add` alone."""
        rows: list[dict[str, Any]] = self.fields.setdefault(name, [])
        return rows

    def add(self, table: str, *rows: dict[str, Any]) -> None:
        """Add rows to a table."""
        self.table(table).extend(rows)
        self.save()

    def fail(self, what: str, error: BaseException | None = None) -> None:
        """Note a failure in a line; of the first one the traceback, too, which is printed at once."""
        if error is not None:
            what = f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if "first_failure" not in self.fields:
                self.fields["first_failure"] = f"{what}\n{''.join(traceback.format_exception(error))}"
                sys.stderr.write(self.fields["first_failure"])
                sys.stderr.flush()
        self.fields["failures"].append(what)
        self.save()

    def save(self) -> None:
        """Write everything there is, in place of what was there."""
        if self._output is not None:
            write_whole(self._output, as_json(self.fields))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it has the old text or the new one at any time."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)
