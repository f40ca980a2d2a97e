"""Both endpoints through the official client, whole and streamed."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from kvtest.scripted_workers import TRANSFER_BYTES

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.tokenizer import ChatTokenizer

WORDS = [{"role": "user", "content": "the red castle ."}]
SHIPPED_BYTES = sum(TRANSFER_BYTES.values())
KV_FIELDS = {
    "method",
    "prompt_tokens",
    "reused_tokens",
    "full_bytes",
    "shipped_bytes",
    "cache_bytes",
    "prefill_ms",
    "transfer_ms",
}


async def chat(stack: Any, **fields: Any) -> Any:
    fields = {"model": "demo", "messages": WORDS, "temperature": 0, **fields}
    return await stack.client.chat.completions.create(**fields)


async def chunks_of(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


def joined(chunks: list[Any], index: int = 0) -> str:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(delta.content or "" for delta in deltas)


async def test_chat_answers_with_text_usage_and_kv(stack: Any) -> None:
    answer = await chat(stack, max_tokens=5)
    assert answer.object == "chat.completion"
    assert answer.model == "demo"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert len(choice.message.content.split()) == 5
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    prompt = stack.decode[0].requests[-1].prompt_token_ids
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == len(prompt) + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    kv = answer.kv
    assert set(kv) == KV_FIELDS
    assert kv["method"] == "rdkv"
    assert kv["shipped_bytes"] == SHIPPED_BYTES
    assert kv["cache_bytes"] == 2048
    assert kv["prompt_tokens"] == len(prompt)
    assert kv["prefill_ms"] == pytest.approx(2.0)
    assert kv["transfer_ms"] == pytest.approx(4.0)


async def test_stream_has_role_first_and_gives_the_same_text(stack: Any) -> None:
    whole = await chat(stack, max_tokens=7)
    chunks = await chunks_of(await chat(stack, max_tokens=7, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert joined(chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all("usage" not in chunk.model_extra and chunk.usage is None for chunk in chunks)
    assert set(chunks[-1].kv) == KV_FIELDS
    assert all("kv" not in chunk.model_extra for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_chunk_comes_last_where_asked_for(stack: Any) -> None:
    stream = await chat(stack, max_tokens=4, stream=True, stream_options={"include_usage": True})
    chunks = await chunks_of(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert set(chunks[-1].kv) == KV_FIELDS
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "length"
    assert "kv" not in chunks[-2].model_extra


async def test_stream_ends_with_done(stack: Any) -> None:
    body = {"model": "demo", "messages": WORDS, "stream": True, "max_tokens": 2}
    response = await stack.http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")


async def test_completion_ends_by_itself_at_the_end_token(stack: Any) -> None:
    answer = await chat(stack, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 25
    assert len(answer.choices[0].message.content.split()) == 24


async def test_ignore_eos_goes_on(stack: Any) -> None:
    answer = await chat(stack, max_tokens=40, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 40


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cuts_the_text_before_it(stack: Any, stream: bool) -> None:
    words = (await chat(stack, max_tokens=12)).choices[0].message.content.split()
    stop = f"{words[6]} {words[7]}"
    answer = await chat(stack, max_tokens=12, stop=["never said", stop], stream=stream)
    if stream:
        chunks = await chunks_of(answer)
        text, reason = joined(chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text.split() == words[:6]
    assert reason == "stop"


async def test_a_limit_is_a_ceiling_and_without_one_the_context_is(stack: Any) -> None:
    """Of the demo model, whose context has 512 tokens here."""
    room = 512 - (await chat(stack, max_tokens=1)).usage.prompt_tokens
    for limit in ({}, {"max_tokens": 65_535}, {"max_completion_tokens": 10**9}, {"max_tokens": room}):
        answer = await chat(stack, **limit, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == room
        assert answer.choices[0].finish_reason == "length"
        is_smaller = limit and limit != {"max_tokens": room}
        assert answer.kv.get("max_tokens") == (room if is_smaller else None)


async def test_max_completion_tokens_is_taken(stack: Any) -> None:
    assert (await chat(stack, max_completion_tokens=2)).usage.completion_tokens == 2


async def test_chat_logprobs_have_openai_shape(stack: Any) -> None:
    answer = await chat(stack, max_tokens=4, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 4
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert entry.logprob == pytest.approx(-0.5)
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([-0.5, -1.5, -2.5])


async def test_streamed_logprobs_add_up_to_the_text(stack: Any) -> None:
    chunks = await chunks_of(await chat(stack, max_tokens=4, logprobs=True, stream=True))
    tokens = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(tokens) == 4
    assert "".join(tokens) == joined(chunks)


async def test_text_completion_defaults_to_16_tokens(stack: Any) -> None:
    answer = await stack.client.completions.create(model="demo", prompt="the red castle .", temperature=0)
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens == 16
    assert len(answer.choices[0].text.split()) == 16
    assert answer.choices[0].finish_reason == "length"
    assert set(answer.kv) == KV_FIELDS


async def test_text_completion_streams_the_same_text(stack: Any) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": "the red castle .", "temperature": 0}
    whole = await stack.client.completions.create(**fields)
    chunks = await chunks_of(await stack.client.completions.create(stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert set(chunks[-1].kv) == KV_FIELDS


async def test_text_completion_takes_token_ids(stack: Any) -> None:
    await stack.client.completions.create(model="demo", prompt=[100, 101, 102], max_tokens=1)
    assert stack.prefill[0].requests[-1].prompt_token_ids == (100, 101, 102)


async def test_text_logprobs_have_openai_shape(stack: Any) -> None:
    answer = await stack.client.completions.create(model="demo", prompt="the", max_tokens=3, logprobs=2)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert "".join(logprobs.tokens) == text
    assert logprobs.token_logprobs == pytest.approx([-0.5] * 3)
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text[offset : offset + len(token)] == token


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_echo_puts_the_prompt_with_its_logprobs_first(stack: Any, n: int, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": "the old castle", "max_tokens": 3, "logprobs": 2, "temperature": 0}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = await stack.client.completions.create(model="demo", echo=True, n=n, stream=stream, **fields)
    if stream:
        chunks = await chunks_of(answer)
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == 0]
        text, parts = "".join(c.text for c in own), [c.logprobs for c in own if c.logprobs is not None]
        usage = chunks[-1].usage
    else:
        assert [choice.index for choice in answer.choices] == list(range(n))
        text, parts, usage = answer.choices[0].text, [answer.choices[0].logprobs], answer.usage
    tokens, logprobs, tops, offsets = (
        [item for part in parts for item in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    prompt = stack.prefill[0].requests[-1].prompt_token_ids
    assert text.startswith("the old castle")
    assert "".join(tokens) == text
    assert logprobs == [None, *(-i for i in range(1, len(prompt))), -0.5, -0.5, -0.5]
    assert tops[0] is None
    assert [len(top) for top in tops[1:]] == [2] * (len(prompt) + 2)
    for token, offset in zip(tokens, offsets, strict=True):
        assert text[offset : offset + len(token)] == token
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 3 * n)


async def test_max_tokens_0_answers_with_the_prompt_alone(stack: Any) -> None:
    answer = await stack.client.completions.create(
        model="demo", prompt="the old castle", max_tokens=0, echo=True, logprobs=1, stop="the"
    )
    (choice,) = answer.choices
    prompt = stack.prefill[0].requests[-1].prompt_token_ids
    assert (choice.text, choice.finish_reason) == ("the old castle", "length")
    assert choice.logprobs.token_logprobs == [None, *(-i for i in range(1, len(prompt)))]
    assert answer.usage.completion_tokens == 0
    assert answer.usage.total_tokens == len(prompt)


async def test_echo_without_logprobs_adds_the_text_alone(stack: Any, tokenizer: ChatTokenizer) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": [100, 101, 102], "max_tokens": 2, "temperature": 0}
    echoed = (await stack.client.completions.create(echo=True, **fields)).choices[0]
    plain = (await stack.client.completions.create(**fields)).choices[0]
    assert echoed.text == tokenizer.decode([100, 101, 102]) + plain.text
    assert echoed.logprobs is None
    assert all(request.prompt_logprobs is None for request in stack.prefill[0].requests)


async def test_prompt_logprobs_have_vllms_shape(stack: Any, tokenizer: ChatTokenizer) -> None:
    prompt = [100, 101, 102]
    answer = await stack.client.completions.create(
        model="demo", prompt=prompt, max_tokens=2, extra_body={"prompt_logprobs": 2}
    )
    (choice,) = answer.choices
    before = len(tokenizer.decode([100]))
    assert choice.prompt_logprobs == [
        None,
        *(
            {
                str(token_id): {
                    "logprob": -float(token_id - 100),
                    "decoded_token": tokenizer.decode([100, token_id])[before:],
                }
                for token_id in (own, own + 1)
            }
            for own in (101, 102)
        ),
    ]
    assert choice.logprobs is None


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_use_seeds_in_a_row_and_count_the_prompt_once(stack: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 40, "temperature": 1.0, "max_tokens": 5, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = await chat(stack, **fields)
    if stream:
        chunks = await chunks_of(answer)
        texts, usage, kv = [joined(chunks, index) for index in range(3)], chunks[-1].usage, chunks[-1].kv
    else:
        texts = [choice.message.content for choice in answer.choices]
        usage, kv = answer.usage, answer.kv
    assert len(set(texts)) == 3
    requests = stack.decode[0].requests
    assert sorted(request.sampling.seed for request in requests) == [40, 41, 42]
    assert usage.prompt_tokens == len(requests[0].prompt_token_ids)
    assert usage.completion_tokens == 15
    assert kv["shipped_bytes"] == SHIPPED_BYTES
    assert len({request.request_id for request in requests}) == 3


async def test_seed_is_drawn_where_none_is_given(stack: Any) -> None:
    for _ in range(2):
        await chat(stack, temperature=1.0, max_tokens=1)
    first, second = (request.sampling.seed for request in stack.decode[0].requests)
    assert first != second


async def test_sampling_fields_reach_both_workers(stack: Any) -> None:
    await chat(
        stack,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=-(2**63),
        logit_bias={"100": -5},
        max_tokens=2,
        stop="zzz",
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [9]},
    )
    for worker in (stack.prefill[0], stack.decode[0]):
        sampling = worker.requests[-1].sampling
        assert sampling.temperature == 0.7
        assert sampling.top_p == 0.9
        assert sampling.top_k == 7
        assert sampling.min_p == 0.1
        assert sampling.presence_penalty == 0.5
        assert sampling.frequency_penalty == -0.5
        assert sampling.repetition_penalty == 1.2
        assert sampling.seed == -(2**63)
        assert sampling.logit_bias == {100: -5.0}
        assert sampling.stop == ("zzz",)
        assert sampling.stop_token_ids == (9,)
        assert sampling.max_tokens == 2


@pytest.mark.parametrize(
    ("wanted", "method", "tokens", "retention"),
    [
        ({"method": "snapkv", "token_budget": 64}, "snapkv", 64, None),
        ({"token_budget": 128}, "rdkv", 128, None),
        ({"retention": 0.25}, "rdkv", None, 0.25),
        ({"method": "full"}, "full", None, None),
    ],
)
async def test_compression_override_reaches_the_workers(
    stack: Any, wanted: dict[str, Any], method: str, tokens: int | None, retention: float | None
) -> None:
    answer = await chat(stack, max_tokens=1, extra_body={"kv_compression": wanted})
    plan = stack.prefill[0].requests[-1].ticket.plan.plan  # as the ticket carries it
    assert plan == stack.decode[0].requests[-1].plan
    assert (plan.method, plan.budget.tokens, plan.budget.retention) == (method, tokens, retention)
    assert answer.kv["method"] == method


async def test_an_answer_says_why_nothing_was_compressed(stack: Any) -> None:
    answer = await chat(stack, max_tokens=1, extra_body={"kv_compression": {"method": "full"}})
    assert answer.kv["reason"] == "method full keeps every token"
    assert "reason" not in (await chat(stack, max_tokens=1)).kv


async def test_parameters_of_a_request_reach_the_workers(stack: Any) -> None:
    wanted = {"method": "rdkv", "retention": 0.5, "parameters": {"epsilon_table": "Qwen3-4B", "window": 8}}
    await chat(stack, max_tokens=1, extra_body={"kv_compression": wanted})
    plan = stack.prefill[0].requests[-1].ticket.plan.plan  # as the ticket carries it
    assert plan == stack.decode[0].requests[-1].plan
    assert plan == plan_for(
        "rdkv", budget=Budget(retention=0.5), overrides={"epsilon_table": "Qwen3-4B", "window": 8}
    )


async def test_a_text_names_the_method_alone(stack: Any) -> None:
    answer = await chat(stack, max_tokens=1, extra_body={"kv_compression": "snapkv"})
    assert answer.kv["method"] == "snapkv"
    assert stack.prefill[0].requests[-1].ticket.plan.plan == plan_for("snapkv")
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(stack, extra_body={"kv_compression": "nothing"})
    assert refused.value.param == "kv_compression.method"


async def test_methods_can_be_restricted(start_stack: Any) -> None:
    stack = await start_stack(allowed_methods="full,snapkv", default_method="snapkv")
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(stack, extra_body={"kv_compression": {"method": "rdkv"}})
    assert refused.value.param == "kv_compression.method"
    assert "full, snapkv" in refused.value.message


async def test_accepted_fields_change_nothing(stack: Any) -> None:
    answer = await chat(
        stack,
        max_tokens=3,
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        reasoning_effort="low",
        response_format={"type": "text"},
        extra_body={"tools": [], "prediction": None},
    )
    assert answer.usage.completion_tokens == 3


async def test_content_parts_and_developer_role_are_read_as_text(stack: Any) -> None:
    plain = [{"role": "system", "content": "the red castle"}, {"role": "user", "content": "the pin ?"}]
    parts = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "the red "}, {"type": "text", "text": "castle"}],
        },
        {"role": "user", "content": [{"type": "text", "text": "the pin ?"}]},
    ]
    for messages in (plain, parts):
        await chat(stack, messages=messages, max_tokens=1)
    first, second = (request.prompt_token_ids for request in stack.decode[0].requests)
    assert first == second


async def test_an_answer_can_be_sent_back_as_the_client_dumps_it(stack: Any) -> None:
    answer = await chat(stack, max_tokens=3)
    message = answer.choices[0].message.model_dump()
    again = await chat(stack, messages=[*WORDS, message, *WORDS], max_tokens=3)
    assert again.usage.completion_tokens == 3


async def test_models_are_listed_with_their_window(stack: Any) -> None:
    models = [model async for model in await stack.client.models.list()]
    assert [model.id for model in models] == ["demo"]
    assert models[0].max_model_len == 512
    assert (await stack.client.models.retrieve("demo")).object == "model"
    with pytest.raises(openai.NotFoundError) as missing:
        await stack.client.models.retrieve("org/other")
    assert missing.value.code == "model_not_found"


async def test_a_smaller_budget_that_decode_used_is_reported(stack: Any) -> None:
    compression = {"method": "snapkv", "token_budget": 64, "min_token_budget": 20}
    answer = await chat(stack, max_tokens=2, extra_body={"kv_compression": compression})
    assert answer.kv["smaller_token_budget"] == 20
    assert stack.decode[0].requests[-1].plan.budget == Budget(tokens=64, floor_tokens=20)
    del compression["min_token_budget"]
    answer = await chat(stack, max_tokens=2, extra_body={"kv_compression": compression})
    assert "smaller_token_budget" not in answer.kv


@pytest.mark.parametrize("budget", [{}, {"token_budget": 8}], ids=["without a budget", "below its floor"])
async def test_a_floor_above_the_budget_is_refused_by_name(stack: Any, budget: dict[str, int]) -> None:
    compression = {"method": "snapkv", "min_token_budget": 9, **budget}
    with pytest.raises(openai.BadRequestError, match="min_token_budget is 9") as caught:
        await chat(stack, extra_body={"kv_compression": compression})
    assert caught.value.param == "kv_compression.min_token_budget"
