"""The release command in a clone: version, changelog, wheel, sdist, commit and tag; or nothing at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


@pytest.fixture
def clone(sources: Path, tmp_path: Path) -> Path:
    """The repository as it is here, as one commit of a repository of its own."""
    return Path(shutil.copytree(sources, tmp_path / "clone", symlinks=True))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("release")
    if not (REPOSITORY / ".git").exists():
        pytest.skip("the sources are not in a git repository")
    folder = tmp_path / "sources"
    folder.mkdir()
    names = git(REPOSITORY, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    archive = tmp_path / "sources.tar"
    with tarfile.open(archive, "w") as packed:
        for name in filter(None, names):
            if (REPOSITORY / name).exists() and not name.startswith(("benchmarks/", "tests/")):
                packed.add(REPOSITORY / name, arcname=name, recursive=False)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="tar")
    git(folder, "init", "--quiet")
    for name, value in (("name", "a"), ("email", "a@b.example")):
        git(folder, "config", f"user.{name}", value)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "sources")
    return folder


def release(clone: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/release.py", version, "--output", "../dist"]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False, timeout=800)


def note_tests(clone: Path, **changed: object) -> None:
    """Commit what `make test-all` writes."""
    result = {"commit": git(clone, "rev-parse", "HEAD"), "lane": "all", "counts": {"passed": 9}} | changed
    path = clone / "benchmarks" / "results" / "test-all" / "latest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "whole tests")


def test_what_the_whole_tests_have_not_passed_on_is_not_released(clone: Path) -> None:
    head = git(clone, "rev-parse", "HEAD")
    assert "there is no benchmarks/results/test-all/latest.json" in release(clone, "0.2.0").stderr
    note_tests(clone, counts={"passed": 9, "failed": 1})
    assert "must pass" in release(clone, "0.2.0").stderr
    note_tests(clone, lane="fast")
    assert "is of lane 'fast'" in release(clone, "0.2.0").stderr
    note_tests(clone, commit=f"{head} and changes")
    assert "is no commit here" in release(clone, "0.2.0").stderr
    (clone / "README.md").write_text("Other words.")
    note_tests(clone, commit=head)
    assert "have changed since:\nREADME.md" in release(clone, "0.2.0").stderr


def test_a_release_that_does_not_build_changes_nothing(clone: Path) -> None:
    path = clone / "pyproject.toml"
    path.write_text(path.read_text().replace('build-backend = "', 'build-backend = "there_is_no.'))
    git(clone, "commit", "--quiet", "--all", "--message", "broken")
    note_tests(clone)
    head = git(clone, "rev-parse", "HEAD")
    assert release(clone, "0.2.0").returncode != 0
    assert git(clone, "rev-parse", "HEAD") == head
    assert git(clone, "status", "--porcelain", "--untracked-files=no") == ""
    assert git(clone, "tag", "--list") == ""


def test_a_release_is_one_command(clone: Path) -> None:
    changelog = clone / "CHANGELOG.md"
    for version, why in (
        ("1.0", "three numbers"),
        ("0.1.0", "above 0.1.0"),
        ("0.0.9", "above 0.1.0"),
    ):
        refused = release(clone, version)
        assert refused.returncode == 1
        assert why in refused.stderr
    before = changelog.read_text(encoding="utf-8")
    changelog.write_text("# Changelog\n\n## Unreleased\n\n- It can be released.\n\n## 0.1.0\n\n- First.\n")
    assert "uncommitted changes" in release(clone, "0.2.0").stderr
    git(clone, "commit", "--quiet", "--all", "--message", "changelog")
    note_tests(clone)
    assert before != changelog.read_text(encoding="utf-8")

    done = release(clone, "0.2.0")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert git(clone, "status", "--porcelain", "--untracked-files=no") == ""
    assert git(clone, "log", "-1", "--format=%s") == "release: 0.2.0"
    assert git(clone, "rev-parse", "v0.2.0^{commit}") == git(clone, "rev-parse", "HEAD")
    assert git(clone, "tag", "--list", "--format=%(contents)", "v0.2.0") == (
        "kvferry 0.2.0\n\n- It can be released."
    )
    headings = [line for line in changelog.read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "## Unreleased"
    assert headings[1].startswith("## 0.2.0 (20")
    assert headings[2:] == ["## 0.1.0"]
    for name in ("deploy/helm/kvferry/Chart.yaml", "deploy/kubernetes/cpu.yaml", "pyproject.toml"):
        text = (clone / name).read_text(encoding="utf-8")
        assert "0.2.0" in text
        assert "0.1.0" not in text
    dist = clone.parent / "dist"
    assert sorted(path.name for path in dist.iterdir()) == [
        "kvferry-0.2.0-py3-none-any.whl",
        "kvferry-0.2.0.tar.gz",
    ]
    with zipfile.ZipFile(dist / "kvferry-0.2.0-py3-none-any.whl") as wheel:
        assert "Version: 0.2.0" in wheel.read("kvferry-0.2.0.dist-info/METADATA").decode()
    note_tests(clone)
    assert "no entries" in release(clone, "0.3.0").stderr
