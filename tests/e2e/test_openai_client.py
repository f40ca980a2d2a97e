"""The official OpenAI client, unmodified, against the real stack."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from kvtest.waiting import until

FACT = "remember that the pin of the red castle is 4 2 7 1 . what is the pin of the red castle ?"
EOS = "6"


@pytest.fixture
def client(stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield client


def test_chat_holds_a_conversation_by_session_id(
    client: openai.OpenAI, make_document: Callable[..., Any]
) -> None:
    document = make_document(21, num_words=700, num_facts=4)
    answers = []
    for turn, (question, _) in enumerate(document.questions):
        answers.append(
            client.chat.completions.create(
                model="demo",
                messages=[
                    {"role": "user", "content": f"{document.text} {question}" if turn == 0 else question}
                ],
                temperature=0,
                max_tokens=16,
                extra_body={"session_id": "openai-chat", "kv_compression": {"token_budget": 96}},
            )
        )
    assert [a.choices[0].finish_reason for a in answers] == ["stop"] * 4
    for previous, answer in itertools.pairwise(answers):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert previous.usage is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == previous.usage.total_tokens - 1
    kv = answers[-1].model_extra["kv"]  # type: ignore[index]
    assert kv["method"] == "rdkv"
    assert kv["shipped_bytes"] < kv["full_bytes"] / 2
    correct = sum(
        a.choices[0].message.content == expected
        for a, (_, expected) in zip(answers, document.questions, strict=True)
    )
    assert correct >= 3


def test_chat_streams_with_usage_and_the_same_text(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": FACT}]
    whole = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=16)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=messages,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == "4 2 7 1"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])


def test_completions_with_stop_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="the old", max_tokens=24, temperature=0, logprobs=3, logit_bias={EOS: -100}
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == 24
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.top_logprobs is not None
    for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        assert token in top  # the three likeliest and the chosen one
        assert len(top) <= 4
    word = choice.logprobs.tokens[5].strip()
    stopped = client.completions.create(
        model="demo", prompt="the old", max_tokens=24, temperature=0, stop=[word], logit_bias={EOS: -100}
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == choice.text[: choice.text.index(word)]


def test_echo_reports_every_token_of_a_prompt_whose_kv_is_stored(client: openai.OpenAI) -> None:
    prompt = " ".join(["the old farmer watched the quiet harbor ."] * 12)

    def complete(**fields: Any) -> Any:
        return client.completions.create(model="demo", prompt=prompt, temperature=0, **fields)

    until(lambda: complete(max_tokens=1).usage.prompt_tokens_details.cached_tokens > 0)
    answer = complete(max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "".join(choice.logprobs.tokens) == prompt
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens == 96
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.completion_tokens == 0
    wide = complete(max_tokens=2, extra_body={"prompt_logprobs": 3}).choices[0].prompt_logprobs
    assert [len(candidates) in (3, 4) for candidates in wide[1:]] == [True] * 95
    for candidates, value in zip(wide[1:], choice.logprobs.token_logprobs[1:], strict=True):
        assert value in [entry["logprob"] for entry in candidates.values()]


def test_chat_logprobs_and_seeded_sampling(client: openai.OpenAI) -> None:
    def ask(seed: int) -> Any:
        return client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "tell me a story"}],
            max_tokens=12,
            temperature=1.5,
            seed=seed,
            logprobs=True,
            top_logprobs=2,
            logit_bias={EOS: -100},
        ).choices[0]

    first, again = ask(7), ask(7)
    assert first.message.content == again.message.content
    assert len({ask(seed).message.content for seed in range(4)}) > 1
    assert len(first.logprobs.content) == 12
    for entry in first.logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2


def test_models_are_listed_with_their_window(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").model_extra["max_model_len"] == 8192  # type: ignore[index]


def test_errors_are_the_clients_own_typed_exceptions(
    client: openai.OpenAI, start_stack: Callable[..., Any]
) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=messages, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nosuch", messages=messages)
    assert missing.value.code == "model_not_found"


def ask_for_nearly_all_memory(client: openai.OpenAI) -> None:
    """A prompt of 1,420 tokens takes 5.8 of the small stack's 6.0 MB."""
    full = {"kv_compression": {"method": "full"}}
    client.completions.create(model="demo", prompt=[9] * 1420, max_tokens=4, extra_body=full)


def test_a_second_request_of_a_busy_session_conflicts_and_a_full_arena_limits_the_rate(
    start_stack: Callable[..., Any],
) -> None:
    """One small stack with short waits and a key: 401, 409 and 429."""
    options = ("--session-wait-s", "0.2", "--admission-wait-s", "0.2", "--api-keys", "secret")
    with start_stack(*options, "--arena-bytes", "6000000") as stack:
        base_url = f"{stack.base_url}/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).models.list()
        client = openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0, timeout=60)
        messages: Any = [{"role": "user", "content": "hello"}]
        stream = client.chat.completions.create(
            model="demo",
            messages=messages,
            max_tokens=1200,
            stream=True,
            logit_bias={EOS: -100},
            extra_body={"session_id": "busy"},
        )
        next(iter(stream))
        with pytest.raises(openai.ConflictError) as busy:
            client.chat.completions.create(
                model="demo", messages=messages, max_tokens=4, extra_body={"session_id": "busy"}
            )
        assert busy.value.code == "session_busy"
        with pytest.raises(openai.RateLimitError) as limited:
            ask_for_nearly_all_memory(client)
        assert float(limited.value.response.headers["retry-after"]) > 0
        stream.close()
        deadline = time.monotonic() + 120
        while True:
            try:
                ask_for_nearly_all_memory(client)
                break
            except openai.RateLimitError:
                assert time.monotonic() < deadline
                time.sleep(0.1)


def test_choices_of_n_differ_and_are_counted_once(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "tell me a story"}],
        n=3,
        max_tokens=10,
        temperature=1.5,
        seed=3,
        logit_bias={EOS: -100},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    digits = [f"{i} {9 - i} {(i * 3) % 10} {(i * 7) % 10}" for i in range(8)]

    def ask(value: str) -> str | None:
        text = f"remember that the pin of the red castle is {value} . what is the pin of the red castle ?"
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=8
        )
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, digits)) == digits


def test_a_prompt_sent_again_without_a_session_is_cached_for_its_key_alone(
    stack: Any, make_document: Callable[..., Any]
) -> None:
    document = make_document(77, num_words=500, num_facts=4)

    def ask(api_key: str, question: str, **fields: Any) -> Any:
        with openai.OpenAI(
            base_url=f"{stack.base_url}/v1", api_key=api_key, max_retries=0, timeout=120
        ) as one:
            answer = one.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": f"{document.text} {question}"}],
                temperature=0,
                max_tokens=16,
                extra_body={"kv_compression": {"token_budget": 96}},
                **fields,
            )
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.kv["reused_tokens"]
        return answer

    question = document.questions[0][0]
    first = ask("repeats", question)
    assert first.kv["reused_tokens"] == 0
    assert "history" not in first.kv
    again = ask("repeats", question)
    # RocketKV selects by the question's last 32 queries; those and the template's 2 tokens are run again.
    assert again.kv["reused_tokens"] == again.usage.prompt_tokens - 34
    assert again.kv["history"] == "fetch"
    other = ask("repeats", document.questions[1][0])
    assert 32 < other.kv["reused_tokens"] <= other.usage.prompt_tokens - 34
    alone = ask("another", question)
    assert alone.kv["reused_tokens"] == 0
    assert first.choices == again.choices == alone.choices
    assert other.choices == ask("another", document.questions[1][0]).choices


@pytest.mark.parametrize("method", ["full", "rocketkv", "rdkv"])
def test_choices_ship_and_run_their_prompt_once_and_say_what_each_would_alone(
    stack: Any, make_document: Callable[..., Any], method: str
) -> None:
    document = make_document(78, num_words=400, num_facts=4)
    budget = {} if method == "full" else {"token_budget": 96}

    def ask(key: str, **fields: Any) -> Any:
        with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=key, timeout=120) as one:
            answer = one.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": f"{document.text} {document.questions[0][0]}"}],
                temperature=1.5,
                max_tokens=8,
                logit_bias={EOS: -100},
                logprobs=True,
                top_logprobs=2,
                extra_body={"kv_compression": {"method": method, **budget}},
                **fields,
            )
            return list(answer) if "stream" in fields else answer

    alone = [ask(f"{method}-{number}", seed=20 + number) for number in range(4)]
    names = "kvferry_prefill_tokens_total", "kvferry_kv_transfer_bytes_total"
    before = [stack.prefill_metric(name) for name in names]
    answer = ask(f"{method}-all", seed=20, n=4)
    run, shipped = (stack.prefill_metric(name) - count for name, count in zip(names, before, strict=True))
    for choice, other in zip(answer.choices, alone, strict=True):
        assert choice.message.content == other.choices[0].message.content
        assert choice.logprobs == other.choices[0].logprobs
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert run == answer.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert shipped == answer.kv["shipped_bytes"]
    # A reservation's number is in a transfer's first and last message, and longer by a byte from 128 on, and
    # from 256 on.
    assert abs(shipped - alone[0].kv["shipped_bytes"]) <= 4
    assert answer.kv["cache_bytes"] == sum(other.kv["cache_bytes"] for other in alone)
    streamed = dict.fromkeys(range(4), "")
    for chunk in ask(f"{method}-stream", seed=20, n=4, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == [choice.message.content for choice in answer.choices]
