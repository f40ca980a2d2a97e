"""Transports of other packages: the documented example carries transfers, and what cannot be used is refused
by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvtest.wire as kit
import pytest
from kvtest.wire import RecordingSink

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.prefill.config import PrefillConfig
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.process.worker import ProcessTransport
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.transports import make_transport
from kvferry.tools.certs import make_certs

PAGE = Path(__file__).parents[3] / "docs" / "writing-a-transport.md"
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(lines)`: the page's example as a distribution with these entry points."""

    def write(lines: str) -> None:
        (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        (tmp_path / "outside_kvferry_transport.py").write_text(
            example + "\n\nclass Open(Counted):\n    protects_blocks = False\n"
        )
        info = tmp_path / "outside_kvferry_transport-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: outside-kvferry-transport\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[kvferry.transports]\n{lines}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "outside_kvferry_transport", raising=False)

    return write


@pytest.mark.parametrize("with_certs", [False, True])
def test_the_pages_example_carries_a_transfer(install: Install, tmp_path: Path, with_certs: bool) -> None:
    install("counted = outside_kvferry_transport:Counted")
    options: dict[str, Any] = {"transport": "counted"}
    if with_certs:
        make_certs(tmp_path / "certs", days=2, everything=False)
        options["certs"] = str(tmp_path / "certs")
    ends = [
        ProcessTransport(PrefillConfig(**options), "prefill"),
        ProcessTransport(DecodeConfig(**options), "decode"),
    ]
    sink, connected = RecordingSink(), list[str]()
    server = ends[1].server(sink)
    channel = ends[0].connecting(connected.append)
    sender = BlockSender(channel, buffer_bytes=1 << 20, timeout_s=kit.WAIT_S)
    try:
        manifest = kit.make_manifest(rows=(30, 50))
        layers = kit.make_layers(manifest)
        ticket = kit.make_ticket(manifest, server.endpoint)
        transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
        kit.ship(transfer, layers)
        kit.assert_arrived(sink, manifest, layers)
        (counted,) = ends[0]._transport.channels  # type: ignore[attr-defined]
        assert counted.sent_bytes >= sum(transfer.bytes_by_kind.values())
        assert connected == ["counted"]
    finally:
        sender.close()
        server.close()


def test_a_transport_that_does_not_protect_blocks_is_refused_with_certs(install: Install) -> None:
    install("open = outside_kvferry_transport:Open")
    with pytest.raises(ConfigurationError, match="transport is 'open' with certs, and does not protect"):
        make_transport(PrefillConfig(transport="open", certs="keys"))
    assert not make_transport(PrefillConfig(transport="open", certs="keys", insecure=True)).protects_blocks
    make_transport(PrefillConfig(transport="open"))


@pytest.mark.parametrize(
    ("lines", "name", "problem"),
    [
        ("", "nixl", "transport is 'nixl'; zmq are installed"),
        ("lost = outside_kvferry_transport:NO_SUCH", "lost", "'lost' of kvferry.transports cannot be loaded"),
        ("counted = outside_kvferry_transport:Counted", "count", "transport is 'count'; zmq, counted are"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    install: Install, lines: str, name: str, problem: str
) -> None:
    install(lines)
    with pytest.raises(ConfigurationError, match=problem):
        make_transport(DecodeConfig(transport=name))
