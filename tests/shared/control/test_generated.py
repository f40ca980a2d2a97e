"""The committed protobuf code is what `tools/generate_proto.py` makes of the proto file."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvferry.proto

pytest.importorskip("grpc_tools", reason="the dev extra is not installed")


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    from kvferry.tools.generate_proto import GENERATED, generate

    generate(tmp_path)
    folder = Path(str(kvferry.proto.__file__)).parent
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (folder / name).read_text(), name


def test_generated_code_imports_under_the_packages_name() -> None:
    from kvferry.proto import control_pb2, control_pb2_grpc

    assert control_pb2_grpc.DecodeStub.__module__ == "kvferry.proto.control_pb2_grpc"
    assert set(control_pb2.DESCRIPTOR.services_by_name) == {"Decode", "Prefill"}
