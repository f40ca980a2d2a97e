from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer

TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("the is\u00e9\u4f60\U0001f600\U0001f468\u200d\U0001f469 "),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=24,
)


def assemble(assembler: TextAssembler, ids: list[int]) -> tuple[str, bool]:
    text = ""
    for token_id in ids:
        delta = assembler.push(token_id)
        text += delta.text
        if delta.stopped:
            return text, True
    return text + assembler.flush(), False


@given(data=st.data())
def test_deltas_of_any_ids_join_to_the_decoded_text(
    any_tokenizer: ChatTokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, any_tokenizer._backend.get_vocab_size() + 3), max_size=40))
    text, stopped = assemble(TextAssembler(any_tokenizer), ids)
    assert text == any_tokenizer.decode(ids)
    assert not stopped


@given(data=st.data())
def test_token_texts_join_to_the_text_whatever_is_held_back(
    any_tokenizer: ChatTokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, any_tokenizer._backend.get_vocab_size() - 1), max_size=40))
    plain, holding = TextAssembler(any_tokenizer), TextAssembler(any_tokenizer, ("the is no such text",))
    for token_id in ids:
        delta = plain.push(token_id)
        assert delta.text == delta.token_text == holding.push(token_id).token_text


@given(text=TEXTS, suffix=TEXTS)
def test_deltas_of_real_text_join_to_the_decoded_text(
    any_tokenizer: ChatTokenizer, text: str, suffix: str
) -> None:
    ids = any_tokenizer.encode(text) + any_tokenizer.encode(suffix)
    assert assemble(TextAssembler(any_tokenizer), ids)[0] == any_tokenizer.decode(ids)


@given(text=TEXTS, data=st.data())
def test_text_ends_before_the_first_stop_string(
    any_tokenizer: ChatTokenizer, text: str, data: st.DataObject
) -> None:
    ids = any_tokenizer.encode(text)
    decoded = any_tokenizer.decode(ids)
    parts = [decoded[a:b] for a in range(len(decoded)) for b in range(a + 1, min(a + 5, len(decoded)) + 1)]
    choices = st.sampled_from(parts) if parts else st.just("stop")
    stop = tuple(data.draw(st.lists(choices | st.text(min_size=1, max_size=3), min_size=1, max_size=4)))
    got, _ = assemble(TextAssembler(any_tokenizer, stop), ids)
    assert not any(s in got for s in stop)
    assert decoded.startswith(got)
    if any(s in decoded for s in stop):
        # the stop that completes first may begin after one that would have begun earlier but completed later
        assert any(decoded[len(got) :].startswith(s) for s in stop)
    else:
        assert got == decoded


def test_a_character_split_over_tokens_comes_whole_with_its_last_token(byte_tokenizer: ChatTokenizer) -> None:
    ids = byte_tokenizer.encode("a\U0001f600b\U0001f469\u200d\U0001f680")
    assert len(ids) > 8
    assembler = TextAssembler(byte_tokenizer)
    texts = [assembler.push(token_id).text for token_id in ids]
    assert all("\ufffd" not in text for text in texts)
    assert "" in texts
    assert next(text for text in texts if text) == "a"
    assert "".join(texts) == "a\U0001f600b\U0001f469\u200d\U0001f680"
    assert assembler.flush() == ""


def test_a_character_cut_off_by_the_end_is_flushed_as_a_replacement(byte_tokenizer: ChatTokenizer) -> None:
    ids = byte_tokenizer.encode("ok \U0001f9ff")[:-1]
    assembler = TextAssembler(byte_tokenizer)
    delivered = "".join(assembler.push(token_id).text for token_id in ids)
    assert "\ufffd" not in delivered
    assert delivered + assembler.flush() == "ok \ufffd"
    assert assembler.flush() == ""


def test_text_that_may_begin_a_stop_string_is_held_back_and_released(byte_tokenizer: ChatTokenizer) -> None:
    assembler = TextAssembler(byte_tokenizer, ("END!",))
    deltas = [
        assembler.push(token_id) for character in "xENDyEN" for token_id in byte_tokenizer.encode(character)
    ]
    assert [delta.text for delta in deltas] == ["x", "", "", "", "ENDy", "", ""]
    assert [delta.token_text for delta in deltas] == list("xENDyEN")
    assert assembler.flush() == "EN"


def test_a_stop_string_over_several_tokens_stops_and_hides_its_own_text(
    byte_tokenizer: ChatTokenizer,
) -> None:
    assembler = TextAssembler(byte_tokenizer, ("zq", "ZZ"))
    ids = [token_id for character in "abzq" for token_id in byte_tokenizer.encode(character)]
    deltas = [assembler.push(token_id) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "ab"
    assert [delta.stopped for delta in deltas] == [False, False, False, True]
    after = assembler.push(ids[0])
    assert (after.text, after.stopped) == ("", True)
    assert assembler.flush() == ""


def test_a_stop_string_completed_by_held_bytes_is_cut_by_flush(fallback_tokenizer: ChatTokenizer) -> None:
    assembler = TextAssembler(fallback_tokenizer, ("\u4f60",))
    text = "".join(assembler.push(token_id).text for token_id in fallback_tokenizer.encode("is \u4f60"))
    assert text + assembler.flush() == "is "


def test_special_tokens_add_no_text_anywhere(any_tokenizer: ChatTokenizer) -> None:
    words = any_tokenizer.encode("the is")
    eos = any_tokenizer.eos_token_ids[0]
    assembler = TextAssembler(any_tokenizer)
    deltas = [assembler.push(token_id) for token_id in (eos, words[0], eos, *words[1:], eos)]
    assert deltas[0].text == deltas[0].token_text == deltas[2].token_text == deltas[-1].text == ""
    assert "".join(delta.text for delta in deltas) + assembler.flush() == any_tokenizer.decode(words)


def test_an_alternative_reads_as_it_would_if_pushed(any_tokenizer: ChatTokenizer) -> None:
    ids = any_tokenizer.encode("the is the")
    assembler = TextAssembler(any_tokenizer)
    for token_id in ids:
        alternative = assembler.token_text(token_id)
        assert assembler.push(token_id).token_text == alternative
    assert assembler.token_text(any_tokenizer.eos_token_ids[0]) == ""


def test_words_after_the_first_bring_their_space(word_tokenizer: ChatTokenizer) -> None:
    assembler = TextAssembler(word_tokenizer)
    assert [assembler.push(i).token_text for i in word_tokenizer.encode("the pin is")] == [
        "the",
        " pin",
        " is",
    ]


@pytest.mark.parametrize("length", [255, 256, 257, 700])
def test_endless_stray_bytes_are_given_up_on_in_bounded_steps(
    byte_tokenizer: ChatTokenizer, length: int
) -> None:
    stray = byte_tokenizer.encode("\u0100")[-1]  # the byte 80
    word = byte_tokenizer.encode("the")
    text, _ = assemble(TextAssembler(byte_tokenizer), [stray] * length + word)
    assert text.rstrip("\ufffd").endswith("the")
    assert set(text.removesuffix("the")) == {"\ufffd"}


def test_an_empty_completion_has_no_text(any_tokenizer: ChatTokenizer) -> None:
    assert TextAssembler(any_tokenizer, ("x",)).flush() == ""
