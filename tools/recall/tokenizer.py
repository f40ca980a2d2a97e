"""Builds the demo model's tokenizer folder: words in lower case, one token per digit, and a chat template.

Every model of this package uses the same files; the words come from `vocabulary.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from kvferry.tools.recall.vocabulary import SPECIAL_TOKENS, VOCABULARY, WORD_IDS

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|' + m['role'] + '|> ' + m['content'] + ' <|end|> ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_MODEL_MAX_LENGTH = 8192


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer itself; words outside the vocabulary become `<|unk|>`."""
    tokenizer = Tokenizer(models.WordLevel(dict(WORD_IDS), unk_token=SPECIAL_TOKENS[1]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    specials = [w for w in VOCABULARY if w.startswith("<|")]
    tokenizer.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in specials])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers' AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "unk_token": "<|unk|>",
        "model_max_length": _MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
