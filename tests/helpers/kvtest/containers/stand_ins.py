"""Images that cannot be pulled, stood in for: one Debian base with the same programs under their names.

Python, Redis and Prometheus come from Debian, wheels from the environment that runs the tests, so nothing is
fetched twice. The Dockerfiles build on it unchanged. `python -m kvtest.containers.stand_ins` makes it ahead.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import parse_tag, sys_tags

from kvtest.containers.engine import why_impossible

REPOSITORY = Path(__file__).parents[4]
PACKAGES = ("python3", "python3-venv", "python3-pip-whl", "ca-certificates", "redis-server", "prometheus")
DEBIAN_SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
RELEASE = "bookworm"
PYTHON = {"python_version": "3.11", "python_full_version": "3.11.2"}
"""Of the stand-in base; requirements may depend on it."""
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SUPPORTED = frozenset(sys_tags())
BASE_TIMEOUT_S = 900.0
CACHE = Path(sys.prefix) / "stand-in-base"
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/prometheus/*")


class NoBase(RuntimeError):
    """Debian's packages cannot be had on this machine."""


def make(engine: Any) -> None:
    """Import the base, and tag it as every image that the stack takes from elsewhere. Raises NoBase."""
    compose = (REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8")
    dockerfile = (REPOSITORY / "docker" / "cpu.Dockerfile").read_text(encoding="utf-8")
    python, *others = set(re.findall(r"^FROM (\S+:\S+)", dockerfile, flags=re.MULTILINE))
    engine.docker("import", "--change", f"ENV {PATH}", str(base()), python, timeout_s=BASE_TIMEOUT_S)
    for other in others:
        engine.docker("tag", python, other)
    for name, instructions in (
        ("redis", ""),
        ("prom/prometheus", 'USER 65534\nENTRYPOINT ["/bin/prometheus"]'),
    ):
        (image,) = re.findall(rf"image: ({name}:\S+)", compose)
        engine.docker("build", "--tag", image, "-", input=f"FROM {python}\n{instructions}\n")


# ---- the base --------------------------------------------------------------------------------------------


def base() -> Path:
    """A Debian file system as a tar archive, made once for what this environment holds. Raises NoBase."""
    names = _needed([Requirement(line) for line in _requirements()])
    found = {name: distribution for name in names if (distribution := _installed(name))}
    key = hashlib.sha256(Path(__file__).read_bytes())
    key.update(repr([(name, found[name].version if name in found else "") for name in names]).encode())
    path = CACHE / f"{key.hexdigest()[:16]}.tar"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            for old in CACHE.glob("*.tar"):
                old.unlink()
            with tempfile.TemporaryDirectory(prefix="kvferry-base-") as folder:
                wheels = Path(folder) / "wheels"
                _make_wheelhouse(wheels, found, [name for name in names if name not in found])
                _make_base(Path(folder), wheels).replace(path)
    return path


def _make_base(folder: Path, wheels: Path) -> Path:
    """It comes from the machine's own mirrors."""
    made, extra = CACHE / "part", folder / "extra.tar"
    _write_extra(extra, wheels)
    source = next((path for path in DEBIAN_SOURCES if Path(path).is_file()), None)
    command = [
        "mmdebstrap", "--quiet", "--variant=minbase", "--format=tar", f"--include={','.join(PACKAGES)}",
        "--dpkgopt=force-unsafe-io", *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
        f"--aptopt={_apt_configuration(folder)}",
        f"--customize-hook=tar-in {extra} /", RELEASE, str(made), *([source] if source else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=BASE_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NoBase(f"mmdebstrap failed:\n{done.stderr[-4000:]}")
    return made


def _apt_configuration(folder: Path) -> Path:
    """How this machine reaches its mirrors (proxies, checks of dates), for the apt of mmdebstrap."""
    path, wanted = folder / "apt.conf", re.compile(r"Acquire::(https?|Check-[\w-]+|Retries)\b")
    listed = subprocess.run(
        ["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [line for line in listed.stdout.splitlines(keepends=True) if wanted.match(line)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _write_extra(path: Path, wheels: Path) -> None:
    """What official images have and Debian packages do not, and the wheels with pip told of them."""
    pip = path.with_name("pip.conf")
    pip.write_text("[global]\nno-index = true\nfind-links = /opt/wheels\n", encoding="ascii")
    with tarfile.open(path, "w") as archive:
        for name, owner in (("data", 999), ("prometheus", 65534)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o755, owner, owner
            archive.addfile(folder)
        link = tarfile.TarInfo("usr/local/bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, "/usr/bin/python3"
        archive.addfile(link)
        archive.add(pip, "etc/pip.conf")
        archive.add(wheels, "opt/wheels")


# ---- wheels ----------------------------------------------------------------------------------------------


def _requirements() -> list[str]:
    return subprocess.run(
        [sys.executable, REPOSITORY / "docker" / "requirements.py"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60,
    ).stdout.splitlines()  # fmt: skip


def _installed(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _make_wheelhouse(folder: Path, found: dict[str, metadata.Distribution], missing: list[str]) -> None:
    """Wheels of everything that the image installs: from this environment where it is there, else by pip."""
    folder.mkdir()
    for distribution in found.values():
        _pack(distribution, folder)
    if missing:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *missing],
            check=True,
            timeout=600,
        )


def _needed(roots: list[Requirement]) -> list[str]:
    """Names of the distributions that the base's Python would install for these."""
    environment = {**default_environment(), **PYTHON}
    seen: set[tuple[str, str]] = set()
    names: dict[str, None] = {}
    waiting = [(requirement, "") for requirement in roots]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) in seen:
                continue
            seen.add((requirement.name, wanted))
            names[requirement.name] = None
            distribution = _installed(requirement.name)
            further = (distribution.requires if distribution else None) or []
            waiting += [(Requirement(line), wanted) for line in further]
    return list(names)


def _pack(distribution: metadata.Distribution, folder: Path) -> None:
    """An installed distribution as the wheel that it came from."""
    files = [
        path
        for path in distribution.files or []
        if not path.is_absolute()
        and ".." not in path.parts
        and path.suffix != ".pyc"
        and path.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
    ]
    (described,) = {path.parts[0] for path in files if path.parts[0].endswith(".dist-info")}
    tags = re.findall(r"^Tag: (\S+)", distribution.read_text("WHEEL") or "", flags=re.MULTILINE)
    # One wheel may be for Python 2 as well; of its tags any that fits here will do.
    tag = next(tag for tag in tags if parse_tag(tag) & SUPPORTED)
    target = folder / f"{described.removesuffix('.dist-info')}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in files:
            archive.write(str(path.locate()), str(path))
        record = "".join(f"{path},,\n" for path in (*files, f"{described}/RECORD"))
        archive.writestr(f"{described}/RECORD", record)


if __name__ == "__main__" and not why_impossible():
    try:
        base()
    except (NoBase, OSError, subprocess.SubprocessError) as error:
        print(f"the containers' base could not be made ahead: {error}", file=sys.stderr)  # noqa: T201
