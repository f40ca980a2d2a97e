"""Connections to a real Redis: every topology and protection, bounded retries, the breaker's recovery."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kvtest import redis_server as redis_servers
from kvtest.ports import free_port
from kvtest.waiting import until
from redis.asyncio.connection import AbstractConnection

from kvferry.shared.errors import ConfigurationError, StoreUnavailable
from kvferry.shared.history.redis_client import AsyncRedisLink, CircuitBreaker, RedisLink, RedisOptions
from kvferry.shared.history.redis_url import parse_redis_url

WAIT_S = 60.0


def round_trip(url: str, **options: Any) -> None:
    link = RedisLink(RedisOptions(url=url, timeout_s=20, **options))
    link.call(lambda client: client.set(b"k", b"\x00\xff"))
    assert link.call(lambda client: client.get(b"k")) == b"\x00\xff"
    link.close()


async def async_round_trip(url: str) -> None:
    link = AsyncRedisLink(RedisOptions(url=url, timeout_s=20))
    assert await link.call(lambda client: client.set(b"a", b"\x01"))
    assert await link.call(lambda client: client.get(b"a")) == b"\x01"
    await link.close()


async def test_tcp_and_unix_sockets(redis_server: Any) -> None:
    for url in (redis_server.url, redis_server.socket_url):
        round_trip(url)
        await async_round_trip(url)


async def test_an_acl_user_gets_in_with_its_password_only(redis_server: Any) -> None:
    with redis_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "kv", "on", ">p@ss:w/rd", "~*", "+@all")
        admin.execute_command("ACL", "SETUSER", "default", "off")
    host = f"127.0.0.1:{redis_server.port}"
    round_trip(f"redis://kv:p%40ss%3Aw%2Frd@{host}/0")
    await async_round_trip(f"redis://kv:p%40ss%3Aw%2Frd@{host}/0")
    for url in (f"redis://kv:wrong@{host}/0", redis_server.url):
        link = RedisLink(RedisOptions(url=url, timeout_s=20))
        with pytest.raises(StoreUnavailable) as raised:
            link.call(lambda client: client.get(b"k"))
        assert raised.value.reason == "denied"
        assert "wrong" not in raised.value.message


async def test_tls_with_a_certificate_of_ours(tmp_path: Path) -> None:
    if not redis_servers.has_tls():
        pytest.skip("this server is built without TLS")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    tls_port = free_port()
    options = ("--tls-port", str(tls_port), "--tls-cert-file", str(cert), "--tls-key-file", str(key))
    with redis_servers.RedisServer.running(*options, "--tls-auth-clients", "no"):
        url = f"rediss://127.0.0.1:{tls_port}/0"
        round_trip(f"{url}?ssl_ca_certs={cert}")
        await async_round_trip(f"{url}?ssl_ca_certs={cert}")
        untrusting = RedisLink(RedisOptions(url=url, timeout_s=20))
        with pytest.raises(StoreUnavailable):
            untrusting.call(lambda client: client.get(b"k"))


async def test_a_cluster() -> None:
    with redis_servers.RedisServer.running("--cluster-enabled", "yes") as server:
        with server.client() as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            until(lambda: b"cluster_state:ok" in admin.execute_command("CLUSTER", "INFO"))
        round_trip(f"redis+cluster://127.0.0.1:{server.port}")
        await async_round_trip(f"redis+cluster://127.0.0.1:{server.port}")


async def test_a_master_found_by_sentinel(redis_server: Any) -> None:
    port = free_port()
    config = redis_server.folder / "sentinel.conf"
    config.write_text(f"sentinel monitor kv 127.0.0.1 {redis_server.port} 1\n")
    sentinel = subprocess.Popen(
        [redis_servers.server_binary(), config, "--sentinel", "--bind", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        cwd=redis_server.folder,
    )
    try:
        url = f"redis+sentinel://127.0.0.1:{port}/kv/0"
        link = RedisLink(RedisOptions(url=url, timeout_s=WAIT_S, max_attempts=12))
        assert link.call(lambda client: client.set(b"x", b"1"))
        link.close()
        await async_round_trip(url)
        writer = AsyncRedisLink(RedisOptions(url=url, timeout_s=20))
        script = "return redis.call('SET', KEYS[1], ARGV[1])"
        answer, replicated = await writer.eval_replicated(script, ["y"], b"2")
        assert (answer, replicated) == (b"OK", False)  # this master has no replica
        await writer.close()
    finally:
        sentinel.kill()
        sentinel.wait(WAIT_S)


def test_a_dead_server_is_left_alone_and_taken_back_when_it_returns(redis_server: Any) -> None:
    now_s = [100.0]
    link = RedisLink(RedisOptions(url=redis_server.url, timeout_s=20, backoff_s=0.001))
    link.breaker = breaker = CircuitBreaker(max_failures=2, open_s=5, clock=lambda: now_s[0])
    calls = []

    def get(client: Any) -> Any:
        calls.append(1)
        return client.get(b"k")

    assert link.call(get) is None
    redis_server.kill()
    reasons = []
    for _ in range(4):
        with pytest.raises(StoreUnavailable) as raised:
            link.call(get)
        reasons.append(raised.value.reason)
    assert reasons == ["unreachable", "unreachable", "breaker_open", "breaker_open"]
    assert len(calls) == 1 + 2 * 3
    redis_server.start()
    assert breaker.is_open
    now_s[0] += 6.3
    assert link.call(get) is None
    assert not breaker.is_open


async def test_a_paused_server_costs_its_timeout_and_no_more_tries(redis_server: Any) -> None:
    link = RedisLink(RedisOptions(url=redis_server.url, timeout_s=0.2, breaker_failures=1))
    async_link = AsyncRedisLink(RedisOptions(url=redis_server.url, timeout_s=0.2, breaker_failures=1))
    redis_server.pause()
    try:
        with pytest.raises(StoreUnavailable) as raised:
            link.call(lambda client: client.get(b"k"))
        assert raised.value.reason == "timeout"
        with pytest.raises(StoreUnavailable) as raised:
            await async_link.call(lambda client: client.get(b"k"))
        assert raised.value.reason == "timeout"
    finally:
        redis_server.resume()
    assert link.breaker.is_open
    await async_link.close()


def test_a_full_server_is_alive_and_says_so(redis_server: Any) -> None:
    with redis_server.client() as admin:
        admin.config_set("maxmemory", "1mb")
        admin.config_set("maxmemory-policy", "noeviction")
    link = RedisLink(RedisOptions(url=redis_server.url, timeout_s=20, breaker_failures=1))
    with pytest.raises(StoreUnavailable) as raised:
        link.call(lambda client: client.set(b"k", bytes(1 << 20)) and client.set(b"l", bytes(1 << 20)))
    assert raised.value.reason == "full"
    assert not link.breaker.is_open
    with pytest.raises(StoreUnavailable) as raised:
        link.call(lambda client: client.lpop(client.ping() and b"") or client.execute_command("NOPE"))
    assert raised.value.reason == "refused"


def test_an_open_breaker_lets_one_trial_through_at_a_time() -> None:
    now_s = [0.0]
    breaker = CircuitBreaker(max_failures=1, open_s=10, clock=lambda: now_s[0], uniform=lambda low, high: 1.0)
    breaker.enter()
    breaker.failed()
    with pytest.raises(StoreUnavailable, match=r"10\.0 s"):
        breaker.enter()
    now_s[0] = 10.0
    breaker.enter()
    with pytest.raises(StoreUnavailable):
        breaker.enter()
    now_s[0] = 20.0
    breaker.enter()
    breaker.succeeded()
    breaker.enter()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://host", "scheme"),
        ("redis://:secret@", "a host is missing"),
        ("redis://:secret@host:port/0", "[Pp]ort"),
        ("redis://host/zero", "database"),
        ("redis://host/0?ssl_ca_certs=x", "ssl_ca_certs is no option"),
        ("rediss://host/0?ssl_check_hostname=maybe", "ssl_check_hostname"),
        ("unix://", "socket's path"),
        ("redis+sentinel://:secret@host:26379", "master's name"),
        ("redis+cluster://host/1", "path"),
        ("redis://host/0/1", "path"),
        ("redis://a,b/0", "several hosts"),
    ],
)
def test_a_bad_url_is_refused_without_showing_its_password(url: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as raised:
        RedisOptions(url=url)
    assert "secret" not in raised.value.message


def test_urls_name_all_hosts_and_options() -> None:
    address = parse_redis_url(
        "rediss+sentinel://u:p%2Fq@a:1,[::1]/main/3?ssl_ca_certs=/ca&ssl_check_hostname=false"
        "&sentinel_username=s&sentinel_password=t"
    )
    query = "ssl_ca_certs=%2Fca&ssl_check_hostname=false"
    assert address.urls == tuple(f"rediss://u:p%2Fq@{host}/3?{query}" for host in ("a:1", "[::1]:26379"))
    assert (address.topology, address.service) == ("sentinel", "main")
    assert address.sentinel_credentials == {"username": "s", "password": "t"}
    assert "p%2Fq" not in repr(address)
    assert "'t'" not in repr(address)
    assert parse_redis_url("unix://u:p@/run/redis.sock?db=2").urls == ("unix://u:p@/run/redis.sock?db=2",)


async def test_a_cancellation_that_the_client_swallows_is_raised() -> None:
    link = AsyncRedisLink(RedisOptions(url="redis://127.0.0.1:1/0", timeout_s=WAIT_S))
    begun = asyncio.Event()

    async def swallows(_: Any) -> int:
        begun.set()
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            return 1
        return 0

    call = asyncio.create_task(link.call(swallows))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_connection_that_is_closed_while_a_command_is_written_is_replaced(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster that replaces a master, another task does this."""
    check_health, calls = AbstractConnection.check_health, itertools.count()

    async def closed_meanwhile(self: AbstractConnection) -> None:
        await check_health(self)
        if next(calls) == 1:
            await self.disconnect(nowait=True)

    monkeypatch.setattr(AbstractConnection, "check_health", closed_meanwhile)
    link = AsyncRedisLink(RedisOptions(url=redis_server.url, timeout_s=WAIT_S))
    for value in (b"a", b"b"):
        await link.call(lambda client, value=value: client.set("key", value))  # type: ignore[misc]
        assert await link.call(lambda client: client.get("key")) == value
    assert next(calls) > 4
    await link.close()
