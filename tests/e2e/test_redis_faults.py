"""Redis emptied, full, evicting, slow, killed or paused while a turn loads its history or commits it: the
turn ends with the right answer, misses are counted, and what is stored is whole again once Redis is. Where
the turn could not be stored, its answer says so, and the next one has the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kvtest import redis_server as redis_servers
from kvtest.answers import assistant, chat, chat_body, known_tokens, said, stored_tokens, user
from kvtest.waiting import until

NUM_LAYERS = 4
MOMENTS: dict[str, tuple[tuple[bytes, ...], int]] = {
    # the request that the fault comes before, and the how-manieth of its kind
    "first layer": ((b"MGET", b"kvferry:history"), 1),
    "last layer": ((b"MGET", b"kvferry:history"), NUM_LAYERS),
    "commit": ((b"EVAL", b"kvferry:history"), 1),
}
FAULTS = [
    *(("emptied", moment) for moment in MOMENTS),
    *(("full", moment) for moment in ("first layer", "commit")),
    *(("evicting", moment) for moment in ("first layer", "commit")),
    *(pytest.param("slow", moment, marks=pytest.mark.full) for moment in ("first layer", "commit")),
    *(("killed", moment) for moment in ("last layer", "commit")),
    pytest.param("paused", "last layer", marks=pytest.mark.full),
]


@dataclass(kw_only=True)
class Faulty:
    """A stack in one process, the Redis behind it, and the network between them."""

    stack: Any
    server: Any
    gate: Any

    def strike(self, fault: str) -> None:
        with self.server.client() as admin:
            if fault == "emptied":
                admin.flushall()
            elif fault == "full":
                admin.config_set("maxmemory", 1)
            elif fault == "evicting":
                admin.config_set("maxmemory-policy", "allkeys-random")
                used = admin.info("memory")
                admin.config_set("maxmemory", (used["used_memory"] + used["used_memory_startup"]) // 2)
        if fault == "slow":
            self.gate.throttle(20_000)  # a session's rows have 600 kB: 30 s
        elif fault == "killed":
            self.server.kill()
        elif fault == "paused":
            self.server.pause()

    def heal(self, fault: str) -> None:
        if fault == "slow":
            self.gate.throttle(0)
        elif fault == "killed":
            self.server.start()
        elif fault == "paused":
            self.server.resume()
        else:
            with self.server.client() as admin:
                admin.config_set("maxmemory-policy", "noeviction")
                admin.config_set("maxmemory", 0)

    def ask(
        self, said: str | list[dict[str, str]], session_id: str, *, patient: bool = True
    ) -> dict[str, Any]:
        """A turn of a key of its own, so that it begins with nobody else's KV; returns once it is kept.

        Args:
            said: the next message, or the whole conversation.
            patient: while Redis is away, wait for a session that only Redis knows of.
        """
        fields = {"max_tokens": 6, "kv_compression": {"method": "full"}}
        mode = "append" if isinstance(said, str) else "replace"
        body = chat_body(said, session_id, session_mode=mode, **fields)
        answer = chat(self.stack.base_url, body, key=f"key-{session_id}", is_patient=patient)
        self.stack.wait_kept(session_id, f"key-{session_id}")
        return answer

    def stored_tokens(self, session_id: str) -> int:
        """Tokens of the session that Redis has KV of."""
        return stored_tokens(self.server, session_id)

    def misses(self) -> float:
        return float(self.stack.prefill_metric("kvferry_history_miss_total"))

    def choices(self, way: str, reason: str) -> float:
        return float(self.stack.prefill_metric("kvferry_history_choices_total", way=way, reason=reason))


@pytest.fixture(scope="module")
def faulty(start_stack: Callable[..., Any]) -> Iterator[Faulty]:
    with redis_servers.RedisServer.running() as server:
        gate = redis_servers.Gate(server.port)
        options = (
            # room for one conversation: the other one's turn leaves this one's in Redis alone
            *("--in-process", "--history-bytes", str(1_100_000), "--history-redis", gate.url),
            # a turn waits for Redis five times as long
            *("--history-redis-timeout-s", "3"),
        )
        with start_stack(*options) as stack:
            yield Faulty(stack=stack, server=server, gate=gate)
        gate.close()


@pytest.fixture(scope="module")
def lines(make_document: Callable[..., Any]) -> list[str]:
    return make_document(61, num_words=130, num_facts=6).turns(4)


@pytest.fixture(scope="module")
def undisturbed(faulty: Faulty, lines: list[str]) -> list[dict[str, Any]]:
    return [faulty.ask(text, "undisturbed") for text in lines]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("fault", "moment"), FAULTS)
def test_a_fault_in_a_turn_costs_a_miss_at_most(
    faulty: Faulty, lines: list[str], undisturbed: list[dict[str, Any]], fault: str, moment: str
) -> None:
    session = f"{fault}-{moment}".replace(" ", "-")
    fillers = (f"{session}-filler-{number}" for number in range(1000))
    answers = [faulty.ask(lines[0], session)]
    until(lambda: faulty.stored_tokens(session) == known_tokens(answers[0]))
    faulty.ask(lines[0], next(fillers))

    misses, recomputed = faulty.misses(), faulty.choices("recompute", "miss")
    words, count = MOMENTS[moment]
    faulty.gate.trap(*words, action=lambda: faulty.strike(fault), count=count)
    try:
        answers.append(faulty.ask(lines[1], session, patient=False))
    finally:
        faulty.heal(fault)
    assert not faulty.gate.is_set
    reused = answers[1]["kv"]["reused_tokens"]
    assert reused in {0, known_tokens(answers[0])}
    if moment == "commit" or fault == "full":
        assert reused > 0
    elif fault != "evicting":  # which may have spared this session
        assert reused == 0
    assert faulty.misses() - misses == (reused == 0)
    assert faulty.choices("recompute", "miss") - recomputed == (reused == 0)
    assert answers[1]["kv"]["history"] == ("delta" if reused else "recompute")

    # the worker leaves Redis alone for a moment: other sessions show when it no longer does
    deadline_s = time.monotonic() + 120
    for filler in fillers:
        if known_tokens(faulty.ask(lines[0], filler)) == faulty.stored_tokens(filler):
            break
        assert time.monotonic() < deadline_s
    is_stored = "session" not in answers[1]["kv"]
    whole = [message for line, answer in zip(lines, answers, strict=False) for message in turn(line, answer)]
    answers.append(faulty.ask(lines[2] if is_stored else [*whole, user(lines[2])], session))
    until(lambda: faulty.stored_tokens(session) == known_tokens(answers[2]))
    faulty.ask(lines[0], next(fillers))
    answers.append(faulty.ask(lines[3], session))
    assert answers[3]["kv"]["reused_tokens"] == known_tokens(answers[2])
    assert answers[3]["kv"]["history_tier"] == "redis"
    # the ids of a restated answer may be others
    same = len(answers) if is_stored else 2
    assert [said(answer) for answer in answers[:same]] == [said(answer) for answer in undisturbed[:same]]
    assert [answer["usage"]["prompt_tokens"] for answer in answers[:same]] == [
        answer["usage"]["prompt_tokens"] for answer in undisturbed[:same]
    ]


def turn(line: str, answer: dict[str, Any]) -> list[dict[str, str]]:
    return [user(line), assistant(said(answer))]
