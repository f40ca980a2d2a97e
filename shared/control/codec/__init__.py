"""Control messages to protobuf bytes and back: the only code that touches the generated messages.

Place in the request's path: under the gRPC client and server, which see dataclasses and bytes alone. Checks
that what came is complete and typed (InvalidRequest if not); does not check ranges that a service knows.
"""

from __future__ import annotations

from kvferry.proto import control_pb2 as pb
from kvferry.shared.control.codec.generation import (
    FINISH_REQUEST,
    FINISH_RESPONSE,
    GENERATE_EVENT,
    GENERATE_REQUEST,
)
from kvferry.shared.control.codec.message import Codec
from kvferry.shared.control.codec.prompt import (
    ABORT_TURN_REQUEST,
    ABORT_TURN_RESPONSE,
    COMMIT_TURN_REQUEST,
    HISTORY_INFO,
    PREFILL_EVENT,
    PREFILL_REQUEST,
    SESSION_KEY,
)
from kvferry.shared.control.codec.status import STATUS_REQUEST, WORKER_STATUS

DECODE_SERVICE = pb.DESCRIPTOR.services_by_name["Decode"].full_name
PREFILL_SERVICE = pb.DESCRIPTOR.services_by_name["Prefill"].full_name

__all__ = [
    "ABORT_TURN_REQUEST",
    "ABORT_TURN_RESPONSE",
    "COMMIT_TURN_REQUEST",
    "DECODE_SERVICE",
    "FINISH_REQUEST",
    "FINISH_RESPONSE",
    "GENERATE_EVENT",
    "GENERATE_REQUEST",
    "HISTORY_INFO",
    "PREFILL_EVENT",
    "PREFILL_REQUEST",
    "PREFILL_SERVICE",
    "SESSION_KEY",
    "STATUS_REQUEST",
    "WORKER_STATUS",
    "Codec",
]
