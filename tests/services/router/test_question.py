"""What the router tells prefill of a prompt's question."""

from __future__ import annotations

from typing import Any

import pytest
from kvtest.scripted_workers import failing_at, lost

from kvferry.shared.model.question import Question, find_question
from kvferry.shared.model.tokenizer import ChatTokenizer

FIRST = {"role": "user", "content": "the red castle ."}
SECOND = {"role": "user", "content": "what is the pin ?"}


async def ask(stack: Any, *messages: dict[str, str], **fields: Any) -> Any:
    return await stack.client.chat.completions.create(
        model="demo", messages=list(messages), temperature=0, max_tokens=4, extra_body=fields
    )


def told(stack: Any) -> Question | None:
    """Of the last prompt."""
    question: Question | None = stack.prefill[0].requests[-1].question
    return question


async def test_a_chats_question_is_its_last_message(stack: Any, tokenizer: ChatTokenizer) -> None:
    await ask(stack, FIRST, {"role": "assistant", "content": "the pin is 4 2 ."}, SECOND)
    prompt, question = stack.prefill[0].requests[-1].prompt_token_ids, told(stack)
    assert question is not None
    end = len(prompt) - question.num_after
    assert tokenizer.decode(prompt[end - question.num_tokens : end]) == SECOND["content"]
    assert tokenizer.decode(prompt[end:], shows_special=True).split() == ["<|end|>", "<|assistant|>"]


@pytest.mark.parametrize("mode", ["append", "replace"])
async def test_a_sessions_question_is_the_new_message(stack: Any, mode: str) -> None:
    first = await ask(stack, FIRST, session_id="s")
    said = {"role": "assistant", "content": first.choices[0].message.content}
    await ask(stack, *((FIRST, said) if mode == "replace" else ()), SECOND, session_id="s", session_mode=mode)
    assert told(stack) == Question(num_tokens=5, num_after=2)


async def test_several_choices_have_the_same_question(stack: Any) -> None:
    await stack.client.chat.completions.create(
        model="demo", messages=[SECOND], temperature=0, max_tokens=4, n=3
    )
    assert {request.question for request in stack.prefill[0].requests} == {
        Question(num_tokens=5, num_after=2)
    }


async def test_texts_and_continued_answers_have_none(stack: Any) -> None:
    await stack.client.completions.create(model="demo", prompt="what is the pin ?", max_tokens=4)
    assert told(stack) is None
    answer = {"role": "assistant", "content": "the pin"}
    await ask(stack, SECOND, answer, continue_final_message=True, add_generation_prompt=False)
    assert told(stack) is None


async def test_a_document_has_none_and_a_session_with_it_has(stack: Any) -> None:
    document, headers = {"text": "the red castle . " * 20, "id": "d"}, {"Authorization": "Bearer key-a"}
    created = await stack.http.post("/v1/documents", json=document, headers=headers)
    assert created.status_code == 200, created.text
    assert told(stack) is None
    await ask(stack, SECOND, session_id="s", document_ids=["d"])
    assert told(stack) == Question(num_tokens=5, num_after=2)


@pytest.mark.parametrize("method", ["full", "snapkv"])
async def test_a_turn_that_resumes_has_its_question_unless_the_prompt_has_grown(
    start_stack: Any, method: str
) -> None:
    stack = await start_stack()
    stack.decode[0].faults = [failing_at(2, lost())]
    compression = {"method": method} | ({"token_budget": 4} if method != "full" else {})
    await ask(stack, SECOND, kv_compression=compression)
    one, other = (request.question for request in stack.prefill[0].requests)
    assert one == Question(num_tokens=5, num_after=2)
    assert other == (None if method == "full" else one)


async def test_the_question_is_what_one_process_finds(stack: Any, tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "system", "content": "the blue fence ."}, SECOND]
    await ask(stack, *messages)
    prompt = stack.prefill[0].requests[-1].prompt_token_ids
    assert told(stack) == find_question(tokenizer, messages, prompt) == Question(num_tokens=5, num_after=2)
