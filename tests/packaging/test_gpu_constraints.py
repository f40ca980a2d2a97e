"""The GPU image's torch, Triton and CUDA are one set, its base and driver fit, and pip resolves it.

What torch pins is read from its metadata at the configured registry; the wheels are not downloaded.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from kvferry.shared.device.cuda_driver import LEAST_DRIVERS

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = (REPOSITORY / "docker" / "gpu.Dockerfile").read_text(encoding="utf-8")
NAMES = ("torch", "triton")
MISSING = re.compile(r"No matching distribution found for (\S+)")
TIMEOUT_S = 240


def pins(name: str) -> dict[str, str]:
    lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def dry_run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """pip as the image runs it: for its Python and platform, from wheels, without installing."""
    report = folder / "report.json"
    options = ["--dry-run", "--ignore-installed", "--no-input", "--quiet", "--only-binary=:all:"]
    options += ["--python-version", "3.12", "--implementation", "cp", "--target", str(folder / "target")]
    for minor in range(39, 16, -1):
        options += ["--platform", f"manylinux_2_{minor}_x86_64"]
    options += ["--platform", "manylinux2014_x86_64", "--report", str(report)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=folder
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package registry did not answer within {TIMEOUT_S} s")
    return done, report


def requirement(metadata: dict[str, Any], name: str) -> str:
    (found,) = [line for line in metadata["requires_dist"] if re.match(rf"{name}\b(?!-)", line)]
    return str(found)


@pytest.mark.full
def test_torch_pins_the_triton_and_the_cuda_of_the_constraints_and_the_base(tmp_path: Path) -> None:
    wanted = pins("constraints-gpu.txt")
    done, report = dry_run(tmp_path, "--no-deps", f"torch=={wanted['torch']}")
    if done.returncode:
        pytest.skip(f"the package registry has no torch {wanted['torch']}: {done.stderr.strip()[-200:]}")
    (torch,) = json.loads(report.read_text())["install"]
    assert f"=={wanted['triton']}" in requirement(torch["metadata"], "triton")
    assert f"=={wanted['cuda-toolkit']}" in requirement(torch["metadata"], "cuda-toolkit")


def test_the_base_and_the_driver_requirement_are_those_of_the_cuda() -> None:
    cuda = pins("constraints-gpu.txt")["cuda-toolkit"]
    major_minor = ".".join(cuda.split(".")[:2])
    base = re.search(r"^FROM nvidia/cuda:([\d.]+)-base", DOCKERFILE, re.MULTILINE)
    assert base is not None
    assert base[1].startswith(f"{major_minor}.")
    assert f'NVIDIA_REQUIRE_CUDA="cuda>={major_minor}"' in DOCKERFILE
    assert f'kvferry.least-nvidia-driver="{LEAST_DRIVERS[int(cuda.split(".")[0])]}"' in DOCKERFILE


def test_the_tested_triton_is_that_of_the_image() -> None:
    assert pins("constraints.txt")["triton"] == pins("constraints-gpu.txt")["triton"]


def requirements(*extras: str) -> str:
    """What the package needs, as the images' builds print it."""
    return subprocess.run(
        [sys.executable, "-P", "docker/requirements.py", *extras],
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip


def test_the_extra_has_the_pair_of_the_image_and_the_others_leave_it_open() -> None:
    """What pip honours without a constraints file. The tests' environment has another torch, for the CPU."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = pins("constraints-gpu.txt")
    gpu = {
        dependency.name: dependency
        for dependency in map(Requirement, project["optional-dependencies"]["gpu"])
    }
    assert {name: str(dependency.specifier) for name, dependency in gpu.items()} == {
        name: f"=={wanted[name]}" for name in NAMES
    }
    assert {str(dependency.marker) for dependency in gpu.values()} == {'sys_platform == "linux"'}
    tested = pins("constraints.txt")
    for dependency in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]]):
        if dependency.name in NAMES:
            assert wanted[dependency.name] in dependency.specifier
            assert tested[dependency.name] in dependency.specifier


def test_the_pages_name_the_extra_s_torch_and_its_driver() -> None:
    wanted = pins("constraints-gpu.txt")
    driver = LEAST_DRIVERS[int(wanted["cuda-toolkit"].split(".")[0])]
    text = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if "'.[gpu]'" in line]
    assert f"torch {wanted['torch']} for NVIDIA's driver {driver} or newer" in line
    box = (REPOSITORY / "docs" / "gpu-box.md").read_text(encoding="utf-8")
    assert f"a driver of version {driver} or newer" in box


def chosen_by(report: Path) -> dict[str, str]:
    """The versions of pip's report, by name."""
    return {
        package["metadata"]["name"].lower(): package["metadata"]["version"]
        for package in json.loads(report.read_text())["install"]
    }


def resolved(folder: Path, *arguments: str) -> dict[str, str]:
    """What pip takes; skips where the registry lacks a wheel, which says nothing about the set."""
    done, report = dry_run(folder, *arguments)
    if done.returncode:
        missing = MISSING.search(done.stderr)
        assert missing is not None, done.stderr
        # a conflict has another message
        assert "conflicting dependencies" not in done.stderr, done.stderr
        pytest.skip(f"the package registry lacks {missing[1]}")
    return chosen_by(report)


@pytest.mark.full
def test_pip_takes_the_pair_without_a_constraints_file(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(requirements("gpu"))
    chosen, wanted = resolved(tmp_path, "-r", "requirements.txt"), pins("constraints-gpu.txt")
    assert {name: chosen[name] for name in wanted} == wanted


@pytest.mark.full
def test_pip_finds_the_image_s_packages_consistent(tmp_path: Path) -> None:
    others = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "requirements.txt").write_text(requirements("gpu"))
    left = [line for line in others if line.partition("==")[0] not in NAMES]
    (tmp_path / "constraints-others.txt").write_text("\n".join(left))
    constraints = ["-c", str(REPOSITORY / "constraints-gpu.txt"), "-c", "constraints-others.txt"]
    chosen = resolved(tmp_path, *constraints, "-r", "requirements.txt")
    for name, version in pins("constraints-gpu.txt").items():
        assert chosen[name] == version
    assert not [name for name in chosen if re.search(r"-cu(?!13)\d\d$", name)], "libraries of another CUDA"
