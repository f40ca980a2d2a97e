"""Bodies of requests: the caller is checked, the body is read as strict JSON, and fields have types whose
errors name what is allowed.

Routes are FastAPI's; `errors.py` words what their fields' types refuse.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema, from_json
from starlette.datastructures import Headers
from starlette.responses import Response

from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.http.access import KeyFile, Scope
from kvferry.services.router.http.errors import UNKNOWN_FIELD, describe
from kvferry.services.router.http.large_work import SMALL_BYTES, BodyWork
from kvferry.shared.errors import AuthenticationFailed, InvalidRequest, Overloaded, PermissionDenied
from kvferry.shared.process.serving import parse_address


class Authenticator:
    """Checks `Authorization: Bearer KEY`, or `X-API-Key: KEY` where there is none. A caller is known to the
    rest of the system by a digest of the key.

    Without keys that may chat anyone may, but sessions still belong to the key that was sent.

    Args: file: keys beside those of `api_keys`, which may do everything.
    """

    def __init__(self, config: RouterConfig, file: KeyFile | None) -> None:
        self._digests = tuple(_digest(key) for key in split_list(config.api_keys))
        self._file = file
        self._closed: set[Scope] = set()
        self._origins = split_list(config.cors_origins)
        hosts = split_list(config.allowed_hosts)
        # over TLS, a page from elsewhere cannot have a certificate of this server for its own name
        self._any_host = bool(config.tls_cert) or "*" in hosts
        listen, _ = parse_address("listen", config.listen)
        self._hosts = {name.lower() for name in (*hosts, listen, socket.gethostname())}

    def is_open(self, scope: Scope) -> bool:
        """Return whether no key is needed: no key is for this scope, and none ever was."""
        in_file = self._file.keys if self._file is not None else ()
        if self._digests or any(key.allows(scope) for key in in_file):
            self._closed.add(scope)  # a file whose last key is removed lets nobody in
        return scope not in self._closed

    def owner(self, headers: Headers, scope: Scope = "chat") -> str:
        """Return the digest that identifies the caller.

        Args: scope: what the key must be for.

        Raises:
            AuthenticationFailed: keys are configured and the request has none of them.
            PermissionDenied: its key is for something else.
        """
        scheme, _, key = headers.get("authorization", "").strip().partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if not scheme:
            key = headers.get("x-api-key", "").strip()
        if not self.is_open(scope):
            if not key:
                message = "No API key was given; send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
                raise AuthenticationFailed(message, reason="no_key")
            self.check(_digest(key), scope)
        return _digest(key)

    def check(self, owner: str, scope: Scope = "chat") -> None:
        """Check a caller, whose key may have been removed from the key file since. Raises: as `owner`."""
        # Every key is compared, in constant time, so that timing reveals nothing about any of them.
        if any([hmac.compare_digest(owner, known) for known in self._digests]):
            return
        entry = self._file.find(owner) if self._file is not None else None
        if entry is None:
            raise AuthenticationFailed("The API key is not one that this server accepts", reason="wrong_key")
        if not entry.allows(scope):
            scopes = ", ".join(entry.scopes)
            raise PermissionDenied(f"This key is for {scopes}; {scope} is needed", reason="scope")

    def check_admin(self, headers: Headers) -> None:
        """Check that the caller may do what concerns other keys: anyone if chats need no key, else holders of
        a key for admin.

        Raises: AuthenticationFailed, PermissionDenied.
        """
        if not self.is_open("admin"):
            self.owner(headers, "admin")
        elif not self.is_open("chat"):
            raise PermissionDenied("No key of api_keys_file is for admin, which is needed", reason="scope")

    def check_host(self, headers: Headers) -> None:
        """Check the host that a request names, where no key is needed.

        A page from elsewhere can make its own name resolve to an address of this machine or network (DNS
        rebinding). The browser then takes this server for the page's own, and lets the page read answers. The
        page cannot use a bare address or a name that only this network gives out, and it has no certificate
        for this server.

        Raises: PermissionDenied.
        """
        if self._any_host or not self.is_open("chat"):
            return
        host = headers.get("host", "")  # browsers always send one
        name, colon, port = host.rpartition(":")
        name = (name if colon and port.isdigit() else host).strip("[]").rstrip(".").lower()
        if name in self._hosts or _is_local(name):
            return
        raise PermissionDenied(
            f"The request is for the host {name[:100]!r}. Without API keys this server answers only those "
            "for an address, a name of the local network, or one of --allowed-hosts",
            reason="host",
        )

    def check_origin(self, headers: Headers) -> None:
        """Check which site's page a request comes from: one of another site can make a browser send a POST
        without asking this server first. Programs send neither header.

        Raises: PermissionDenied: it is none of `cors_origins`.
        """
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
        if "*" in self._origins or origin in self._origins:
            return
        is_other = bool(origin) and urlsplit(origin).netloc != headers.get("host", "")
        if is_other or site in ("cross-site", "same-site"):
            raise PermissionDenied(f"The request comes from a page of another site: {(origin or site)[:200]}")


_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc")
"""Ends of names that no public server resolves."""


def _is_local(name: str) -> bool:
    if "." not in name and ":" not in name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(_PRIVATE)
    return True


class KeyedRoute(APIRoute):
    """A route that needs a key, by the `Authenticator` at `app.state.auth`; `request.state.owner` is the
    caller, and `request.state.work` the `BodyWork` of a POST."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if request.method != "POST":  # the key of a request with a body is checked before that is read
                request.state.owner = request.app.state.auth.owner(request.headers)
                return await handle(request)
            body = await request.body()
            services = request.app.state.services
            is_small, work = len(body) <= SMALL_BYTES, cast(BodyWork, asyncio.to_thread)
            if not is_small:
                work = partial(services.large.run, request.state.owner, len(body))
            request.state.work = work
            read = partial(self._read, body, max_integers=MAX_VALUES + _max_model_len(request))
            # Reading a large one would block the event loop.
            fields, unknown = read() if is_small else await work(read)
            if unknown and services.config.strict_fields:
                raise InvalidRequest(
                    f"Unknown field {describe(unknown[0])}", param=unknown[0][:128], reason=UNKNOWN_FIELD
                )
            request.state.record.ignored.update(unknown)
            return await handle(_JsonRequest(request, fields))

        return checked

    def _read(self, body: bytes, *, max_integers: int) -> tuple[Any, list[str]]:
        """Read a body: the route's fields, which FastAPI takes as they are, and the unknown ones' names.

        Raises: InvalidRequest; RequestValidationError where a field is not of its type.
        """
        check_size(body, max_integers=max_integers)
        data = _parse(body)
        assert self.body_field is not None, "every POST has a body"
        fields, errors = self.body_field.validate(data, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=data)
        return fields, list(dict.fromkeys(unknown_fields(fields)))


class _JsonRequest(Request):
    """A request whose body has been read. It is JSON, whatever its Content-Type says."""

    def __init__(self, request: Request, fields: Any) -> None:
        headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
        scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        super().__init__(scope, request.receive)
        self._fields = fields

    async def body(self) -> bytes:
        return b"{}"  # FastAPI only asks whether there is one

    async def json(self) -> Any:
        return self._fields


def _max_model_len(request: Request) -> int:
    try:
        return int(request.app.state.services.runner.model().max_model_len)
    except Overloaded:  # it is not known which model the workers serve
        return 1 << 20


def check_size(body: bytes, *, max_integers: int) -> None:
    """Check that a body has few values, before it is parsed. Each takes memory and the event loop's time,
    while a long text is one value.

    Args: max_integers: in lists of integers alone, which are the tokens of a prompt.

    Raises: InvalidRequest naming what there is too much of.
    """
    # In pieces here and below, because a search of megabytes would hold Python's lock until its end.
    pieces = range(0, len(body), _SEARCHED_AT_ONCE)
    marks = (body.count(mark, at, at + _SEARCHED_AT_ONCE) for at in pieces for mark in (b",", b"{", b"["))
    if sum(marks) <= MAX_VALUES:  # also where they are in texts
        return
    num_values = num_integers = begin = 0
    in_text = False
    while begin < len(body):
        # A piece ends after a comma, so that it cuts no number.
        end = body.find(b",", begin + _SEARCHED_AT_ONCE, begin + 2 * _SEARCHED_AT_ONCE) + 1
        end = end or begin + 2 * _SEARCHED_AT_ONCE
        if in_text:
            match = _REST_OF_TEXT.match(body, begin, end)
            assert match is not None, "it matches nothing, too"
            in_text, begin = not match["end"], max(match.end(), begin + 1)
            continue
        for match in _VALUES.finditer(body, begin, end):
            if match.lastgroup == "integers":
                num_integers += match.group().count(b",")
                if num_integers > max_integers:
                    raise InvalidRequest(f"The body has more than {max_integers} integers in lists")
            elif match.lastgroup == "value":
                num_values += 1
                if num_values > MAX_VALUES:
                    raise InvalidRequest(
                        f"The body has more than {MAX_VALUES} JSON values beside lists of integers"
                    )
            elif not match["end"]:
                in_text, end = True, match.end()
        begin = end


def _parse(body: bytes) -> dict[str, Any]:
    """Parse a request's JSON object: UTF-8, no NaN or Infinity, no lone surrogates, bounded depth and digits.

    Raises: InvalidRequest where the bytes are not UTF-8, not JSON, or not an object.
    """
    try:
        body.decode()
        data = from_json(body, allow_inf_nan=False, cache_strings="none")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object; it is {describe(data)}")
    return data


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


_MAX_FIELDS = 256

MAX_VALUES = 16_384
"""In a body, beside lists of integers: about 5,000 messages, or 128 tools of 100 values each."""
_SEARCHED_AT_ONCE = 1 << 16
_REST = rb'(?:[^"\\]++|\\.)*+(?P<end>"?)'
_REST_OF_TEXT = re.compile(_REST, re.DOTALL)
_VALUES = re.compile(
    rb'(?P<text>")'
    + _REST
    + rb"|(?P<integers>(?:-?[0-9]++[ \t\r\n]*+,[ \t\r\n]*+){2,4096}+)|(?P<value>[,{\[])",
    re.DOTALL,
)
"""Texts, which may lack their end; runs of integers; where a value begins."""

ModelT = TypeVar("ModelT", bound=BaseModel)

Refused = Mapping[str, tuple[Any, ...]]
"""Fields whose effect a client would miss, each with the values that ask for nothing, beside null."""


class StrictModel(BaseModel):
    """No conversions, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    refused: ClassVar[Refused] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # An error for each of a hundred thousand unknown fields would take seconds.
        if len(value) > _MAX_FIELDS:
            raise PydanticCustomError("rule", f"must have at most {_MAX_FIELDS} fields")
        for name, given in value.items():
            if given is None or (neutral := cls.refused.get(name)) is None:
                continue
            # False is not 0, and True is not 1.
            if not any(type(other) is type(given) and other == given for other in neutral):
                kind = PydanticCustomError("unsupported", "is not supported by this server")
                error = InitErrorDetails(type=kind, loc=(name,), input=given)
                raise ValidationError.from_exception_data(cls.__name__, [error])
        return value


class ClientModel(StrictModel):
    """A part of a request of an API that others have too. Unknown fields are kept only to be named.

    Attributes:
        echoed: fields of answers that clients send back; they change nothing and are not named.
        refused: fields that no type has and that are refused where they ask for something.
    """

    model_config = ConfigDict(extra="allow")

    echoed: ClassVar[frozenset[str]] = frozenset()

    @property
    def left_out(self) -> str:
        """Its name, where the model does not get to know it; else empty."""
        return ""


def unknown_fields(value: Any, path: str = "") -> Iterator[str]:
    """Yield the names of what changes nothing, at every depth of a body: fields that its models do not know
    (`messages.opts`), except those that are null and so ask for nothing, and parts that are left out
    (`tools.web_search`)."""
    if isinstance(value, ClientModel) and value.left_out:
        yield f"{path}{value.left_out}"
    elif isinstance(value, BaseModel):
        for name, given in (value.model_extra or {}).items():
            is_known = isinstance(value, ClientModel) and (name in value.echoed or name in value.refused)
            if given is not None and not is_known:
                yield f"{path}{name}"
        for name, field in type(value).model_fields.items():
            if isinstance(given := getattr(value, name), BaseModel | list):
                yield from unknown_fields(given, f"{path}{field.alias or name}.")
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, BaseModel | list):
                yield from unknown_fields(item, path)


def known_fields(value: Any) -> Any:
    """Return the given fields that the value's models know, as in JSON, without what they leave out. Only
    these are checked, so an answer may show them."""
    if isinstance(value, list):
        return [known_fields(item) for item in value if not (isinstance(item, ClientModel) and item.left_out)]
    if not isinstance(value, ClientModel):
        return value
    fields = {field.alias or name: getattr(value, name) for name, field in type(value).model_fields.items()}
    fields |= {name: given for name, given in (value.model_extra or {}).items() if name in value.refused}
    return {name: known_fields(given) for name, given in fields.items() if given is not None}


def type_of(value: Any) -> str | None:
    """Return the `type` of a JSON object, or of a model that it has become; None where that is no text."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def at_most_one(*names: str) -> Callable[[ModelT], ModelT]:
    """Return a model's validator that allows at most one of these fields."""

    def check(model: ModelT) -> ModelT:
        given = [name for name in names if getattr(model, name) is not None]
        if len(given) > 1:
            raise PydanticCustomError("rule", f"must have only one of {' and '.join(given)}")
        return model

    return check


@dataclass(frozen=True)
class Range:
    """Bounds of a number; an error states both."""

    low: float
    high: float | None = None
    excludes_low: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        bounds: dict[str, Any] = {"gt" if self.excludes_low else "ge": self.low}
        lower = f"{'above' if self.excludes_low else 'at least'} {self.low}"
        if self.high is not None:
            bounds["le"], lower = self.high, f"{lower} and at most {self.high}"
        number = core_schema.int_schema if source is int else core_schema.float_schema
        return _refined(handler(source), number(**bounds), "range", lower)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        low = {"exclusiveMinimum" if self.excludes_low else "minimum": self.low}
        return {**handler(schema), **low, **({} if self.high is None else {"maximum": self.high})}


@dataclass(frozen=True)
class Pattern:
    """A string that a regular expression must match; an error says `rule`, which follows the field's name."""

    regex: str
    rule: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _refined(handler(source), core_schema.str_schema(pattern=self.regex), "rule", self.rule)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.regex}


def _refined(first: CoreSchema, second: CoreSchema, kind: str, message: str) -> CoreSchema:
    """Restrict `first` to values that `second` allows as well; its error has this kind and message."""
    return core_schema.chain_schema(
        [first, core_schema.custom_error_schema(second, kind, custom_error_message=message)]
    )
