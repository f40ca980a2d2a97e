"""A few fuzzed cases of each target, and the committed ones. `benchmarks/fuzz.py` runs many."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtest.fuzz import TARGETS
from kvtest.fuzz.requests import Api, exchange
from kvtest.fuzz.run import Case, Target, run
from kvtest.router import _quiet_logs as _quiet_logs
from kvtest.router import base_url as base_url
from kvtest.router import tokenizer as tokenizer

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "corpus.jsonl").read_text().splitlines()]
HAS_RANDOM_IDS = ("disk", "stored")
"""Targets whose cases name what another run has under other ids: there, a reader may say something else."""
NUM_REQUESTS = 150


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    made = {name: make() for name, make in TARGETS.items()}
    yield made
    for target in made.values():
        target.close()


@pytest.mark.parametrize("name", TARGETS)
@settings(suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_nearly_right_bytes_are_read_or_refused_by_name(
    targets: dict[str, Target], name: str, rng: Random
) -> None:
    targets[name].read(targets[name].make(rng))


@pytest.mark.parametrize("name", TARGETS)
def test_memory_and_time_of_seeded_cases_are_bounded(name: str) -> None:
    report = run(TARGETS[name](), seed=7, num_messages=150)
    assert report.findings == []
    assert report.num_messages >= 150
    assert len(report.outcomes) > 2


@pytest.mark.parametrize("name", TARGETS)
def test_the_committed_cases_end_as_they_did(targets: dict[str, Target], name: str) -> None:
    entries = [committed for committed in CORPUS if committed["target"] == name]
    assert entries
    for entry in entries:
        outcome = targets[name].read(tuple(base64.b64decode(part) for part in entry["case"]))
        assert outcome == entry["outcome"] or name in HAS_RANDOM_IDS, entry


async def test_requests_of_the_openapi_document_get_answers(base_url: str) -> None:
    document = httpx.get(f"{base_url}/openapi.json", timeout=30).json()
    api = Api(document)
    requests = [api.make(Random(f"test {number}")) for number in range(NUM_REQUESTS)]
    requests += [base64.b64decode(entry["case"][0]) for entry in CORPUS if entry["target"] == "http"]
    assert len(requests) > NUM_REQUESTS
    statuses = set()
    where = urlsplit(base_url)
    for request in requests:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        async with asyncio.timeout(30):
            outcome, _ = await exchange(reader, writer, request)
        writer.close()
        assert outcome[0] in "24", (request, outcome)
        statuses.add(outcome)
    assert {"200", "400", "404"} <= statuses


@pytest.mark.parametrize(
    ("how", "found"), [("raise", "KeyError"), ("grow", "are allowed"), ("grow once", ""), ("", "")]
)
def test_a_reader_with_a_mistake_is_found(how: str, found: str) -> None:
    taken: list[Any] = []

    def read(case: Case) -> str:
        if how == "raise":
            return str({}[case[0]])
        if how == "grow" or (how == "grow once" and not taken):
            taken.append(bytes(1000 * len(case[0])))
        return "read"

    target = Target(name="t", make=lambda rng: (rng.randbytes(9),), read=read, max_bytes=(8, 64))
    report = run(target, seed=1, num_messages=3)
    assert [found in finding["what"] for finding in report.findings] == [True] * (3 if found else 0)
    assert report.num_cases == 3
