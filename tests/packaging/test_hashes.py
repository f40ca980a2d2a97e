"""The digests cover what the package needs, in the versions that the tests run with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
DIGEST = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def locked() -> dict[str, list[tuple[Requirement, str]]]:
    """Each package's requirements, with the digests that belong to them."""
    text = (REPOSITORY / "constraints-hashes.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[tuple[Requirement, str]]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            what, _, digests = line.partition("--hash=")
            requirement = Requirement(what.strip())
            found.setdefault(canonicalize_name(requirement.name), []).append(
                (requirement, f"--hash={digests}")
            )
    return found


def version(requirement: Requirement) -> str:
    (pin,) = requirement.specifier
    assert pin.operator == "==", requirement
    return pin.version


def test_every_version_is_exact_and_has_digests(locked: dict[str, list[tuple[Requirement, str]]]) -> None:
    assert len(locked) > 50
    for entries in locked.values():
        for requirement, digests in entries:
            assert version(requirement)
            assert all(DIGEST.fullmatch(digest) for digest in digests.split()), requirement


def test_what_the_package_needs_is_locked_in_an_allowed_version(
    locked: dict[str, list[tuple[Requirement, str]]],
) -> None:
    command = [sys.executable, "docker/requirements.py"]
    needed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    for requirement in map(Requirement, needed.splitlines()):
        if requirement.name != "torch":
            for entry, _ in locked[canonicalize_name(requirement.name)]:
                assert requirement.specifier.contains(version(entry)), requirement


def test_the_digests_are_of_the_versions_of_the_constraints(
    locked: dict[str, list[tuple[Requirement, str]]],
) -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    compared = 0
    for requirement in pinned:
        for entry, _ in locked.get(canonicalize_name(requirement.name), []):
            assert requirement.specifier.contains(version(entry)), requirement
            compared += 1
    assert compared > 10


def test_torch_is_left_to_the_platform(locked: dict[str, list[tuple[Requirement, str]]]) -> None:
    assert not [name for name in locked if name in ("torch", "triton") or name.startswith("nvidia")]
