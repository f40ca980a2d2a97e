"""One control message in both directions, and what reading its fields needs. Knows no message of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from kvferry.shared.errors import InvalidRequest

_Value = TypeVar("_Value")
_Proto = TypeVar("_Proto", bound=Message)
_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True, kw_only=True)
class Codec(Generic[_Value]):
    """Both directions of one message. Both raise InvalidRequest on what does not fit the message's type."""

    encode: Callable[[_Value], bytes]
    decode: Callable[[bytes], _Value]


def make_codec(
    proto: type[_Proto], write: Callable[[_Value], _Proto], read: Callable[[_Proto], _Value]
) -> Codec[_Value]:
    name = proto.DESCRIPTOR.name

    def encode(value: _Value) -> bytes:
        try:
            return write(value).SerializeToString()
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{name} cannot be encoded: {error}") from error

    def decode(data: bytes) -> _Value:
        try:
            message = proto.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"{name} cannot be decoded: {error}") from error
        return read(message)

    return Codec(encode=encode, decode=decode)


def require(message: Message, *fields: str) -> None:
    for name in fields:
        if not message.HasField(name):
            raise InvalidRequest(f"{message.DESCRIPTOR.name} has no {name}; it is required", param=name)


def oneof(message: Message, group: str) -> str:
    chosen: str | None = message.WhichOneof(group)
    if chosen is None:
        raise InvalidRequest(f"{message.DESCRIPTOR.name} has no {group} that this version knows", param=group)
    return chosen


def read_choice(number: int, choices: Mapping[_Choice, int], name: str) -> _Choice:
    for choice, its_number in choices.items():
        if its_number == number:
            return choice
    raise InvalidRequest(f"{name} is {number}; {', '.join(choices)} are allowed", param=name)
