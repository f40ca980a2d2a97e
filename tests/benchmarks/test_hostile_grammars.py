"""A few hostile grammars end as the benchmark says, and all are the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

from kvtest.benchmarks import run_benchmark
from kvtest.hostile_grammars import hostile_request


def test_a_few_hostile_grammars_end_in_answers_or_errors_by_name(tmp_path: Path) -> None:
    output = tmp_path / "hostile.json"
    run_benchmark("hostile_grammars.py", "--count", "6", "--seed", "33", "--output", output)
    found = json.loads(output.read_text())
    assert found["requests"] == sum(found["by_status"].values()) == 6
    assert (found["violations"], found["restarts"]) == ([], 0)
    assert set(found["by_status"]) <= {"200", "400", "413", "429"}
    assert found["chats"]["count"] > 0
    assert all(mib > 0 for mib in found["rss_mib"]["after"].values())


def test_the_requests_are_the_same_again_and_of_every_kind() -> None:
    requests = [hostile_request(33, number) for number in range(300)]
    assert requests == [hostile_request(33, number) for number in range(300)]
    assert len({request.kind for request in requests}) > 20
    assert {request.path for request in requests} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    }
