"""Sessions over HTTP: continuing, restating, branching, waiting, deleting, and whose they are."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import openai
import pytest
from kvtest.clock import Clock
from kvtest.router import scripted_token
from kvtest.waiting import eventually

from kvferry.services.router.app import Timing
from kvferry.services.router.turn.runner import served_model
from kvferry.shared.errors import HistoryMiss, TransferFailed

FIRST = {"role": "user", "content": "the red castle ."}
SECOND = {"role": "user", "content": "what is the pin ?"}


async def say(stack: Any, *messages: dict[str, Any], client: Any = None, **fields: Any) -> Any:
    ours = ("session_id", "session_mode", "session_ttl_s", "session_pin", "priority")
    extra = {name: fields.pop(name) for name in ours if name in fields}
    extra.setdefault("session_id", "s")
    return await (client or stack.client).chat.completions.create(
        model="demo",
        messages=list(messages),
        temperature=0,
        extra_body=extra,
        **{"max_tokens": 4, **fields},
    )


async def info(stack: Any, session_id: str = "s", key: str = "key-a") -> Any:
    return await stack.http.get(f"/v1/sessions/{session_id}", headers={"Authorization": f"Bearer {key}"})


async def delete(stack: Any, session_id: str = "s", key: str = "key-a") -> Any:
    return await stack.http.delete(f"/v1/sessions/{session_id}", headers={"Authorization": f"Bearer {key}"})


async def turns(stack: Any, number: int) -> None:
    """The session has had so many turns: its record is there no later than the answer."""
    response = await info(stack)
    assert response.status_code == 200, response.text
    assert response.json()["turns"] == number


def prompts(stack: Any) -> list[tuple[int, ...]]:
    return [request.prompt_token_ids for request in stack.prefill[0].requests]


async def test_append_and_replace_give_the_same_prompt(start_stack: Any) -> None:
    seen = []
    for mode in ("append", "replace", "auto-new", "auto-all"):
        stack = await start_stack()
        first = await say(stack, FIRST)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        restated = mode in ("replace", "auto-all")
        messages = (FIRST, answer, SECOND) if restated else (SECOND,)
        second = await say(stack, *messages, session_mode=mode.partition("-")[0])
        seen.append(prompts(stack)[1])
        # The recorded ids are in the prompt as they were generated; the last one had no KV yet.
        generated = len(prompts(stack)[0]) + 4
        assert second.usage.prompt_tokens_details.cached_tokens == generated - 1
        assert second.kv["reused_tokens"] == generated - 1
    assert len(set(seen)) == 1


async def test_session_object_describes_the_turns(stack: Any) -> None:
    first = await say(stack, FIRST)
    await turns(stack, 1)
    await eventually(lambda: bool(stack.prefill[0].history))
    session = (await info(stack)).json()
    assert set(session) == {
        "id",
        "object",
        "tokens",
        "turns",
        "running",
        "stored_bytes",
        "history_bytes",
        "history_tier",
        "last_plan",
        "expires_at",
    }
    assert session["id"] == "s"
    assert session["object"] == "session"
    assert session["tokens"] == first.usage.total_tokens
    held = first.usage.total_tokens - 1
    assert session["history_bytes"] == held * stack.script.spec.kv_token_bytes
    assert session["history_tier"] == "memory"
    assert session["last_plan"] == first.kv


async def test_session_id_of_the_body_comes_before_the_header(stack: Any) -> None:
    await say(stack, FIRST, session_id="body", extra_headers={"X-Kvferry-Session-ID": "header"})
    await stack.client.chat.completions.create(
        model="demo", messages=[FIRST], max_tokens=2, extra_headers={"X-Kvferry-Session-ID": "header-only"}
    )
    await eventually(lambda: len(stack.prefill[0].history) == 2)
    response = await stack.http.get("/v1/sessions", headers={"Authorization": "Bearer key-a"})
    assert response.json()["object"] == "list"
    assert {session["id"] for session in response.json()["data"]} == {"body", "header-only"}


async def test_another_branch_reuses_the_common_prefix(stack: Any) -> None:
    await say(stack, FIRST, SECOND)
    branch = await say(stack, FIRST, {"role": "user", "content": "and the word ?"}, session_mode="replace")
    one, other = prompts(stack)
    common = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert 0 < common < len(one)
    assert branch.kv["reused_tokens"] == common
    assert prompts(stack)[1][: len(one)] != one


async def test_stream_and_plain_turns_mix(stack: Any) -> None:
    chunks = [chunk async for chunk in await say(stack, FIRST, stream=True)]
    assert chunks[-1].kv["reused_tokens"] == 0
    second = await say(stack, SECOND)
    assert second.kv["reused_tokens"] == len(prompts(stack)[0]) + 3


async def serve_another_model(stack: Any) -> None:
    stack.script.spec = replace(stack.script.spec, fingerprint="0badf00d")
    pools = stack.services.runner.prefill, stack.services.runner.decode
    await eventually(lambda: (model := served_model(*pools)) is not None and model == stack.script.spec)


async def test_a_session_whose_model_has_changed_is_rendered_again_from_its_messages(stack: Any) -> None:
    first = await say(stack, FIRST)
    await serve_another_model(stack)
    await say(stack, SECOND, session_mode="append")
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    await say(stack, FIRST, answer, SECOND, session_id="another")
    await say(stack, SECOND, session_mode="append")
    _, continued, whole, third = stack.prefill[0].requests
    assert continued.prompt_token_ids == whole.prompt_token_ids
    assert [continued.has_history, third.has_history] == [False, True]
    assert third.prompt_token_ids[: len(continued.prompt_token_ids)] == continued.prompt_token_ids
    await turns(stack, 3)


async def test_a_text_whose_model_has_changed_is_tokenized_again(stack: Any, tokenizer: Any) -> None:
    texts = ["the red castle ."]
    for _ in range(2):
        answer = await stack.client.completions.create(
            model="demo",
            prompt=texts[-1],
            max_tokens=4,
            extra_body={"session_id": "s", "session_mode": "append"},
        )
        texts += [answer.choices[0].text, " what is the pin ?"]
        await serve_another_model(stack)
    before = tuple(tokenizer.encode(texts[0] + texts[1]))
    assert prompts(stack)[1][: len(before)] == before
    assert len(prompts(stack)[1]) > len(before)


async def test_second_request_waits_for_the_first(stack: Any) -> None:
    stack.script.token_delay_s = 0.02
    answers = await asyncio.gather(say(stack, FIRST), say(stack, FIRST))
    assert {answer.kv["reused_tokens"] > 0 for answer in answers} == {False, True}
    await turns(stack, 2)


async def test_waiting_too_long_is_409(start_stack: Any) -> None:
    stack = await start_stack(session_wait_s=0.05)
    stack.script.may_decode.clear()
    first = asyncio.create_task(say(stack, FIRST))
    await eventually(lambda: len(prompts(stack)) == 1)
    with pytest.raises(openai.ConflictError) as busy:
        await say(stack, SECOND)
    assert busy.value.code == "session_busy"
    assert busy.value.response.headers["retry-after"] == "1"
    stack.script.may_decode.set()
    assert (await first).usage.completion_tokens == 4


async def test_session_stays_locked_until_its_history_is_home(start_stack: Any) -> None:
    stack = await start_stack(session_wait_s=0.05)
    stack.script.may_return.clear()
    await say(stack, FIRST)  # answered before the history's return
    with pytest.raises(openai.ConflictError):
        await say(stack, SECOND)
    await turns(stack, 1)
    stack.script.may_return.set()
    await eventually(lambda: bool(stack.prefill[0].history))
    assert (await say(stack, SECOND)).kv["reused_tokens"] > 0


async def test_delete_forgets_text_and_history(stack: Any) -> None:
    await say(stack, FIRST)
    await turns(stack, 1)
    response = await delete(stack)
    assert response.json() == {"id": "s", "object": "session.deleted", "deleted": True}
    assert stack.prefill[0].history == {}
    assert len(stack.decode[0].dropped) == 1
    assert (await info(stack)).status_code == 404
    assert (await delete(stack)).status_code == 404
    assert (await say(stack, SECOND)).kv["reused_tokens"] == 0


async def test_delete_during_a_turn_wins(stack: Any) -> None:
    stack.script.may_decode.clear()
    running = asyncio.create_task(say(stack, FIRST, max_tokens=8))
    await eventually(lambda: len(prompts(stack)) == 1)
    assert (await delete(stack)).status_code == 200
    stack.script.may_decode.set()
    assert (await running).usage.completion_tokens == 8
    await eventually(lambda: stack.num_active == 0 and bool(stack.prefill[0].aborted))
    # once at DELETE, once for what the turn left at its end
    await eventually(lambda: len(stack.decode[0].dropped) == 2)
    assert (await info(stack)).status_code == 404
    assert stack.prefill[0].history == {}


async def test_another_key_has_sessions_of_its_own(stack: Any) -> None:
    await say(stack, FIRST)
    await turns(stack, 1)
    assert (await info(stack, key="key-b")).status_code == 404
    assert (await delete(stack, key="key-b")).status_code == 404
    other = await say(stack, FIRST, client=stack.keyed("key-b"))
    assert other.kv["reused_tokens"] == 0
    response = await stack.http.get("/v1/sessions", headers={"Authorization": "Bearer key-b"})
    assert [session["turns"] for session in response.json()["data"]] == [1]
    owners = {request.session.owner for request in stack.prefill[0].requests}
    assert len(owners) == 2
    assert not any("key" in owner for owner in owners)


async def test_failed_turn_leaves_earlier_turns_whole(stack: Any) -> None:
    await say(stack, FIRST)
    await turns(stack, 1)
    before = (await info(stack)).json()

    def refuse(_: int) -> None:
        raise HistoryMiss("gone")

    stack.prefill[0].faults = [refuse] * 4
    with pytest.raises(openai.InternalServerError):
        await say(stack, SECOND)
    await eventually(lambda: bool(stack.prefill[0].aborted))
    assert (await info(stack)).json() == before
    assert (await say(stack, SECOND)).kv["reused_tokens"] > 0


async def test_history_that_does_not_come_home_does_not_fail_the_turn(stack: Any) -> None:
    stack.decode[0].history_error = TransferFailed("the wire broke")
    assert (await say(stack, FIRST)).usage.completion_tokens == 4
    await turns(stack, 1)
    stack.decode[0].history_error = None
    stack.prefill[0].commit_error = HistoryMiss("no room")
    await say(stack, SECOND)
    await turns(stack, 2)


async def test_turns_return_to_the_worker_with_the_history(start_stack: Any) -> None:
    stack = await start_stack(num_prefill=3, num_decode=3)
    for turn in range(1, 6):
        answer = await say(stack, FIRST if turn == 1 else SECOND, session_mode="append", max_tokens=2)
        assert (answer.kv["reused_tokens"] > 0) == (turn > 1)
        await turns(stack, turn)
    for workers in (stack.prefill, stack.decode):
        assert sorted(len(worker.requests) for worker in workers) == [0, 0, 5]


async def test_session_survives_the_loss_of_its_prefill_worker(start_stack: Any) -> None:
    stack = await start_stack(num_prefill=2)
    await say(stack, FIRST)
    await turns(stack, 1)
    first = next(worker for worker in stack.prefill if worker.requests)
    other = next(worker for worker in stack.prefill if worker is not first)
    first.ready = False
    await first.asked()
    answer = await say(stack, SECOND)
    assert answer.kv["reused_tokens"] == 0
    assert other.requests[-1].prompt_token_ids[: len(first.requests[0].prompt_token_ids)]


async def test_completions_have_sessions_too(stack: Any) -> None:
    async def complete(prompt: str, **extra: Any) -> Any:
        return await stack.client.completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=3,
            temperature=0,
            extra_body={"session_id": "t", **extra},
        )

    first = await complete("the red castle .")
    await complete(" the pin ?")
    whole = "the red castle ." + first.choices[0].text
    prompt = prompts(stack)[0]
    sampling = stack.prefill[0].requests[0].sampling
    generated = tuple(scripted_token(prompt, index, sampling) for index in range(3))
    assert prompts(stack)[1][: len(prompt) + 3] == prompt + generated
    assert len(prompts(stack)[1]) > len(prompt) + 3
    third = await complete(whole + " the pin ?", session_mode="replace")
    assert prompts(stack)[2][: len(prompts(stack)[0])] == prompts(stack)[0]
    assert third.kv["reused_tokens"] >= len(prompts(stack)[0])


async def test_chat_does_not_continue_a_text_session(stack: Any) -> None:
    await stack.client.completions.create(
        model="demo", prompt="the red castle .", max_tokens=2, extra_body={"session_id": "s"}
    )
    await turns(stack, 1)
    with pytest.raises(openai.BadRequestError) as refused:
        await say(stack, SECOND)
    assert refused.value.param == "session_mode"
    assert (await say(stack, FIRST, session_mode="replace")).usage.completion_tokens == 4


async def test_wrong_role_is_numbered_as_the_client_sent_it(stack: Any) -> None:
    await say(stack, FIRST)
    await turns(stack, 1)
    with pytest.raises(openai.BadRequestError) as refused:
        await say(stack, SECOND, {"role": "wizard", "content": "x"})
    assert refused.value.param == "messages[1].role"


async def test_expired_session_is_gone(start_stack: Any) -> None:
    clock = Clock()
    stack = await start_stack(session_ttl_s=60.0, clock=clock)
    await say(stack, FIRST)
    await eventually(lambda: bool(stack.prefill[0].history))  # the turn has ended
    assert (await info(stack)).status_code == 200
    clock.turn(60.0)
    assert (await info(stack)).status_code == 404
    assert (await say(stack, SECOND, session_mode="append")).usage.prompt_tokens < len(prompts(stack)[0]) * 2


async def test_only_workers_that_had_an_expired_session_are_told(start_stack: Any) -> None:
    clock, timing = Clock(), Timing(sweep_interval_s=0.05)
    stack = await start_stack(num_prefill=3, num_decode=3, session_ttl_s=60.0, clock=clock, timing=timing)
    await say(stack, FIRST)
    await eventually(lambda: any(worker.history for worker in stack.prefill))  # the turn has ended
    clock.turn(60.0)
    await stack.swept()
    assert [sum(bool(member.dropped) for member in role) for role in (stack.prefill, stack.decode)] == [1, 1]


async def test_a_sessions_own_ttl_and_pin_stay_until_a_turn_changes_them(stack: Any) -> None:
    worker = stack.prefill[0]

    async def left_s() -> float:
        return float((await info(stack)).json()["expires_at"] - time.time())

    await say(stack, FIRST, session_ttl_s=50_000, session_pin=True, priority=-4)
    await turns(stack, 1)
    assert 49_000 < await left_s() <= 50_000
    assert list(worker.pins.values()) == [True]
    await say(stack, SECOND)
    await turns(stack, 2)
    assert 49_000 < await left_s() <= 50_000
    assert list(worker.pins.values()) == [True]
    await say(stack, SECOND, session_ttl_s=20, session_pin=False)
    await turns(stack, 3)
    assert await left_s() <= 20
    assert list(worker.pins.values()) == [False]
    assert [request.priority for request in worker.requests] == [-4, 0, 0]


@pytest.mark.parametrize(("name", "value"), [("session_ttl_s", 0.5), ("priority", 1001), ("session_pin", 3)])
async def test_hints_out_of_range_are_refused_by_name(stack: Any, name: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await say(stack, FIRST, **{name: value})
    assert refused.value.param == name
