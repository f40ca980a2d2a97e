"""What every worker answers when it is asked how it stands."""

from __future__ import annotations

from typing import Literal, cast, get_args

from kvferry.proto import control_pb2 as pb
from kvferry.shared.control.codec.message import Codec, make_codec, read_choice, require
from kvferry.shared.control.messages import WorkerStatus
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import DTypeName, ModelSpec

_ROLES: dict[Literal["prefill", "decode"], pb.Role.ValueType] = {
    "prefill": pb.ROLE_PREFILL,
    "decode": pb.ROLE_DECODE,
}


def _write_model(spec: ModelSpec) -> pb.ModelSpec:
    return pb.ModelSpec(
        name=spec.name,
        fingerprint=spec.fingerprint,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        dtype=spec.dtype,
        eos_token_ids=spec.eos_token_ids,
    )


def _read_model(message: pb.ModelSpec) -> ModelSpec:
    allowed = get_args(DTypeName)
    if message.dtype not in allowed:
        raise InvalidRequest(
            f"dtype is {message.dtype!r}; {', '.join(allowed)} are allowed", param="model.dtype"
        )
    return ModelSpec(
        name=message.name,
        fingerprint=message.fingerprint,
        num_layers=message.num_layers,
        num_heads=message.num_heads,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        dtype=cast(DTypeName, message.dtype),
        eos_token_ids=tuple(message.eos_token_ids),
    )


def _write_status(status: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        role=_ROLES[status.role],
        instance_id=status.instance_id,
        protocol_version=status.protocol_version,
        ready=status.ready,
        running=status.running,
        waiting=status.waiting,
        free_bytes=status.free_bytes,
        total_bytes=status.total_bytes,
        model=_write_model(status.model),
        methods=status.methods,
        kernel_paths=status.kernel_paths,
    )


def _read_status(message: pb.WorkerStatus) -> WorkerStatus:
    require(message, "model")
    return WorkerStatus(
        role=read_choice(message.role, _ROLES, "role"),
        instance_id=message.instance_id,
        protocol_version=message.protocol_version,
        ready=message.ready,
        running=message.running,
        waiting=message.waiting,
        free_bytes=message.free_bytes,
        total_bytes=message.total_bytes,
        model=_read_model(message.model),
        methods=tuple(message.methods),
        kernel_paths=dict(message.kernel_paths),
    )


STATUS_REQUEST: Codec[None] = make_codec(pb.StatusRequest, lambda _: pb.StatusRequest(), lambda _: None)
WORKER_STATUS = make_codec(pb.WorkerStatus, _write_status, _read_status)
