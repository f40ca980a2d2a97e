"""`kvferry bench` compares a server with vLLM's CPU build, under the same load.

vLLM is in an environment of its own, which `make peers` makes; PEERS names it. The load and the figures are
tested, not who is faster.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtest.stack import Stack, serving

from kvferry.tools.bench.command import bench
from kvferry.tools.bench.config import BenchConfig

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get("PEERS"), reason="PEERS names no environment with vLLM; make peers"
    ),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with serving("--in-process") as stack:
        yield stack


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    sys.path.insert(0, BENCHMARKS)
    try:
        from peers import served as peer
    finally:
        sys.path.remove(BENCHMARKS)
    with peer("vllm", Path(os.environ["PEERS"]), tmp_path_factory.mktemp("vllm")) as url:
        yield url


async def test_both_servers_answer_the_whole_load(served: Stack, vllm_url: str, tmp_path: Path) -> None:
    config = BenchConfig(
        url=served.base_url,
        beside=vllm_url,
        mix="60:8",
        conversations=4,
        turns=2,
        repeats=2,
        out=str(tmp_path),
    )
    assert await bench(config) == 0
    servers = json.loads((tmp_path / "results.json").read_text())["servers"]
    for name in ("url", "beside"):
        assert len(servers[name]["runs"]) == 2
        assert servers[name]["median"]["first_token_ms"]["p50"] > 0
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    for name in ("url", "beside"):
        requests = [line for line in lines if line["server"] == name]
        assert len(requests) == 2 * 4 * 2
        assert {line["outcome"] for line in requests} == {"complete"}
        assert {line["output_tokens"] for line in requests} == {8}
