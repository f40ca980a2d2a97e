"""Tiny random models whose tokenizer can write any text, with chat templates of real families.

The demo model's tokenizer has only words. These have a byte-level vocabulary, as most models have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvferry.shared.model.checkpoint import quiet_libraries
from kvtest.tiny_models import make_config

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (
    "{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{ tool | tojson }}"
    "{{ '\\n' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{%- for call in m.tool_calls or [] %}"
    "{{ '\\n' if m.content or not loop.first }}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Calls as Hermes and Qwen write them."""
MISTRAL = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{%- for call in m.tool_calls %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}' }}{{ ', ' if not loop.last }}"
    "{%- endfor %}{{ ']<|im_end|>' }}"
    "{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}{# tools #}"
)
"""Calls as Mistral writes them: a list after a special token."""
LLAMA = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}"
    "{%- set function = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + function.name + '\", \"parameters\": ' + (function.arguments | tojson) + '}' }}"
    "{%- else %}{{ m.content }}{%- endif %}{{ '<|im_end|>' }}{%- endfor %}{# tools #}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Calls as Llama 3 writes them: one, without a mark."""
THINKING = HERMES.replace("{{ '<|im_start|>assistant", "{# <think></think> #}{{ '<|im_start|>assistant")
THOUGHT: Any = {"seed": 1, "structured_outputs": {"regex": "<think>[a-e]{4}</think>\\n\\n[0-9]{5}"}}
"""Has a random model think, and answer."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
KEY = {"Authorization": "Bearer -"}
_CORPUS = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "unit": null, "detailed": true}}',
    "the quick brown fox jumps over the lazy dog, and then it is done. what is the weather like today?",
    "[1, 2, 3, -4.5, 1e10]\n\t<tool_call>\n</tool_call> naïve café → 你好",
]
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]")


class Person(pydantic.BaseModel):
    """What a structured answer is parsed to."""

    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


def text_tokenizer() -> Tokenizer:
    """A byte-level BPE that knows words, for prompts as long as agents' are."""
    files = (Path(__file__).parents[3] / "docs").glob("*.md")
    return byte_level_tokenizer(4096, corpus=sorted(file.read_text(encoding="utf-8") for file in files))


def byte_level_tokenizer(
    vocab_size: int = 420, added: tuple[str, ...] = (), corpus: Sequence[str] = _CORPUS
) -> Tokenizer:
    """A byte-level BPE; `added` are tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*corpus] * 4, trainer)
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def make_text_model(
    folder: Path,
    *,
    template: str = CHATML,
    added: tuple[str, ...] = (),
    tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, object] | None = None,
    **overrides: object,
) -> Path:
    """Write a random llama with a byte-level tokenizer; returns the folder. Its vocabulary is padded, and two
    ids end a completion.

    Args: overrides: of the model's configuration.
    """
    tokenizer = tokenizer or byte_level_tokenizer(added=added)
    end, turn_end = (tokenizer.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>"))
    size = tokenizer.get_vocab_size() + 13
    ids = {"eos_token_id": [turn_end, end], "bos_token_id": None, "pad_token_id": end}
    config = make_config("llama", vocab_size=size, **ids, **overrides)
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(20)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        **(tokenizer_config or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder
