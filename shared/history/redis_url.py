"""Redis addresses as one URL: a single server, Sentinel or Cluster, with credentials and TLS.

    redis://[user:password@]host[:port][/db]                 rediss:// is the same over TLS
    unix://[user:password@]/path[?db=0]
    redis+sentinel://[user:password@]host[:port],.../service[/db]      rediss+sentinel://
    redis+cluster://[user:password@]host[:port],...                    rediss+cluster://

Query options: `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` (paths), `ssl_check_hostname` (true or false);
`sentinel_username`, `sentinel_password`. Parses only; `redis_client.py` connects. Its errors never show
credentials.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvferry.shared.errors import ConfigurationError

Topology = Literal["single", "unix", "sentinel", "cluster"]

_SCHEMES: dict[str, tuple[Topology, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_TLS_PATHS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_DEFAULT_PORTS: dict[Topology, int] = {"single": 6379, "sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True, kw_only=True)
class RedisAddress:
    """Where Redis is and how to get in.

    Attributes:
        hosts: (host, port) of the server, the sentinels or some cluster nodes; empty for a Unix socket.
        service: the master's name, with Sentinel.
        tls: options for TLS connections, `ssl` among them; empty without TLS.
        sentinel_credentials: username and password of the sentinels themselves.
    """

    topology: Topology
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    db: int = 0
    service: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: dict[str, Any] = field(default_factory=dict)
    sentinel_credentials: dict[str, str] = field(default_factory=dict, repr=False)


def parse_redis_url(url: str, *, name: str = "history_redis") -> RedisAddress:
    """Args: name: the setting that the URL is of, for messages.

    Raises: ConfigurationError saying what is wrong, without the URL's credentials.
    """
    try:
        parts = urlsplit(url)
        return _address(parts, dict(parse_qsl(parts.query, strict_parsing=bool(parts.query))))
    except ValueError as error:
        raise ConfigurationError(
            f"{name} is no URL of Redis: {error}; it must look like redis://host:6379/0, "
            "unix:///path, redis+sentinel://host:26379/service or redis+cluster://host:6379,host:6380"
        ) from None


def _address(parts: SplitResult, query: dict[str, str]) -> RedisAddress:
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"its scheme is {parts.scheme!r}, of {', '.join(_SCHEMES)}")
    topology, with_tls = _SCHEMES[parts.scheme]
    credentials, _, netloc = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    segments = [unquote(segment) for segment in parts.path.split("/")[1:] if segment]
    address = RedisAddress(
        topology=topology,
        hosts=() if topology == "unix" else _hosts(netloc, _DEFAULT_PORTS[topology]),
        path=_socket_path(parts) if topology == "unix" else "",
        db=_db(topology, segments, query),
        service=segments[0] if topology == "sentinel" and segments else "",
        username=unquote(username) or None,
        password=unquote(password) or None,
        tls=_tls(query) if with_tls else {},
        sentinel_credentials={
            key: query.pop(f"sentinel_{key}")
            for key in ("username", "password")
            if topology == "sentinel" and f"sentinel_{key}" in query
        },
    )
    if topology == "single" and len(address.hosts) > 1:
        raise ValueError("it has several hosts; redis+sentinel or redis+cluster may")
    if topology == "sentinel" and not address.service:
        raise ValueError("the master's name is missing after the sentinels' addresses")
    if query:
        raise ValueError(f"{min(query)} is no option of a {parts.scheme} URL")
    return address


def _hosts(netloc: str, default_port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for item in netloc.split(","):
        one = urlsplit(f"//{item}")
        if not one.hostname:
            raise ValueError("a host is missing")
        hosts.append((one.hostname, one.port or default_port))
    return tuple(hosts)


def _socket_path(parts: SplitResult) -> str:
    path = unquote(parts.path)
    if len(path) < 2:
        raise ValueError("the socket's path is missing")
    return path


def _db(topology: Topology, segments: list[str], query: dict[str, str]) -> int:
    if topology == "unix":
        text = query.pop("db", "0")
    else:
        index = 1 if topology == "sentinel" else 0
        text = segments[index] if len(segments) > index else "0"
        if len(segments) > index + 1 or (topology == "cluster" and segments):
            raise ValueError("its path has more than there can be")
    if not text.isascii() or not text.isdigit():
        raise ValueError("the database is not a number of 0 or more")
    return int(text)


def _tls(query: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"ssl": True}
    options |= {key: query.pop(key) for key in _TLS_PATHS if key in query}
    check = query.pop("ssl_check_hostname", "true")
    if check not in ("true", "false"):
        raise ValueError("ssl_check_hostname is neither true nor false")
    options["ssl_check_hostname"] = check == "true"
    return options
