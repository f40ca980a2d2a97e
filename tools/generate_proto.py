"""Regenerate the protobuf code: run this after changing `control.proto` and commit what it writes.

Needs the `dev` extra (grpcio-tools, mypy-protobuf). A test runs it into a temporary folder and compares.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROTO = "control.proto"
FOLDER = Path(__file__).resolve().parents[1] / "proto"
GENERATED = ("control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py", "control_pb2_grpc.pyi")
_IMPORT_FOLDER = "kvferry/proto"
_TIMEOUT_S = 120.0


def generate(target: Path) -> None:
    """Write the generated files into a folder.

    The proto file is compiled under its import path, so that the generated code imports
    `kvferry.proto.control_pb2`.

    Raises:
        subprocess.CalledProcessError: protoc failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, _IMPORT_FOLDER, PROTO)
        source.parent.mkdir(parents=True)
        shutil.copyfile(FOLDER / PROTO, source)
        plugins = Path(sysconfig.get_path("scripts"))
        command = [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            f"--proto_path={scratch}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={scratch}",
            f"--grpc_python_out={scratch}",
            f"--mypy_out=quiet:{scratch}",
            f"--mypy_grpc_out=quiet:{scratch}",
            f"{_IMPORT_FOLDER}/{PROTO}",
        ]
        subprocess.run(command, check=True, timeout=_TIMEOUT_S)
        for name in GENERATED:
            shutil.copyfile(source.with_name(name), target / name)


def main() -> None:
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)


if __name__ == "__main__":
    main()
