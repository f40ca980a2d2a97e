"""What clients of other servers send: ignored where it changes nothing, else supported or refused by name."""

from __future__ import annotations

from typing import Any

import openai
import pytest

WORDS: Any = [{"role": "user", "content": "the red castle ."}]


async def chat(stack: Any, **fields: Any) -> Any:
    body = {"model": "demo", "messages": WORDS, "temperature": 0, "max_tokens": 6}
    return await stack.client.chat.completions.create(**{**body, **fields})


async def text(stack: Any, prompt: Any, **fields: Any) -> Any:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 4}
    return await stack.client.completions.create(**{**body, **fields})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tool_choice"),
    ],
)
async def test_members_that_are_not_supported_are_refused_by_name(
    stack: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(stack, extra_body=fields)
    assert (refused.value.body or {})["param"].startswith(param)  # type: ignore[index]


NAMED: list[tuple[dict[str, Any], str]] = [
    (
        {
            **{"user": "u", "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k"},
            **{"rid": "r", "length_penalty": 1.0, "stream_interval": 4, "chat_id": 5},
        },
        "chat_id, length_penalty, metadata, prompt_cache_key, rid, store, stream_interval, user",
    ),
    (
        {"messages": [{**WORDS[0], "id": 1947269257, "opts": {"visible": False}}]},
        "messages.id, messages.opts",
    ),
    ({"messages": [{**WORDS[0], "cache_control": {"type": "ephemeral"}}]}, "messages.cache_control"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS[0]["content"], "x": 1}]}]},
        "messages.content.x",
    ),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    (
        {"tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "f"}}]},
        "tools.custom, tools.web_search",
    ),
    ({"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
    ({"stop": None, "unknown": None}, ""),
    ({"na\u00efve\r\nx-other: 1": 1}, "na?ve??x-other:?1"),
]


@pytest.mark.parametrize(("fields", "names"), NAMED)
async def test_fields_that_change_nothing_are_named_in_a_header(
    stack: Any, fields: dict[str, Any], names: str
) -> None:
    body = {"model": "demo", "messages": WORDS, "temperature": 0, "max_tokens": 6}
    plain = (await stack.http.post("/v1/chat/completions", json=body)).json()["choices"]
    for stream in (False, True):
        given = {**body, "stream": stream, **fields}
        answer = await stack.http.post("/v1/chat/completions", json=given)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-ignored-fields", "") == (names or "")
        if not stream:
            assert answer.json()["choices"] == plain


async def test_developers_of_clients_may_have_them_refused(start_stack: Any) -> None:
    stack = await start_stack(strict_fields=True)
    for fields, names in NAMED:
        answer = await stack.http.post(
            "/v1/chat/completions", json={"model": "demo", "messages": WORDS, "max_tokens": 1, **fields}
        )
        is_unknown = bool(names) and not names.startswith("chat_template_kwargs")
        assert answer.status_code == (400 if is_unknown else 200)
        if is_unknown:
            assert answer.json()["error"]["message"].startswith("Unknown field")


async def test_an_error_names_what_was_ignored_before_it(stack: Any) -> None:
    body = {"model": "demo", "messages": [{"role": "wizard", "content": "a"}], "chat_id": 1}
    answer = await stack.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (400, "chat_id")


async def test_a_header_of_other_programs_is_no_session(stack: Any) -> None:
    plain = await chat(stack)
    for value in ("ses_1", "a/b", ""):
        for n in (1, 2):
            answer = await chat(stack, n=n, extra_headers={"X-Session-ID": value, "X-Session-Affinity": "x"})
            assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert (await stack.http.get("/v1/sessions")).json()["data"] == []


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
async def test_prompts_of_different_salts_share_no_kv(stack: Any, name: str) -> None:
    async def owner(**salt: str) -> str:
        await chat(stack, messages=[{"role": "user", "content": "the red castle . " * 20}], extra_body=salt)
        session = stack.prefill[0].requests[-1].session
        assert session is not None
        assert session.is_implicit
        return str(session.owner)

    assert await owner() == await owner()
    assert await owner(**{name: "a"}) == await owner(**{name: "a"})
    assert len({await owner(), await owner(**{name: "a"}), await owner(**{name: "b"})}) == 3


async def test_values_that_mean_off_are_off(stack: Any) -> None:
    plain = await chat(stack)
    off = {
        "top_k": -1,
        "min_tokens": 0,
        "stop_token_ids": [],
        "bad_words": [],
        "use_beam_search": False,
        "skip_special_tokens": True,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "echo": False,
        "chat_template_kwargs": {},
        "include_stop_str_in_output": False,
        "return_token_ids": False,
        "best_of": 1,
        "kv_transfer_params": None,
    }
    answer = await chat(
        stack,
        tools=[],
        functions=[],
        stop=[],
        logprobs=False,
        top_logprobs=0,
        logit_bias={},
        response_format={"type": "text"},
        modalities=["text"],
        extra_body=off,
    )
    assert answer.choices == plain.choices
    sampling = stack.decode[0].requests[-1].sampling
    assert (sampling.top_k, sampling.min_tokens, sampling.stop) == (0, 0, ())
    for stop in ("", [""]):
        assert (await chat(stack, stop=stop)).choices == plain.choices


async def test_a_stop_string_may_stay_in_the_answer(stack: Any) -> None:
    words = (await chat(stack)).choices[0].message.content.split()
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        answer = await chat(stack, stop=[words[2], "nowhere"], extra_body={name: True})
        assert answer.choices[0].message.content.split() == words[:3]
        assert answer.choices[0].finish_reason == "stop"
    many = [f"nowhere{number}" for number in range(63)]
    assert (await chat(stack, stop=[*many, words[2]])).choices[0].message.content.split() == words[:2]


async def test_stop_strings_are_not_searched_in_the_first_min_tokens(stack: Any) -> None:
    words = (await chat(stack)).choices[0].message.content.split()
    stop = [words[1], words[4]]
    answer = await chat(stack, stop=stop, extra_body={"min_tokens": 3})
    assert answer.choices[0].message.content.split() == words[:4]
    assert answer.usage.completion_tokens == 5
    assert stack.decode[0].requests[-1].sampling.min_tokens == 3


async def test_token_ids_are_returned_whole_and_streamed(stack: Any) -> None:
    whole = await chat(stack, extra_body={"return_token_ids": True})
    prompt = list(stack.decode[0].requests[-1].prompt_token_ids)
    assert whole.prompt_token_ids == prompt
    assert len(whole.choices[0].token_ids) == 6
    stream = await chat(stack, stream=True, extra_body={"return_token_ids": True})
    chunks = [chunk async for chunk in stream]
    assert [c.model_extra.get("prompt_token_ids") for c in chunks if "prompt_token_ids" in c.model_extra] == [
        prompt
    ]
    ids = [i for c in chunks for choice in c.choices for i in choice.model_extra.get("token_ids", [])]
    assert ids == whole.choices[0].token_ids
    completion = await text(stack, prompt, extra_body={"return_token_ids": True})
    assert completion.choices[0].prompt_token_ids == prompt


async def test_chats_report_the_log_probabilities_of_their_prompt(stack: Any) -> None:
    answer = await chat(stack, extra_body={"prompt_logprobs": 2})
    assert stack.prefill[0].requests[-1].prompt_logprobs == 2
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


async def test_several_prompts_have_their_choices_in_order(stack: Any) -> None:
    prompts = ["the red castle", "the old harbor", "a"]
    asked = {"n": 2, "temperature": 1, "seed": 5, "extra_body": {"return_token_ids": True}}
    alone = [await text(stack, prompt, **asked) for prompt in prompts]
    together = await text(stack, prompts, n=2, temperature=1, seed=5, extra_body={"best_of": 2})
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [c.text for c in together.choices] == [c.text for answer in alone for c in answer.choices]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(together.usage, name) == sum(getattr(answer.usage, name) for answer in alone)
    assert together.kv["full_bytes"] == sum(answer.kv["full_bytes"] for answer in alone)
    chunks = [c async for c in await text(stack, prompts, n=2, temperature=1, seed=5, stream=True)]
    texts = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(6)]
    assert texts == [choice.text for choice in together.choices]
    assert [chunk for chunk in chunks if "kv" in chunk.model_extra] == chunks[-1:]
    ids = [answer.choices[0].prompt_token_ids for answer in alone]
    by_ids = await text(stack, ids, n=2, temperature=1, seed=5)
    assert [c.text for c in by_ids.choices] == [c.text for c in together.choices]


async def test_one_wrong_prompt_of_several_fails_the_request(stack: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await text(stack, ["the red castle", "hello " * 600])
    assert refused.value.param == "prompt"
    assert (await text(stack, "the red castle")).choices[0].text


async def test_an_answer_without_content_may_be_in_the_history(stack: Any) -> None:
    history = [*WORDS, {"role": "assistant", "content": None, "reasoning_content": "hm"}, *WORDS]
    with_empty = [*WORDS, {"role": "assistant", "content": ""}, *WORDS]
    answers = [await chat(stack, messages=messages) for messages in (history, with_empty)]
    assert answers[0].choices == answers[1].choices


async def test_streams_may_have_usage_in_every_chunk(stack: Any) -> None:
    stream = await chat(
        stack, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 6
