"""Thoughts apart from content, and the chat template's own variables, through the whole server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from kvtest.stack import Stack, serving
from kvtest.text_models import make_text_model

from kvferry.shared.history.records import common_prefix

TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content and loop.index0 > messages | length - 2 %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if reasoning_effort %}{{ 'effort ' + reasoning_effort + ' ' }}{%- endif %}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{%- endif %}"
    "{%- endif %}"
)
ASK: Any = {"model": "thinker", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
THOUGHT: Any = {"structured_outputs": {"regex": "<think>[a-e]{4}</think>\\n\\n[0-9]{5}"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = make_text_model(tmp_path_factory.mktemp("thinker"), template=TEMPLATE)
    with serving("--model", str(folder), "--model-name", "thinker", "--in-process") as stack:
        yield stack


@pytest.fixture
def client(served: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="-", max_retries=0, timeout=120) as client:
        yield client


def prompt_of(client: openai.OpenAI, **fields: Any) -> str:
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    answer: Any = client.chat.completions.create(**{**ASK, "max_tokens": 1, **fields}, extra_body=extra)
    echoed = client.completions.create(
        model="thinker", prompt=answer.prompt_token_ids, max_tokens=0, echo=True, extra_body={}
    )
    return echoed.choices[0].text


def test_thoughts_are_apart_from_content_whole_and_streamed(client: openai.OpenAI) -> None:
    whole: Any = client.chat.completions.create(**ASK, seed=1, extra_body=THOUGHT).choices[0].message
    assert len(whole.reasoning_content) == 4
    assert len(whole.content) == 5
    deltas: list[Any] = [
        choice.delta
        for chunk in client.chat.completions.create(**ASK, seed=1, stream=True, extra_body=THOUGHT)
        for choice in chunk.choices
    ]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    for fields, content in (
        ({"include_reasoning": False}, whole.content),
        ({"separate_reasoning": False}, f"<think>{whole.reasoning_content}</think>\n\n{whole.content}"),
    ):
        answer = client.chat.completions.create(**ASK, seed=1, extra_body={**THOUGHT, **fields})
        assert answer.choices[0].message.content == content
        assert "reasoning_content" not in (answer.choices[0].message.model_extra or {})


def test_the_templates_variables_are_set(client: openai.OpenAI) -> None:
    plain = prompt_of(client)
    assert "effort" not in plain
    assert "effort low" in prompt_of(client, reasoning_effort="low")
    assert prompt_of(client, reasoning_effort="none").endswith("<think></think>")
    arguments = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_of(client, extra_body=arguments) == plain + "<think></think>"
    for name in ("unknown", "messages", "tools", "add_generation_prompt", "tokenize"):
        raw = client.chat.completions.with_raw_response.create(
            **ASK, extra_body={"chat_template_kwargs": {name: True}}
        )
        assert raw.headers["x-ignored-fields"] == f"chat_template_kwargs.{name}"
        assert prompt_of(client, extra_body={"chat_template_kwargs": {name: True}}) == plain


def test_a_sessions_earlier_thoughts_are_shown_as_the_template_does(
    served: Stack, client: openai.OpenAI
) -> None:
    session = {"session_id": "thinking", "return_token_ids": True}
    first: Any = client.chat.completions.create(**ASK, seed=2, extra_body={**THOUGHT, **session})
    message = first.choices[0].message
    more: Any = {**ASK, "messages": [{"role": "user", "content": "and?"}], "max_tokens": 2}
    second: Any = client.chat.completions.create(**more, extra_body=session)
    resent = [*ASK["messages"], {"role": "assistant", "content": message.content}, *more["messages"]]
    shown = client.chat.completions.create(
        **{**more, "messages": resent}, extra_body={"return_token_ids": True}
    )
    assert second.prompt_token_ids == shown.prompt_token_ids  # type: ignore[attr-defined]
    # What comes before the thought is not computed again, and all that follows it is: the answer, too.
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == common_prefix(tuple(first.prompt_token_ids), tuple(second.prompt_token_ids))
    assert cached == len(first.prompt_token_ids)
    thought, answer = (
        httpx.post(f"{served.base_url}/tokenize", json={"prompt": text}, timeout=60).json()["count"]
        for text in (f"<think>{message.reasoning_content}</think>\n\n", message.content)
    )
    assert answer > 0
    assert len(first.choices[0].token_ids) == thought + answer + 1
    assert len(second.prompt_token_ids) - cached > answer


@pytest.fixture(scope="module")
def thoughtful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model whose prompts open a thought and whose marks are tokens."""
    template = TEMPLATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    folder = make_text_model(
        tmp_path_factory.mktemp("thoughtful"), template=template, added=("<think>", "</think>")
    )
    with serving("--model", str(folder), "--model-name", "thinker", "--in-process") as stack:
        yield stack


def test_a_thought_is_as_long_as_its_budget_in_every_api(thoughtful: Stack) -> None:
    url = thoughtful.base_url
    message = [{"role": "user", "content": "hi"}]
    drawn = {"temperature": 1, "seed": 4}
    bodies: dict[str, Any] = {
        "chat/completions": {"messages": message, "max_tokens": 20, "thinking_token_budget": 6},
        "responses": {"input": "hi", "max_output_tokens": 20, "reasoning": {"max_tokens": 6}, "store": False},
        "messages": {
            "messages": message,
            "max_tokens": 20,
            "thinking": {"type": "adaptive", "budget_tokens": 6},
        },
    }
    answers = {}
    for path, body in bodies.items():
        response = httpx.post(f"{url}/v1/{path}", json={"model": "thinker", **drawn, **body}, timeout=120)
        assert response.status_code == 200, response.text
        assert "budget" not in response.headers.get("x-ignored-fields", "")
        answers[path] = response.json()
    chat = answers["chat/completions"]["choices"][0]["message"]
    assert chat["reasoning_content"]
    assert chat["content"]
    assert answers["responses"]["usage"]["output_tokens_details"]["reasoning_tokens"] in range(1, 7)
    texts = [
        answers["responses"]["output"][0]["content"][0]["text"],
        answers["messages"]["content"][0]["thinking"],
    ]
    assert texts == [chat["reasoning_content"]] * 2


def test_budgets_end_thoughts_beside_sequences_without_one(thoughtful: Stack) -> None:
    body = {
        "model": "thinker",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 16,
        "temperature": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    budgets = [None, 0, 3, 9, None, 6]

    def ask(number: int) -> list[int]:
        budget = budgets[number]
        fields = {} if budget is None else {"thinking_token_budget": budget}
        response = httpx.post(
            f"{thoughtful.base_url}/v1/chat/completions", json={**body, **fields, "seed": number}, timeout=120
        )
        assert response.status_code == 200, response.text
        token_ids: list[int] = response.json()["choices"][0]["token_ids"]
        return token_ids

    alone = [ask(number) for number in range(len(budgets))]
    with ThreadPoolExecutor(len(budgets)) as pool:
        assert list(pool.map(ask, range(len(budgets)))) == alone
    reply = httpx.post(f"{thoughtful.base_url}/tokenize", json={"prompt": "</think>"}, timeout=60)
    (end,) = reply.json()["tokens"]
    for budget, token_ids in zip(budgets, alone, strict=True):
        if budget is not None:
            assert token_ids.index(end) <= budget
            assert token_ids[budget] == end or end in token_ids[:budget]


def test_a_budget_that_cannot_be_kept_is_refused_or_named(served: Stack, thoughtful: Stack) -> None:
    body = {
        "model": "thinker",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "thinking_token_budget": 3,
    }
    refused = httpx.post(f"{served.base_url}/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thinking_token_budget"
    assert "<think> is not one token" in refused.json()["error"]["message"]
    structured = {**body, "structured_outputs": {"regex": "[0-9]{2}"}}
    named = httpx.post(f"{thoughtful.base_url}/v1/chat/completions", json=structured, timeout=60)
    assert named.status_code == 200
    assert "thinking_token_budget" in named.headers["x-ignored-fields"]
