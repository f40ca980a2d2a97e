"""Agents that send no session ids: their KV is found by prefix, whichever router they ask, and an edited
context reuses everything before the edit.

Two routers, two prefill workers and one decode worker as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from kvtest.answers import assistant, chat, said, user
from kvtest.processes import Process, started

METHOD = {"method": "rocketkv"}
MAX_TOKENS = 6
OBSERVED = 64
"""At least as many tokens as the method's selection observes."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Process], list[Process]]]:
    """The routers and the prefill workers."""
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        names = ("prefill-0", "prefill-1", "decode-0")
        waits = [stack.enter_context(started(folder, name, "--threads", "1")) for name in names]
        *prefill, decode = (wait() for wait in waits)
        options = (
            *("--listen", "127.0.0.1:0"),
            *("--prefill-workers", ",".join(worker.addresses["address"] for worker in prefill)),
            *("--decode-workers", decode.addresses["address"]),
        )
        waits = [stack.enter_context(started(folder, f"router-{index}", *options)) for index in range(2)]
        yield [wait() for wait in waits], prefill


class Agent:
    """Resends its whole conversation at every turn, without an id, to the routers in turn."""

    def __init__(self, routers: list[Process], key: str) -> None:
        self.routers = routers
        self.key = key
        self.messages: list[dict[str, str]] = []
        self.num_asked = 0

    def ask(self, text: str) -> dict[str, Any]:
        router = self.routers[self.num_asked % len(self.routers)]
        self.num_asked += 1
        self.messages.append(user(text))
        body = {
            "model": "demo",
            "messages": self.messages,
            "kv_compression": METHOD,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        answer = chat(f"http://{router.addresses['address']}", body, key=self.key)
        self.messages.append(assistant(said(answer)))
        return answer


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def prompt(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens"]
    return tokens


def texts(make_document: Callable[..., Any], seed: int, number: int) -> list[str]:
    return [
        f"{document.text} {document.questions[0][0]}"
        for document in (make_document(seed + turn, num_words=200) for turn in range(number))
    ]


def test_turns_at_two_routers_find_the_worker_and_ship_what_decode_lacks(
    cluster: tuple[list[Process], list[Process]], make_document: Callable[..., Any]
) -> None:
    routers, prefill = cluster
    lines = texts(make_document, 100, 6)
    agent = Agent(routers, "resends")
    before = [worker.metric("kvferry_prefill_tokens_total") for worker in prefill]
    answers = [agent.ask(line) for line in lines]
    used = [
        worker.metric("kvferry_prefill_tokens_total") - count
        for worker, count in zip(prefill, before, strict=True)
    ]
    # Every turn but the first continues from the whole prompt before, at the one worker that has it.
    for former, answer in pairwise(answers):
        assert cached(answer) >= prompt(former)
    assert min(used) == 0
    assert max(used) <= prompt(answers[-1])
    # Each router knows its own prompts, so decode retains rows from the second turn that continues one.
    assert [answer["kv"].get("history") for answer in answers[:2]] == [None, "fetch"]
    assert answers[-1]["kv"]["history"] == "delta"
    # What was cached and retained changes no answer.
    for line_number, answer in enumerate(answers):
        alone = Agent(routers, f"alone-{line_number}")
        alone.messages = agent.messages[: 2 * line_number]
        again = alone.ask(lines[line_number])
        assert cached(again) == 0
        assert again["choices"][0]["message"] == answer["choices"][0]["message"]


@pytest.mark.parametrize("edit", ["result dropped", "message edited", "compacted"])
def test_an_edited_context_reuses_everything_before_the_edit(
    cluster: tuple[list[Process], list[Process]], make_document: Callable[..., Any], edit: str
) -> None:
    routers, _ = cluster
    lines = texts(make_document, 200, 5)
    agent = Agent(routers, edit)
    answers = [agent.ask(line) for line in lines[:3]]
    # The third message is changed, or it goes, or the second and third exchanges become one line.
    unchanged = prompt(answers[1])
    if edit == "result dropped":
        agent.messages[4]["content"] = "gone ."
    elif edit == "message edited":
        agent.messages[4]["content"] = agent.messages[4]["content"].replace(" the ", " a ")
    else:
        unchanged = prompt(answers[0])
        agent.messages[2:6] = [{"role": "user", "content": "the old sailor painted the bridge ."}]
    edited = agent.ask(lines[3])
    assert unchanged <= cached(edited) < unchanged + OBSERVED
    # The edited conversation goes on from all of itself, at either router.
    for line in lines[4], lines[0]:
        last, edited = edited, agent.ask(line)
        assert cached(edited) >= prompt(last)
    alone = Agent(routers, f"{edit} alone")
    alone.messages = agent.messages[:-2]
    again = alone.ask(agent.messages[-2]["content"])
    assert cached(again) == 0
    assert alone.messages[-1] == agent.messages[-1]
