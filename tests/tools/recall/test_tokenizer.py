"""The tokenizer folder says through transformers what the word lists say."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvferry.tools.recall.small_talk import DOCUMENT_PROMPTS, DOCUMENT_REPLY, SMALL_TALK
from kvferry.tools.recall.tasks import TASKS
from kvferry.tools.recall.tokenizer import save_tokenizer
from kvferry.tools.recall.vocabulary import (
    HELD_OUT_ADJECTIVES,
    HELD_OUT_NOUNS,
    UNK_ID,
    VOCABULARY,
    decode,
    encode,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    return loaded


def test_every_word_is_its_own_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == len(VOCABULARY) == 704
    ids = tokenizer(" ".join(VOCABULARY[7:]), add_special_tokens=False)["input_ids"]
    assert ids == list(range(7, len(VOCABULARY)))


def test_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "the access code of the red lighthouse is 7 4 2 9 ."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert decode(encode(text)) == text


def test_case_and_joined_digits_do_not_matter(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("The PIN is 7429.") == encode("the pin is 7 4 2 9 .")


def test_words_outside_the_vocabulary_are_unknown(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("hippopotamus") == [UNK_ID]


@pytest.mark.parametrize("name", TASKS)
def test_template_gives_an_examples_token_ids(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    example = TASKS[name].example(num_tokens=300, seed=5)
    ids = tokenizer.apply_chat_template(list(example.messages), add_generation_prompt=True)["input_ids"]
    assert ids == example.prompt_token_ids
    assert tokenizer.encode(example.answer) == example.answer_token_ids[:-1]
    assert example.answer_token_ids[-1] == tokenizer.eos_token_id


def test_small_talk_uses_known_words_only() -> None:
    texts = [t for s in SMALL_TALK for t in (*s.prompts, *s.held_out_prompts, s.reply)]
    for text in (*texts, *DOCUMENT_PROMPTS, DOCUMENT_REPLY):
        assert UNK_ID not in encode(text)


def test_held_out_prompts_are_never_trained_on() -> None:
    trained = {p for s in SMALL_TALK for p in s.prompts}
    held_out = {p for s in SMALL_TALK for p in s.held_out_prompts}
    assert not trained & held_out
    assert set(VOCABULARY) >= HELD_OUT_ADJECTIVES | HELD_OUT_NOUNS


def test_shipped_tokenizer_keeps_the_ids_of_the_word_lists(demo_model_dir: Path) -> None:
    shipped = AutoTokenizer.from_pretrained(demo_model_dir)
    words = [w for w, i in shipped.get_vocab().items() if not w.startswith("<|") and VOCABULARY[i] != w]
    assert words == []
