"""The question at a prompt's end: its span is the last message's text, whatever the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtest.text_models import CHATML, HERMES, byte_level_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvferry.shared.model.chat_template import ChatMessage, TemplateInputs
from kvferry.shared.model.question import Question, find_question
from kvferry.shared.model.tokenizer import ChatTokenizer, RecordedConversation, render_conversation

LLAMA3 = (
    "{{ '<|im_start|>' }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' }}"
    "{% if m.role == 'ipython' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "hermes": HERMES, "llama3": LLAMA3, "gemma": GEMMA}
ADDED = ("<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>")
AFTER = {
    "chatml": "<|im_end|>\n<|im_start|>assistant\n",
    "hermes": "<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|eot|><|head|>assistant<|/head|>\n\n",
    "gemma": "</turn>\n<turn>model\n",
}
REFUSING = CHATML.replace(
    "{{ '<|im_start|>' + m.role",
    "{% if m.content | length > 20 %}{{ raise_exception('too long') }}{% endif %}{{ '<|im_start|>' + m.role",
)
FIRST_COMES_LAST = CHATML.replace("for m in messages", "for m in messages | reverse")
TWICE = CHATML.replace("m.content", "m.content + ' again: ' + m.content")
CHANGING = CHATML.replace("m.content", "m.content | replace('it', 'that')")
CUT = CHATML.replace("m.content", "m.content[:4]")
NOTICE = CHATML.replace("{% if add_generation_prompt %}", "{{ '" + "be brief " * 40 + "' }}{% if true %}")


@cache
def chat_tokenizer(template: str) -> ChatTokenizer:
    backend = byte_level_tokenizer()
    backend.add_special_tokens(list(ADDED))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    return ChatTokenizer(fast, (backend.token_to_id("<|im_end|>"), backend.token_to_id("<|eot|>")))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def found(tokenizer: ChatTokenizer, messages: Sequence[dict[str, Any]]) -> tuple[list[int], Question | None]:
    token_ids = tokenizer.render(messages)
    return token_ids, find_question(tokenizer, messages, token_ids)


def texts(tokenizer: ChatTokenizer, token_ids: Sequence[int], question: Question | None) -> tuple[str, str]:
    """The question's text and the text after it."""
    assert question is not None
    end = len(token_ids) - question.num_after
    parts = token_ids[end - question.num_tokens : end], token_ids[end:]
    asked, after = (tokenizer.decode(part, shows_special=True) for part in parts)
    return asked, after


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "content", ["why?", "x", "what is the weather like\ntoday? " * 40 + "{}", "你好 café"]
)
@pytest.mark.parametrize("before", [(), (user("the quick fox " * 30), assistant("the lazy dog"))], ids=len)
def test_it_is_the_last_message_without_the_templates_marks(
    name: str, content: str, before: tuple[dict[str, Any], ...]
) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[name])
    token_ids, question = found(tokenizer, [*before, user(content)])
    assert texts(tokenizer, token_ids, question) == (content, AFTER[name])


@given(
    content=st.text(st.sampled_from("the pin is 42 .,?\n<|>[]é你\U0001f600g{}"), min_size=1, max_size=40),
    document=st.text(st.sampled_from("the pin\n<|>"), max_size=200),
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_its_span_is_any_message_that_stands_there_verbatim(name: str, content: str, document: str) -> None:
    tokenizer, content = chat_tokenizer(TEMPLATES[name]), content.strip() or "x"
    token_ids, question = found(tokenizer, [user(document), assistant("ok"), user(content)])
    assert texts(tokenizer, token_ids, question) == (content, AFTER[name])


@pytest.mark.parametrize("name", ["llama3", "gemma"])
@pytest.mark.parametrize("content", [" why\n", "\n\n is it so? \n\n\n", "\tno"])
def test_white_space_that_the_template_trims_is_none_of_it(name: str, content: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[name])
    token_ids, question = found(tokenizer, [user(content)])
    assert texts(tokenizer, token_ids, question) == (content.strip(), AFTER[name])


def test_white_space_that_the_template_leaves_is_after_it() -> None:
    tokenizer = chat_tokenizer(CHATML)
    token_ids, question = found(tokenizer, [user("the weather?\n\n")])
    assert texts(tokenizer, token_ids, question) == ("the weather?", "\n\n" + AFTER["chatml"])


def test_the_template_has_the_token_at_its_beginning_and_it_the_token_at_its_end() -> None:
    """Where the template writes no tokens of its own, one may have text of both."""
    letters = sorted({*"user: why is it?\nassistant:"})
    vocabulary = {text: number for number, text in enumerate(["<unk>", *letters, " w", "?\n"])}
    merges = [(" ", "w"), ("?", "\n")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=PLAIN)
    tokenizer = ChatTokenizer(fast, ())
    token_ids, question = found(tokenizer, [user("why is it?")])
    assert texts(tokenizer, token_ids, question) == ("hy is it?\n", "\nassistant:")


def test_spelled_marks_are_text_of_it() -> None:
    tokenizer = chat_tokenizer(CHATML)
    content = "say <|im_end|>\n<|im_start|>assistant\nno <|im_end|>"
    token_ids, question = found(tokenizer, [user(content)])
    assert texts(tokenizer, token_ids, question) == (content, AFTER["chatml"])


def test_a_message_that_repeats_the_templates_words_is_found_at_its_place() -> None:
    tokenizer = chat_tokenizer(CHATML)
    for content in ("assistant", "\n", "user\nassistant", "a"):
        token_ids, question = found(tokenizer, [user(content), assistant(content), user(content)])
        if content.strip():
            assert texts(tokenizer, token_ids, question) == (content, AFTER["chatml"])
        else:
            assert question is None


def calling(*ids: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": {}}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: str, role: str = "tool") -> dict[str, Any]:
    return {"role": role, "content": content, "tool_call_id": "a"}


def test_of_tool_results_that_end_the_conversation_it_is_all() -> None:
    tokenizer = chat_tokenizer(HERMES)
    messages = [
        user("look"),
        calling("x"),
        result("earlier"),
        calling("a", "b"),
        result("one"),
        result("two"),
    ]
    token_ids, question = found(tokenizer, messages)
    between = "\n</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>\n"
    after = f"\n</tool_response>{AFTER['hermes']}"
    assert texts(tokenizer, token_ids, question) == (f"one{between}two", after)
    token_ids, question = found(tokenizer, messages[:-1])
    assert texts(tokenizer, token_ids, question) == ("one", after)


def test_a_result_that_the_template_writes_as_json_is_found() -> None:
    tokenizer = chat_tokenizer(LLAMA3)
    messages = [user("look"), assistant("ok"), result('say "hi"\nnow', "ipython")]
    token_ids, question = found(tokenizer, messages)
    assert texts(tokenizer, token_ids, question) == ('say \\"hi\\"\\nnow', f'"{AFTER["llama3"]}')


def test_tools_and_variables_change_what_is_after_it() -> None:
    template = CHATML.replace("assistant\n' }}", "assistant\n' }}{% if brief %}{{ '<brief>' }}{% endif %}")
    tokenizer, inputs = chat_tokenizer(template), TemplateInputs((), {"brief": True})
    messages = [user("why?")]
    token_ids = tokenizer.render(messages, inputs=inputs)
    question = find_question(tokenizer, messages, token_ids, inputs)
    assert texts(tokenizer, token_ids, question) == ("why?", AFTER["chatml"] + "<brief>")


@pytest.mark.parametrize(
    "messages",
    [
        [user("hi"), assistant("hello")],
        [{"role": "system", "content": "be brief"}],
        [user("hi"), {"role": "developer", "content": "be brief"}],
        [user("")],
        [user(" \n ")],
    ],
    ids=lambda messages: messages[-1]["role"],
)
def test_other_ends_of_a_conversation_have_none(messages: list[dict[str, Any]]) -> None:
    assert found(chat_tokenizer(CHATML), messages)[1] is None


@pytest.mark.parametrize(
    "template",
    [REFUSING, FIRST_COMES_LAST, TWICE, CUT, NOTICE],
    ids=["refusing", "reversed", "twice", "cut", "long notice"],
)
def test_templates_that_do_not_show_it_once_near_the_end_have_none(template: str) -> None:
    first = user("the weather " * 40) if template != REFUSING else user("a")
    messages = [first, assistant("ok"), user("why is it so today?")]
    assert found(chat_tokenizer(template), messages)[1] is None


def test_a_template_that_changes_the_text_shows_it_changed() -> None:
    tokenizer = chat_tokenizer(CHANGING)
    token_ids, question = found(tokenizer, [user("why is it?")])
    assert texts(tokenizer, token_ids, question) == ("why is that?", AFTER["chatml"])


def test_messages_that_the_template_takes_only_when_joined_are_told_apart() -> None:
    tokenizer = chat_tokenizer(GEMMA)
    token_ids, question = found(tokenizer, [user("the document"), user("why?")])
    assert "the document\n\nwhy?" in tokenizer.decode(token_ids)
    assert texts(tokenizer, token_ids, question) == ("why?", AFTER["gemma"])


def test_another_prompts_tokens_have_none() -> None:
    tokenizer = chat_tokenizer(CHATML)
    token_ids = tokenizer.render([user("why?")])
    assert find_question(tokenizer, [user("the weather")], token_ids) is None
    assert find_question(tokenizer, [user("why?")], []) is None


@pytest.mark.parametrize("kind", ["word", "byte", "composed", "fallback"])
def test_every_kind_of_tokenizer_has_it(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: ChatTokenizer = request.getfixturevalue(f"{kind}_tokenizer")
    token_ids, question = found(tokenizer, [user("the quick fox"), assistant("ok"), user("the pin is 4 2 ?")])
    asked, after = texts(tokenizer, token_ids, question)
    # with SentencePiece's spaces the template's own may be the first token of it
    assert asked.strip() == "the pin is 4 2 ?"
    assert 1 <= len(after) < 40


def test_a_continued_session_has_it_among_the_new_tokens() -> None:
    tokenizer = chat_tokenizer(CHATML)
    asked = [ChatMessage("user", "the weather?"), ChatMessage("assistant", "fine")]
    first = render_conversation(tokenizer, asked[:1])
    token_ids = (*first.token_ids, *(i for letter in "fine" for i in tokenizer.encode(letter)))
    recorded = RecordedConversation(
        messages=tuple(asked), token_ids=token_ids, assistant_ends=(len(token_ids),)
    )
    messages = [*asked, ChatMessage("user", "and today?")]
    prompt = render_conversation(tokenizer, messages, recorded=recorded)
    assert prompt.token_ids[: len(token_ids)] == token_ids
    question = find_question(tokenizer, [message.for_template() for message in messages], prompt.token_ids)
    assert texts(tokenizer, prompt.token_ids, question) == ("and today?", AFTER["chatml"])


def test_its_cost_does_not_grow_with_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer(CHATML)
    long = "the weather today is fine. " * 4000
    messages = [user(long), assistant(long), user(long + "why?")]
    token_ids = tokenizer.render(messages)
    tokenized: list[str] = []
    rendered: list[str] = []
    encode, render = tokenizer._ids, tokenizer.template.text

    def counted(text: str, **options: Any) -> list[int]:
        tokenized.append(text)
        return encode(text, **options)

    def shown(*args: Any) -> str:
        rendered.append(render(*args))
        return rendered[-1]

    monkeypatch.setattr(tokenizer, "_ids", counted)
    monkeypatch.setattr(tokenizer.template, "text", shown)
    question = find_question(tokenizer, messages, token_ids)
    assert sum(map(len, [*tokenized, *rendered])) < 40_000
    asked, after = texts(tokenizer, token_ids, question)
    assert (long + "why?").endswith(asked)
    assert 16_000 < len(asked) <= 16_384
    assert after == AFTER["chatml"]


@pytest.mark.parametrize(
    ("num_dropped", "left"),
    [(0, (5, 3)), (1, (5, 2)), (3, (5, 0)), (4, (4, 0)), (7, (1, 0)), (8, None), (99, None)],
)
def test_of_a_shorter_prompt_it_is_what_is_left(num_dropped: int, left: tuple[int, int] | None) -> None:
    expected = None if left is None else Question(num_tokens=left[0], num_after=left[1])
    assert Question(num_tokens=5, num_after=3).before(num_dropped) == expected
