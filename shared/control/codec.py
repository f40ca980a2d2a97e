"""Control messages to protobuf bytes and back. The only code that uses the generated protobuf classes.

Used by the gRPC client and server; in-process calls pass the dataclasses themselves. The codecs are built at
import by matching the dataclasses of `messages.py` with `proto/control.proto` by name, so a new field needs a
line in each and nothing here:

    dataclass             a message with the same fields
    A | B                 a message with one `oneof`: a member for each class, or for each type of plain value
    X | None              an `optional` field
    Literal["a", "b"]     an enum PREFIX_UNSPECIFIED, PREFIX_A, PREFIX_B, or a string
    tuple[X, ...]         a repeated field
    dict[K, X]            a map
    tuple[X, Y]           a message whose fields are X and Y, in that order
    none of messages.py   None for a message without fields, otherwise the value of its only field

Decoding checks that a message is complete and its choices are known; the services check ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from kvferry.proto import control_pb2 as pb
from kvferry.shared.control import messages
from kvferry.shared.errors import OTHER_RELEASE, InvalidRequest

_Convert = Callable[[Any], Any]
_Pair = tuple[_Convert, _Convert]
_PLAIN_TYPES = {
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_STRING: str,
}


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Both directions of one message. Both raise InvalidRequest for what does not fit the message's type."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One remote procedure."""

    path: str
    request: Codec
    response: Codec
    streams: bool


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service of `control.proto`: its full name and its methods by name."""

    name: str
    methods: Mapping[str, Method]


def make_codec(hint: Any, proto: type[Message]) -> Codec:
    """Make the codec of one message.

    Args:
        hint: the type of its values; None for a message that has no class of its own.
    Raises:
        TypeError: the type and the message do not match.
    """
    message: Any = proto.DESCRIPTOR
    write, read = _only_field(message) if hint is None else _message(hint, message)

    def encode(value: Any) -> bytes:
        try:
            return proto(**write(value)).SerializeToString()
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(f"{message.name} cannot be encoded: {error}") from error

    def decode(data: bytes) -> Any:
        try:
            content = proto.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"{message.name} cannot be decoded: {error}") from error
        return read(content)

    return Codec(encode=encode, decode=decode)


# Each of the following returns a pair: `write` turns a value into what protobuf's constructor takes (messages
# as dictionaries), `read` turns what protobuf parsed into a value.


def _only_field(message: Descriptor) -> _Pair:
    if not message.fields:
        return lambda _: {}, lambda _: None
    (field,) = message.fields
    return lambda value: {field.name: value}, attrgetter(field.name)


def _message(hint: Any, message: Descriptor) -> _Pair:
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, message)
    if get_origin(hint) is tuple:
        names = tuple(message.fields_by_name)
        return lambda values: dict(zip(names, values, strict=True)), attrgetter(*names)
    return _union(set(get_args(hint)), message)


def _dataclass(kind: Any, message: Descriptor) -> _Pair:
    hints = get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    if different := names ^ set(message.fields_by_name):
        raise TypeError(f"{kind.__name__} and control.proto differ in {', '.join(sorted(different))}")
    pairs = {field.name: _field(hints[field.name], field) for field in message.fields}
    writers = [(name, write) for name, (write, _) in pairs.items()]
    readers = [(field.name, pairs[field.name][1], field.has_presence) for field in message.fields]
    present = [field.name for field in message.fields if field.has_presence]
    required = [name for name in present if not _is_optional(hints[name])]

    def write_fields(value: Any) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for name, convert in writers:
            item = getattr(value, name)
            content[name] = item if convert is None or item is None else convert(item)
        return content

    return write_fields, _reader(kind, message, required, readers)


def _reader(
    kind: Any, message: Descriptor, required: list[str], readers: list[tuple[str, _Convert | None, bool]]
) -> _Convert:
    """Make a function that reads a message's fields, because a stream has a message for each token."""

    def missing(name: str) -> InvalidRequest:
        return _of_other_release(f"{message.name} has no {name}; it is required", name)

    names: dict[str, Any] = {"kind": kind, "missing": missing, "new": object.__new__}
    checks, fields = [], []
    for name, convert, has_presence in readers:
        names[f"convert_{name}"] = convert
        value = f"content.{name}" if convert is None else f"convert_{name}(content.{name})"
        if name in required:
            checks.append(f"    if not content.HasField({name!r}): raise missing({name!r})\n")
        elif has_presence:
            value = f"({value} if content.HasField({name!r}) else None)"
        fields.append(f"{name}={value}")
    # A frozen class's __init__ sets every field by a call, which takes longer than all else here.
    lines = [f"    value = new(kind)\n    value.__dict__.update({', '.join(fields)})\n    return value\n"]
    if hasattr(kind, "__post_init__") or hasattr(kind, "__slots__"):
        lines = [f"    return kind({', '.join(fields)})\n"]
    exec("".join(["def read(content):\n", *checks, *lines]), names)
    read: _Convert = names["read"]
    return read


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint)


def _field(hint: Any, field: FieldDescriptor) -> tuple[_Convert | None, _Convert | None]:
    """Return the converters of a field; None for a direction in which the value stays as it is."""
    if not field.is_repeated:
        return _single(hint, field) or (None, None)
    if get_origin(hint) is dict:
        entry: Any = field.message_type
        pair = _single(get_args(hint)[1], entry.fields_by_name["value"])
        return (_map_values(pair[0]), _map_values(pair[1])) if pair else (None, dict)
    if (pair := _single(get_args(hint)[0], field)) is None:
        return None, tuple
    write, read = pair
    return partial(map, write), lambda items: tuple(map(read, items)) if items else ()


def _map_values(convert: _Convert) -> _Convert:
    return lambda items: dict(zip(items, map(convert, items.values()), strict=True))


def _single(hint: Any, field: FieldDescriptor) -> _Pair | None:
    """Return the converters of one value; None for values that stay as they are."""
    optional = _is_optional(hint)
    if optional:
        hint = Union[tuple(kind for kind in get_args(hint) if kind is not type(None))]  # noqa: UP007
    if field.message_type is not None:
        return _message(hint, field.message_type)
    if get_origin(hint) is Literal:
        return _choice(field, get_args(hint), optional=optional)
    if field.has_presence is not optional:
        raise TypeError(f"{field.full_name} must be {'' if optional else 'not '}optional in control.proto")
    return None


def _choice(field: FieldDescriptor, names: tuple[str, ...], *, optional: bool) -> _Pair:
    if field.enum_type is None:
        numbers: dict[str, Any] = {name: name for name in names}
    else:
        values = {value.name: value.number for value in field.enum_type.values}
        prefix = next(name for name, number in values.items() if number == 0).removesuffix("UNSPECIFIED")
        numbers = {name.removeprefix(prefix).lower(): number for name, number in values.items() if number}
    if numbers.keys() != set(names):
        raise TypeError(f"{field.full_name} allows {', '.join(numbers)}; its class {', '.join(names)}")
    read = {number: name for name, number in numbers.items()} | ({0: None} if optional else {})
    return _Choices(field.name, names, numbers).__getitem__, _Choices(field.name, names, read).__getitem__


class _Choices(dict[Any, Any]):
    """A mapping of allowed values; looking up another one raises an error that lists them."""

    def __init__(self, field: str, allowed: tuple[str, ...], items: Mapping[Any, Any]) -> None:
        super().__init__(items)
        self._field, self._allowed = field, ", ".join(allowed)

    def __missing__(self, value: object) -> Any:
        message = f"{self._field} is {value!r}; {self._allowed} are allowed"
        raise _of_other_release(message, self._field) from None


def _union(kinds: set[type], message: Descriptor) -> _Pair:
    (group,) = message.oneofs
    classes = {kind.__name__: kind for kind in kinds}
    writers: dict[type, tuple[str, _Convert | None]] = {}
    readers: dict[str, _Convert | None] = {}
    for field in group.fields:
        member = field.message_type
        kind = _PLAIN_TYPES[field.cpp_type] if member is None else classes[member.name]
        write, readers[field.name] = (None, None) if member is None else _message(kind, member)
        writers[kind] = field.name, write
    if writers.keys() != kinds:
        raise TypeError(f"{message.name} in control.proto and its classes differ")

    def write_member(value: Any) -> dict[str, Any]:
        name, convert = writers[type(value)]
        return {name: value if convert is None else convert(value)}

    def read_member(content: Any) -> Any:
        name = content.WhichOneof(group.name)
        if name is None:
            unknown = f"{message.name} has no {group.name} that this version knows"
            raise _of_other_release(unknown, group.name)
        value, convert = getattr(content, name), readers[name]
        return value if convert is None else convert(value)

    return write_member, read_member


def _of_other_release(message: str, field: str) -> InvalidRequest:
    return InvalidRequest(message, param=field, reason=OTHER_RELEASE)


CODECS: Mapping[str, Codec] = {
    message.name: make_codec(getattr(messages, message.name, None), getattr(pb, message.name))
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    for message in (method.input_type, method.output_type)
}
"""The codecs of what calls carry, by the message's name."""


def _service(name: str) -> Service:
    service = pb.DESCRIPTOR.services_by_name[name]
    methods = {
        method.name: Method(
            path=f"/{service.full_name}/{method.name}",
            request=CODECS[method.input_type.name],
            response=CODECS[method.output_type.name],
            streams=method.server_streaming,
        )
        for method in service.methods
    }
    return Service(name=service.full_name, methods=methods)


DECODE = _service("Decode")
PREFILL = _service("Prefill")
