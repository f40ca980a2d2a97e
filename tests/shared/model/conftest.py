"""Three kinds of tokenizer: word-level (the demo's), byte-level BPE, and BPE with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvferry.shared.model.tokenizer import ChatTokenizer

CHATML = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('tools speak after calls only') }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
COMPOSED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|' + 'assistant' + '|>' }}{% endif %}{# 'tool' #}"
)
"""The roles' markers are not in its source."""
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then it's done.",
    "what is the access code of the golden lighthouse? it is 4 2 7 1.",
    "caf\u00e9 cr\u00e8me na\u00efve \u00fcber \u4f60\u597d \U0001f600",
] * 20


def _save(tokenizer: Tokenizer, folder: Path, *, template: str, bos: str | None, eos: str) -> ChatTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="session")
def word_tokenizer(demo_model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(demo_model_dir)


@pytest.fixture(scope="session")
def byte_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    folder = tmp_path_factory.mktemp("byte-level")
    _save(tokenizer, folder, template=CHATML, bos=None, eos="<|im_end|>")
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(byte_tokenizer_dir)


@pytest.fixture(scope="session")
def composed_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level with NFKC; the roles' markers are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    markers = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<fig>"]
    tokenizer.add_tokens([AddedToken(marker, normalized=True) for marker in markers])
    tokenizer.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("composed")
    _save(tokenizer, folder, template=COMPOSED, bos=None, eos="<|end|>")
    return folder


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(CORPUS).replace(" ", "")) - set("\u4f60\u597d\U0001f600"))
    words = ["\u2581", *letters, "\u2581t", "he", "\u2581the", "is"]
    vocabulary = {piece: rank for rank, piece in enumerate([*pieces, *words])}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("i", "s")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder = tmp_path_factory.mktemp("byte-fallback")
    return _save(tokenizer, folder, template=INST, bos="<s>", eos="</s>")


@pytest.fixture(scope="session")
def composed_tokenizer(composed_tokenizer_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(composed_tokenizer_dir)


@pytest.fixture(params=["word", "byte", "fallback"])
def any_tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    tokenizer: ChatTokenizer = request.getfixturevalue(f"{request.param}_tokenizer")
    return tokenizer
