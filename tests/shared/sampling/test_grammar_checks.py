"""Grammars are tried in processes of their own: hostile ones end there, and callers take turns."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from kvtest.text_models import byte_level_tokenizer
from kvtest.waiting import eventually
from transformers import PreTrainedTokenizerFast

from kvferry.models import DEMO_MODEL
from kvferry.shared.errors import CapacityExceeded, InvalidRequest, Overloaded
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling import grammar_checks
from kvferry.shared.sampling.grammar_checks import GrammarChecks
from kvferry.shared.sampling.params import Grammar

RAW = byte_level_tokenizer()
ENDS = tuple(RAW.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>"))
TOKENIZER = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=RAW), ENDS)


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=value if isinstance(value, str) else json.dumps(value))


def small(number: int) -> Grammar:
    return schema({"const": number})


def overlapping() -> Grammar:
    """2 KB that take minutes and a gigabyte."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return schema(
        {
            "allOf": [
                {"properties": {"x": {"type": "string", "pattern": f".*{letters[i % 26]}.{{{i}}}"}}}
                for i in range(40)
            ]
        }
    )


def chain() -> Grammar:
    """A reference to a reference to a reference, 1,000 deep: it takes the stack."""
    links = {f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1000)}
    return schema({"$defs": {**links, "d1000": {}}, "$ref": "#/$defs/d0"})


def references() -> Grammar:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
    return schema({"$defs": {**links, "d4000": {}}, "$ref": "#/$defs/d0"})


def choices() -> Grammar:
    return schema('{"anyOf":[' * 2000 + "{}" + "]}" * 2000)


HOSTILE: dict[str, Callable[[], Grammar]] = {
    "overlapping": overlapping,
    "chain": chain,
    "references": references,
    "choices": choices,
    "deep": lambda: schema("[" * 100_000),
    "lark": lambda: Grammar(kind="lark", text="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "rules": lambda: Grammar(
        kind="lark", text="".join(f"r{i}: r{i + 1}\n" for i in range(20_000)) + 'r20000: "a"\nstart: r0\n'
    ),
}


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    made = GrammarChecks(TOKENIZER.for_grammars, RAW.get_vocab_size(), ENDS)
    yield made
    await made.close()
    assert not children()


def children() -> set[int]:
    """The processes that this one has started to try grammars."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "grammar_child" in (path / "cmdline").read_text():
                found.add(int(path.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_is_refused_in_words_and_the_next_is_not(
    checks: GrammarChecks, name: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            await checks.check(HOSTILE[name](), "a")
        assert len(refused.value.message) < 400
    await checks.check(small(1), "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("((a ::= ", "Expected name"),
        ('a ::= "b"', "No 'root' rule"),
        ("root ::= -[>root ::=  \\", "out of range"),
    ],
)
async def test_what_is_wrong_with_ebnf_is_said_at_once(
    checks: GrammarChecks, text: str, message: str
) -> None:
    """Its converter raises errors of any kind."""
    with pytest.raises(InvalidRequest, match=message):
        await checks.check(Grammar(kind="grammar", text=text), "a")


async def test_what_is_known_is_not_tried_again(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checks.check(small(1))
    monkeypatch.setattr(grammar_checks._Child, "ask", lambda *asked: pytest.fail("it was tried"))
    await checks.check(small(1), "another")


async def test_a_caller_that_leaves_takes_its_grammar_along(checks: GrammarChecks) -> None:
    task = asyncio.create_task(checks.check(overlapping(), "a"))
    while not (begun := children()):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not children() & begun
    await checks.check(small(1), "a")


async def test_callers_take_turns_and_one_alone_has_not_all_processes(checks: GrammarChecks) -> None:
    """While one caller's grammars take seconds, another's wait for none of them."""
    hostile = [asyncio.create_task(checks.check(overlapping(), "a"))]
    for number in range(7):
        another = schema({**json.loads(overlapping().text), "title": str(number)})
        hostile.append(asyncio.create_task(checks.check(another, "a")))
    while not children():
        await asyncio.sleep(0.01)
    for number in range(5):
        await checks.check(small(number), "b")
    assert not any(task.done() for task in hostile)
    assert len(children()) <= grammar_checks.NUM_CHILDREN
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_a_caller_s_queue_is_bounded(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 2)
    first = asyncio.create_task(checks.check(overlapping(), "a"))
    while not children():
        await asyncio.sleep(0.01)
    waiting = [asyncio.create_task(checks.check(small(number), "a")) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityExceeded, match="at most 2"):
        await checks.check(small(9), "a")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.gather(*waiting)


async def test_who_has_left_the_queue_takes_no_place_in_it(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 2)
    first = asyncio.create_task(checks.check(overlapping(), "a"))
    while not children():
        await asyncio.sleep(0.01)
    for number in range(6):
        leaving = asyncio.create_task(checks.check(small(number), "a"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    waiting = asyncio.create_task(checks.check(small(9), "a"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await waiting
    assert not checks._turns._taken
    assert not checks._turns._queues


async def test_a_vocabulary_without_grammars_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ChatTokenizer.load(DEMO_MODEL)
    checks = GrammarChecks(words.for_grammars, 704, (6,))
    start, started = grammar_checks._Child.start, []

    async def counted(child: Any, hello: bytes) -> Any:
        started.append(child)
        return await start(child, hello)

    monkeypatch.setattr(grammar_checks._Child, "start", counted)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="has no structured output"):
            await checks.check(small(1))
    assert len(started) == 1
    await checks.close()


async def test_a_child_gets_no_secret(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_API_KEYS", "secret")
    await checks.check(small(1))
    (child,) = children()
    assert "secret" not in Path(f"/proc/{child}/environ").read_text()


async def test_a_process_that_ends_is_started_anew(checks: GrammarChecks) -> None:
    await checks.check(small(1))
    (child,) = children()
    os.kill(child, 9)
    await eventually(lambda: not checks._idle[0].is_running)
    await checks.check(small(2))


async def test_a_grammar_is_not_blamed_for_a_process_that_others_kill(checks: GrammarChecks) -> None:
    await checks.check(small(1))
    (child,) = children()
    os.kill(child, signal.SIGSTOP)
    checking = asyncio.create_task(checks.check(small(2)))
    await eventually(lambda: not checks._idle)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(Overloaded, match="was killed"):
        await checking
    await checks.check(small(2))


async def test_a_process_that_does_not_start_is_the_server_s_fault(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks.sys, "executable", "/bin/false")
    with pytest.raises(Overloaded, match="did not start"):
        await checks.check(small(1))
    monkeypatch.undo()
    await checks.check(small(1))


async def test_a_child_has_no_torch(checks: GrammarChecks) -> None:
    """It would take seconds and hundreds of megabytes."""
    await checks.check(small(1))
    (child,) = children()
    assert "torch" not in Path(f"/proc/{child}/maps").read_text()
