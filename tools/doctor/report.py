"""The doctor's findings: one for each check, shown as a table or as JSON."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Literal

Verdict = Literal["ok", "warn", "fail", "skip"]
WIDTH = 110
_PACKAGES = ("kvferry", "torch", "triton", "transformers", "numpy")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's result.

    Attributes: found: what is there; advice: what to change, if anything; data: numbers for the report.
    """

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    data: Mapping[str, object] = field(default_factory=dict)


def guarded(check: str, run: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check; an exception becomes a failed finding."""
    try:
        return list(run())
    except Exception as error:  # a check that cannot run is a finding too
        text = f"{type(error).__name__}: {error}"
        return [
            Finding(check=check, verdict="fail", found=text, advice="report this with kvferry doctor's JSON")
        ]


def is_well(findings: Sequence[Finding]) -> bool:
    """Return whether nothing is wrong; warnings do not count as wrong."""
    return all(finding.verdict != "fail" for finding in findings)


def as_table(findings: Sequence[Finding]) -> str:
    """Write one row for each finding, with advice below it."""
    name_width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{finding.check:{name_width}}  {finding.verdict:4}  "
        indent = " " * len(head)
        lines += textwrap.wrap(head + finding.found, WIDTH, subsequent_indent=indent)
        if finding.advice:
            lines += textwrap.wrap(f"{indent}-> {finding.advice}", WIDTH, subsequent_indent=f"{indent}   ")
    counts = {
        verdict: sum(each.verdict == verdict for each in findings) for verdict in ("ok", "warn", "fail")
    }
    lines.append("")
    lines.append(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} wrong")
    return "\n".join(lines) + "\n"


def as_json(findings: Sequence[Finding]) -> str:
    """Write versions and every finding, for a bug report. It has neither host names nor keys."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    report = {
        "is_well": is_well(findings),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=1) + "\n"
