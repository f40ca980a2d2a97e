"""Make a release: version, changelog, manifests, wheel and sdist, commit and tag, by one command.

    python tools/release.py VERSION [--output dist]        or: make release VERSION=...

The entries below `## Unreleased` in CHANGELOG.md become those of the version, and the tag's message. Files
are built before anything is committed; if a step fails, the files that it changed are restored.
`make test-all` must have passed on what is released. Nothing is pushed. Needs the `dev` extra, and git.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

_UNRELEASED = "## Unreleased\n"
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_VERSION_LINES = {
    Path("pyproject.toml"): r'^version = "(.*)"$',
    Path("deploy/helm/kvferry/Chart.yaml"): r"^(?:appVersion|version): (.*)$",
    Path("deploy/helm/kvferry/values-cpu.yaml"): r"^  tag: cpu-(.*)$",
}
"""Where the version stands; the first one owns it."""
_TESTED = Path("benchmarks/results/test-all/latest.json")
_TIMEOUT_S = 600.0


class Refused(Exception):
    """The repository is not ready for this release."""


def release(repository: Path, version: str, output: Path, today: datetime.date) -> str:
    """Make the release.

    Returns: the tag.
    Raises:
        Refused: a version that does not follow the present one, uncommitted changes, or nothing to release.
        subprocess.CalledProcessError: a step failed.
    """
    tag = f"v{version}"
    entries = _check(repository, version, tag)
    try:
        _write_version(repository, version)
        changelog = repository / "CHANGELOG.md"
        text = changelog.read_text(encoding="utf-8")
        heading = f"{_UNRELEASED}\n## {version} ({today.isoformat()})\n"
        changelog.write_text(text.replace(_UNRELEASED, heading, 1), encoding="utf-8")
        _run(repository, sys.executable, "deploy/helm/render.py")
        _run(
            repository,
            *(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output.resolve())),
        )
        subject = f"release: {version}"
        _run(repository, "git", "commit", "--quiet", "--all", "--message", subject)
    except BaseException:
        _run(repository, "git", "checkout", "--quiet", "HEAD", "--", ".")
        raise
    # Lines of Markdown that begin with # are not comments.
    message = f"kvferry {version}\n\n{entries}"
    _run(repository, "git", "tag", "--annotate", "--cleanup=verbatim", "--message", message, tag)
    return tag


def _check(repository: Path, version: str, tag: str) -> str:
    """Check that a release can be made. Returns: the changelog's entries since the last release."""
    if not _VERSION.fullmatch(version):
        raise Refused(f"VERSION is {version!r}; it must be three numbers, such as 1.2.3")
    present = _present_version(repository)
    if _numbers(version) <= _numbers(present):
        raise Refused(f"VERSION is {version}; it must be above {present}, the present one")
    if changed := _run(repository, "git", "status", "--porcelain", "--untracked-files=no"):
        raise Refused(f"there are uncommitted changes:\n{changed}")
    if _run(repository, "git", "tag", "--list", tag):
        raise Refused(f"the tag {tag} exists")
    _check_tests(repository)
    _, found, rest = (repository / "CHANGELOG.md").read_text(encoding="utf-8").partition(_UNRELEASED)
    entries = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not found or not entries:
        raise Refused("CHANGELOG.md has no entries below '## Unreleased'")
    return entries


def _check_tests(repository: Path) -> None:
    """Check that all tests have passed on what is released. Their result may be a commit of its own."""
    path = repository / _TESTED
    if not path.exists():
        raise Refused(f"there is no {_TESTED}; make test-all writes it")
    tested = json.loads(path.read_text(encoding="utf-8"))
    counts = tested["counts"]
    if tested["lane"] != "all" or not counts["passed"] or counts.get("failed") or counts.get("error"):
        raise Refused(f"{_TESTED} is of lane {tested['lane']!r} with {counts}; make test-all must pass")
    without_result = ("--", f":!{_TESTED}")
    try:
        changed = _run(repository, "git", "diff", "--name-only", tested["commit"], "HEAD", *without_result)
    except subprocess.CalledProcessError:
        raise Refused(f"{_TESTED} is of {tested['commit']!r}, which is no commit here") from None
    if changed:
        raise Refused(f"{_TESTED} is of {tested['commit'][:12]}, and these have changed since:\n{changed}")


def _present_version(repository: Path) -> str:
    path, pattern = next(iter(_VERSION_LINES.items()))
    found = re.search(pattern, (repository / path).read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise Refused(f"{path} has no version")
    return found[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _write_version(repository: Path, version: str) -> None:
    for path, pattern in _VERSION_LINES.items():
        text = (repository / path).read_text(encoding="utf-8")
        written = re.sub(pattern, lambda line: line[0].replace(line[1], version), text, flags=re.MULTILINE)
        (repository / path).write_text(written, encoding="utf-8")


def _run(repository: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=repository, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="a folder for wheel and sdist")
    arguments = parser.parse_args()
    try:
        tag = release(
            Path(__file__).resolve().parents[1], arguments.version, arguments.output, datetime.date.today()
        )
    except Refused as error:
        sys.exit(str(error))
    sys.stdout.write(
        f"{tag} is committed and tagged; its files are in {arguments.output}. Push both to publish it.\n"
    )


if __name__ == "__main__":
    main()
