"""`kvferry bench` against real servers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.command import kvferry
from kvtest.ports import free_port
from kvtest.stack import Stack, serving

from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.tools.bench.command import bench
from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.bench.load import make_load
from kvferry.tools.bench.prompts import PromptMaker
from kvferry.tools.bench.runner import Run
from kvferry.tools.bench.server import Server


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with serving("--in-process") as stack:
        yield stack


def test_the_command_writes_what_it_measured(served: Stack, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = "--mix 130:6@2,190:4 --conversations 6 --total-bound-s 1min --method snapkv --plots"
    given = ("--url", served.base_url, *options.split(), "--token-budget", "64", "--out", str(out))
    done = kvferry("bench", *given)
    assert done.returncode == 0, done.stderr
    assert "output tokens a second" in done.stdout
    result = json.loads((out / "results.json").read_text())
    assert "api_key" not in result["options"]
    (run,) = result["servers"]["url"]["runs"]
    requests = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(requests) == run["requests"] == run["complete"] == 6
    assert run["output_tokens"] == 4 * 6 + 2 * 4
    assert run["good_share"] == 1
    assert run["kv"]["methods"] == {"snapkv": 6}
    assert run["kv"]["shipped_bytes"] == sum(request["kv"]["shipped_bytes"] for request in requests)
    assert 0 < run["kv"]["shipped_bytes"] <= run["kv"]["full_bytes"]
    assert 0 < run["first_token_ms"]["p50"] < run["total_ms"]["p50"]
    assert all((out / name).read_bytes()[:4] == b"\x89PNG" for name in ("latency.png", "timeline.png"))


async def _samples(url: str, config: BenchConfig, *, is_kvferry: bool = True) -> list[Any]:
    load = make_load(config, PromptMaker("demo"), 0)
    async with Server.connect("url", url, "", "", config) as server:
        assert server.is_kvferry
        server.is_kvferry = is_kvferry
        run = Run(server, load, config, lambda: None)
        await run.run()
    return run.samples


async def test_turns_continue_a_session_and_documents_are_reused(served: Stack) -> None:
    config = BenchConfig(mix="20:5", conversations=3, turns=3, documents=2, document_tokens=200)
    samples = await _samples(served.base_url, config)
    assert [sample.outcome for sample in samples] == ["complete"] * 9
    for sample in samples:
        assert sample.kv is not None
        assert sample.kv["reused_tokens"] >= 190 + 25 * sample.turn
        assert 200 + 25 * sample.turn < sample.prompt_tokens < 250 + 40 * sample.turn
    # Nothing is left behind.
    for kind in ("sessions", "documents"):
        assert httpx.get(f"{served.base_url}/v1/{kind}", trust_env=False).json()["data"] == []


async def test_another_server_gets_whole_conversations(served: Stack) -> None:
    """The prompts are as long as those of sessions, but for how an answer's text tokenizes."""
    config = BenchConfig(mix="20:5", conversations=2, turns=3, documents=1, document_tokens=100)
    own = await _samples(served.base_url, config)
    other = await _samples(served.base_url, config, is_kvferry=False)
    for turn in range(3):
        numbers = [sorted(s.prompt_tokens for s in samples if s.turn == turn) for samples in (own, other)]
        assert numbers[1] == pytest.approx(numbers[0], abs=5 * turn)


async def test_cancelled_requests_free_their_memory(served: Stack) -> None:
    config = BenchConfig(mix="50:200", conversations=6, cancel=0.5, arrivals="poisson", rate=50)
    samples = await _samples(served.base_url, config)
    assert sorted(sample.outcome for sample in samples) == ["cancelled"] * 3 + ["complete"] * 3
    assert all(sample.output_tokens == 200 for sample in samples if sample.outcome == "complete")


async def test_refusals_are_counted_by_status_and_end_the_command_with_1(served: Stack) -> None:
    config = BenchConfig(url=served.base_url, mix="9000:5", conversations=2, warmup=0)
    samples = await _samples(served.base_url, config)
    assert [sample.error[0] for sample in samples] == ["http_400", "http_400"]
    assert "context" in samples[0].error[1]
    assert await bench(config) == 1
    with pytest.raises(KvferryError, match="url failed at 9000:5: http_400"):
        await bench(config.model_copy(update={"warmup": 1}))


async def test_two_servers_get_the_same_load_in_turn(served: Stack, tmp_path: Path) -> None:
    with serving("--in-process", "--default-method", "full") as other:
        config = BenchConfig(
            url=served.base_url,
            beside=other.base_url,
            mix="40:4",
            conversations=4,
            repeats=2,
            out=str(tmp_path),
        )
        assert await bench(config) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert len(result["servers"]["url"]["runs"]) == len(result["servers"]["beside"]["runs"]) == 2
    assert result["servers"]["beside"]["median"]["kv"]["methods"] == {"full": 4}
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    tokens = [{(r["run"], r["prompt_tokens"]) for r in lines if r["server"] == s} for s in ("url", "beside")]
    assert tokens[0] == tokens[1]


async def test_a_server_that_dies_and_one_that_is_not_there() -> None:
    with pytest.raises(WorkerUnavailable, match="cannot be reached"):
        await bench(BenchConfig(url=f"http://127.0.0.1:{free_port()}"))
    with serving("--in-process") as stack:
        config = BenchConfig(mix="20:2000", conversations=3, concurrency=1)

        def kill() -> None:
            stack.process.send_signal(signal.SIGKILL)

        load = make_load(config, PromptMaker("demo"), 0)
        async with Server.connect("url", stack.base_url, "", "", config) as server:
            run = Run(server, load, config, kill)
            await run.run()
    assert [sample.outcome for sample in run.samples] == ["complete", "failed", "failed"]
    assert {sample.error[0] for sample in run.samples if sample.error} <= {"connection", "cut"}
