"""Prompts for calibration, each with the text that must follow it: cut from a text, asked, or generated.

A prompt cut from a text is an excerpt of it. The model is to quote a passage whose first tokens are given:

    user: EXCERPT Quote the passage of this text that begins with: WORDS    assistant: WORDS ...

The question names a place in the prompt, and each token of the answer needs the text that follows there.
Any model can do it, with or without a chat template, and the right answer is known. Generated prompts are
conversations of the recall tasks, which the demo model was trained for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.models import CALIBRATION_TEXT
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.question import Question, find_question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.conversation import Turn, tokenize
from kvferry.tools.evaluation.data import read_data
from kvferry.tools.recall.tasks import MIN_TOKENS, TASKS

CALIBRATION_TASKS = ("single_needle", "multi_key_8", "multi_key_dense", "qa_facts")
_FIRST_SEED = 1_000_000
"""Far from the seeds that evaluations use."""
_REQUEST = "Quote the passage of this text that begins with: "
_REQUEST_TOKENS = 80
"""Of a prompt's length, what the chat template and the request may take."""
_GIVEN_TOKENS, _QUOTED_TOKENS = 12, 32
_GOLDEN = 0.618
"""Multiples of it, modulo 1, are spread evenly, however many there are."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its continuation as token ids; neither is empty.

    Attributes: question: as of `Turn`.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    question: Question | None = None


def draw_samples(
    tokenizer: ChatTokenizer,
    *,
    text: str,
    data: str,
    generated: bool,
    number: int,
    num_tokens: int,
    max_model_len: int,
) -> list[Sample]:
    """Draw samples of about num_tokens tokens each unless they come from `data`.

    Args:
        text: file to cut them from.
        data: file of questions, whose first ones are taken.
        generated: with neither file, generate them; otherwise they are cut from `CALIBRATION_TEXT`.
        num_tokens: of each prompt; generated ones are counted in the demo tokenizer's tokens.

    Raises:
        ConfigurationError: a file cannot be read or has too little, or samples do not fit into the window.
    """
    if text and data:
        raise ConfigurationError(f"--text is {text} and --data {data}; give one of them")
    if data:
        samples = _asked(tokenizer, Path(data), number)
    elif generated and not text:
        samples = _generated(tokenizer, number, num_tokens)
    else:
        samples = _quotations(tokenizer, _read(text), number, num_tokens)
    longest = max(len(sample.prompt) + len(sample.answer) for sample in samples)
    if longest > max_model_len:
        given = f"--data {data}" if data else f"--length is {num_tokens}"
        raise ConfigurationError(
            f"{given}; samples come to {longest} of this model's tokens, whose window is {max_model_len}"
        )
    return samples


def _generated(tokenizer: ChatTokenizer, number: int, num_tokens: int) -> list[Sample]:
    if num_tokens < MIN_TOKENS:
        raise ConfigurationError(f"--length is {num_tokens}; generated samples need at least {MIN_TOKENS}")
    samples = []
    for i in range(number):
        task = TASKS[CALIBRATION_TASKS[i % len(CALIBRATION_TASKS)]]
        turn = tokenize(task.example(num_tokens=num_tokens, seed=_FIRST_SEED + i), tokenizer).turns[-1]
        samples.append(_sample(turn))
    return samples


def _asked(tokenizer: ChatTokenizer, path: Path, number: int) -> list[Sample]:
    examples = read_data(path)
    if len(examples) < number:
        raise ConfigurationError(f"--data {path} has {len(examples)} examples; --samples is {number}")
    turns = [tokenize(example, tokenizer).turns[-1] for example in examples[:number]]
    return [_sample(turn) for turn in turns]


def _sample(turn: Turn) -> Sample:
    return Sample(prompt=turn.prompt_token_ids, answer=turn.answer_token_ids, question=turn.question)


def _read(text: str) -> str:
    files = [Path(text)] if text else sorted(CALIBRATION_TEXT.glob("*.txt"))
    try:
        return "\n\n".join(path.read_text(encoding="utf-8") for path in files)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--text {text} cannot be read: {error}") from error


def _quotations(tokenizer: ChatTokenizer, text: str, number: int, num_tokens: int) -> list[Sample]:
    """Cut excerpts at even distances, which overlap if the text is short, and passages at all depths."""
    ids = tokenizer.encode(text, add_special=False)
    size, quoted = num_tokens - _REQUEST_TOKENS, _GIVEN_TOKENS + _QUOTED_TOKENS
    if size < quoted:
        raise ConfigurationError(
            f"--length is {num_tokens}; prompts that are cut from a text need at least "
            f"{_REQUEST_TOKENS + quoted}"
        )
    if len(ids) < size:
        raise ConfigurationError(f"the text has {len(ids)} tokens; --length {num_tokens} needs {size}")
    samples = []
    for i in range(number):
        start = (len(ids) - size) * i // max(1, number - 1)
        excerpt = ids[start : start + size]
        first = round((size - quoted) * (i * _GOLDEN % 1))
        passage = excerpt[first : first + quoted]
        given, answer = passage[:_GIVEN_TOKENS], passage[_GIVEN_TOKENS:]
        asked = f"{tokenizer.decode(excerpt)}\n\n{_REQUEST}{tokenizer.decode(given).strip()}"
        question = None
        if tokenizer.template.exists:
            messages = [{"role": "user", "content": asked}]
            prompt = tokenizer.render(messages)
            question = find_question(tokenizer, messages, prompt)
        else:
            prompt = tokenizer.encode(f"{asked}\n\n")
        if question is not None:
            question = replace(question, num_after=question.num_after + len(given))
        samples.append(Sample(prompt=(*prompt, *given), answer=tuple(answer), question=question))
    return samples
