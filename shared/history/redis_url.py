"""Redis addresses as one URL: a single server, Sentinel or Cluster, with credentials and TLS.

    redis://[user:password@]host[:port][/db]                 rediss:// is the same over TLS
    unix://[user:password@]/path[?db=0]
    redis+sentinel://[user:password@]host[:port],.../service[/db]      rediss+sentinel://
    redis+cluster://[user:password@]host[:port],...                    rediss+cluster://

Query options: `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` (paths), `ssl_check_hostname` (true or false);
`sentinel_username`, `sentinel_password`. Stricter than redis-py's own parser, which ignores what it does not
understand. Errors never show credentials.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kvferry.shared.errors import ConfigurationError

_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, kw_only=True)
class RedisAddress:
    """Where Redis is and how to log in.

    Attributes:
        topology: "", "sentinel" or "cluster".
        urls: of the server, of each sentinel or of some cluster nodes, as redis-py reads them. The
            credentials, the database and the TLS options are those of the data servers.
        service: the master's name, with Sentinel.
        sentinel_credentials: username and password of the sentinels themselves.
    """

    topology: str
    urls: tuple[str, ...] = field(repr=False)
    service: str = ""
    sentinel_credentials: dict[str, str] = field(default_factory=dict, repr=False)


def parse_redis_url(url: str) -> RedisAddress:
    """Parse a URL. Raises: ConfigurationError: it is wrong; the message does not show its credentials."""
    try:
        return _address(url)
    except ValueError as error:
        raise ConfigurationError(
            f"history_redis is not a Redis URL: {error}; it must look like redis://host:6379/0, "
            "unix:///path, redis+sentinel://host:26379/service or redis+cluster://host:6379,host:6380"
        ) from None


def _address(url: str) -> RedisAddress:
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"its scheme is {parts.scheme!r}, of {', '.join(_SCHEMES)}")
    scheme, _, topology = parts.scheme.partition("+")
    query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    credentials, at, netloc = parts.netloc.rpartition("@")
    login = f"{scheme}://{credentials}{at}"
    sentinel = {
        _SENTINEL_OPTIONS[key]: query.pop(key)
        for key in _SENTINEL_OPTIONS.keys() & query.keys()
        if topology == "sentinel"
    }
    allowed = _TLS_OPTIONS if scheme == "rediss" else {"db"} if scheme == "unix" else set()
    if unknown := query.keys() - allowed:
        raise ValueError(f"{min(unknown)} is no option of a {parts.scheme} URL")
    if query.get("ssl_check_hostname", "true") not in ("true", "false"):
        raise ValueError("ssl_check_hostname is neither true nor false")
    if scheme == "unix":
        if len(parts.path) < 2:
            raise ValueError("the socket's path is missing")
        _check_db(query.get("db", "0"))
        return RedisAddress(topology="", urls=(f"{login}{parts.path}?{urlencode(query)}",))
    path = [unquote(segment) for segment in parts.path.split("/")[1:] if segment]
    if topology == "sentinel" and not path:
        raise ValueError("the master's name is missing after the sentinels' addresses")
    service = path.pop(0) if topology == "sentinel" else ""
    db = path.pop(0) if path and topology != "cluster" else "0"
    _check_db(db)
    if path:
        raise ValueError("its path has more segments than it may")
    hosts = netloc.split(",")
    if len(hosts) > 1 and not topology:
        raise ValueError("it has several hosts; redis+sentinel or redis+cluster may")
    suffix = f"/{db}?{urlencode(query)}"
    port = 26379 if topology == "sentinel" else 6379
    urls = tuple(f"{login}{_with_port(host, port)}{suffix}" for host in hosts)
    return RedisAddress(topology=topology, urls=urls, service=service, sentinel_credentials=sentinel)


def _with_port(host: str, default_port: int) -> str:
    one = urlsplit(f"//{host}")
    if not one.hostname:
        raise ValueError("a host is missing")
    return host if one.port else f"{host.rstrip(':')}:{default_port}"


def _check_db(text: str) -> None:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("the database is not a number of 0 or more")
