"""What `kvferry compile` stores is what Triton looks up when a worker launches; no compiler is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.kernels.prebuilt_cache import PREBUILT_FOLDER, PrebuiltCache
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.kernel_cache.command import run
from kvferry.tools.kernel_cache.config import CompileConfig
from kvferry.tools.kernel_cache.shapes import SHIPPED

REPOSITORY = Path(__file__).parents[3]
SHAPE = SHIPPED["Llama-3.2-1B"]
LOOK_UP = Path(__file__).with_name("look_up.py")


def environment(**changes: str) -> dict[str, str]:
    """Without Triton's interpreter; a process has one thread, as the kernels are small."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linked as Ubuntu links by default, and Debian does not: without libraries that nothing is called of."""
    folder = tmp_path_factory.mktemp("prebuilt")
    compiler = tmp_path_factory.mktemp("compiler") / "cc"
    real = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"
    compiler.write_text(f'#!/bin/sh\nexec {real} -Wl,--as-needed "$@"\n')
    compiler.chmod(0o755)
    command = [
        str(Path(sys.executable).with_name("kvferry")), "compile", "--shapes", SHAPE.name,
        "--architectures", "sm_90", "--only", "_append_rows", "--folder", str(folder),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment(CC=str(compiler)), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"1 of 1: Llama-3.2-1B on sm_90, [1-9] kernels and [2-9] launchers", done.stdout)
    return folder


def look_up(prebuilt: Path, tmp_path: Path, capability: int) -> dict[str, Any]:
    """A step's appended rows as a worker launches them, in a process that finds no C compiler."""
    done = subprocess.run(
        [sys.executable, str(LOOK_UP), *map(str, (prebuilt, capability, SHAPE.num_kv_heads, SHAPE.head_dim))],
        capture_output=True, text=True, timeout=280, check=False,
        env=environment(
            TRITON_CACHE_DIR=str(tmp_path / "cache"), CC="false",
            TRITON_CACHE_MANAGER="kvferry.kernels.prebuilt_cache:PrebuiltCache",
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(600)
def test_a_launch_finds_its_kernel_and_its_launcher(prebuilt: Path, tmp_path: Path) -> None:
    """No entry is new, and both are loaded from the image's folder. What was compiled for an H100 is launched
    dependently."""
    found = look_up(prebuilt, tmp_path, 90)
    assert found["compiled"] == 0
    assert found["launches"] == found["dependent"] == 5
    assert len(found["loaded"]) >= 2
    assert all(path.startswith(str(prebuilt)) for path in found["loaded"])
    assert not (tmp_path / "cache").exists()


def needed(library: Path) -> list[str]:
    """The libraries that the loader loads with a 64-bit one: DT_NEEDED of its dynamic section."""
    data = library.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", library
    sections_at, size, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    # of a section: type, offset, size, and the number of another that belongs to it
    sections = [
        struct.unpack_from("<4xI16xQQI", data, at)
        for at in range(sections_at, sections_at + size * count, size)
    ]
    ((_, start, length, number),) = [section for section in sections if section[0] == 6]
    names = sections[number][1]
    entries = struct.iter_unpack("<qQ", data[start : start + length])
    at = [names + value for tag, value in entries if tag == 1]
    return [data[start : data.index(b"\0", start)].decode() for start in at]


@pytest.mark.timeout(600)
def test_what_a_c_compiler_built_is_loaded_with_the_driver_s_library(prebuilt: Path) -> None:
    """Else its calls of the driver are not found, and nothing of it can be loaded on a machine with a GPU."""
    built = list(prebuilt.rglob("*.so"))
    assert len(built) >= 2
    assert {library.name: "libcuda.so.1" in needed(library) for library in built} == {
        library.name: True for library in built
    }


@pytest.mark.timeout(600)
def test_another_gpu_s_kernels_are_not_taken_for_it(prebuilt: Path, tmp_path: Path) -> None:
    found = look_up(prebuilt, tmp_path, 80)
    assert found["compiled"] >= 1
    assert found["dependent"] == 0
    assert list((tmp_path / "cache").iterdir())


def test_the_image_fills_the_folder_that_its_workers_read() -> None:
    dockerfile = (REPOSITORY / "docker" / "gpu.Dockerfile").read_text(encoding="utf-8")
    folder = PREBUILT_FOLDER.relative_to(sys.prefix)
    assert f"--folder /opt/kvferry/{folder}\n" in dockerfile
    assert f"TRITON_CACHE_MANAGER={PrebuiltCache.__module__}:{PrebuiltCache.__name__}\n" in dockerfile
    assert dockerfile.index("/bin/kvferry compile") < dockerfile.index("COPY --from=build /opt/kvferry")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": "Llama-3.2-1B,GPT-9"}, r"shapes has 'GPT-9'; there are .*Llama-3\.1-8B"),
        ({"architectures": "sm_70"}, r"architectures has 'sm_70'; there are sm_80"),
    ],
)
def test_unknown_names_are_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.kernels.dispatch.interpreting", lambda: False)
    with pytest.raises(ConfigurationError, match=message):
        run(CompileConfig(**options))


def test_an_interpreter_compiles_nothing() -> None:
    with pytest.raises(ConfigurationError, match="TRITON_INTERPRET is set"):
        run(CompileConfig())
