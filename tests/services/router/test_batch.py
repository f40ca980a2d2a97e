"""Several prompts' completions read as one: one end after all of them, or the first error."""

from __future__ import annotations

from typing import Any

from kvferry.services.router.completion.batch import CompletionBatch
from kvferry.services.router.completion.choice import ChoiceDelta, usage_of
from kvferry.services.router.completion.completion import CompletionEnd
from kvferry.shared.errors import KvferryError, Overloaded

KV = {"method": "full", "prompt_tokens": 3, "shipped_bytes": 5}


class Part:
    """The completion of one prompt, as far as a batch looks at it."""

    def __init__(self, index: int) -> None:
        self.choices = [index]
        self.num_prompt_tokens, self.num_completion_tokens = 3, 2
        self.events: Any = None
        self.tell_end: Any = None
        self.num_cancelled = 0

    def cancel(self) -> None:
        self.num_cancelled += 1

    def usage(self) -> Any:
        return usage_of(3, 2, 1)

    def kv(self) -> Any:
        return KV

    def deliver(self, text: str) -> None:
        self.events.put_nowait(ChoiceDelta(index=self.choices[0], text=text))

    def end(self) -> None:
        self.tell_end(CompletionEnd(usage=self.usage(), kv=self.kv()))


def batch_of(number: int) -> tuple[CompletionBatch, list[Any]]:
    parts = [Part(index) for index in range(number)]
    return CompletionBatch(None, parts), parts  # type: ignore[arg-type]


def taken(batch: CompletionBatch) -> list[Any]:
    return [batch.events.get_nowait() for _ in range(batch.events.qsize())]


def test_deltas_come_as_they_are_and_one_end_after_the_last_prompts() -> None:
    batch, (one, other) = batch_of(2)
    one.deliver("a")
    other.deliver("b")
    other.end()
    one.deliver("c")
    assert [delta.text for delta in taken(batch)] == ["a", "b", "c"]
    one.end()
    (end,) = taken(batch)
    assert end == {
        "usage": usage_of(6, 4, 2),
        "kv": {"method": "full", "prompt_tokens": 6, "shipped_bytes": 10},
    }
    assert one.num_cancelled == other.num_cancelled == 0


def test_the_first_error_ends_every_prompt_and_nothing_follows() -> None:
    batch, (one, other, last) = batch_of(3)
    one.end()
    error: KvferryError = Overloaded("no room")
    other.tell_end(error)
    assert taken(batch) == [error]
    assert last.num_cancelled == 1
