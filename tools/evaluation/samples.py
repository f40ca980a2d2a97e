"""Prompts for calibration, each with the text that must follow it: generated, asked, or cut from a text.

Generated prompts are conversations of the recall tasks in the model's own chat template. Prompts from a text
file are excerpts, each with its continuation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.question import Question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.conversation import Turn, tokenize
from kvferry.tools.evaluation.data import read_data
from kvferry.tools.recall.tasks import MIN_TOKENS, TASKS

CALIBRATION_TASKS = ("single_needle", "multi_key_8", "multi_key_dense", "qa_facts")
_FIRST_SEED = 1_000_000
"""Far from the seeds that evaluations use."""
_CONTINUATION_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its continuation as token ids; neither is empty.

    Attributes: question: as of `Turn`.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    question: Question | None = None


def draw_samples(
    tokenizer: ChatTokenizer, *, text: str, data: str, number: int, num_tokens: int, max_model_len: int
) -> list[Sample]:
    """Samples of about num_tokens tokens each unless they come from `data`.

    Args:
        text: file to cut them from, without overlap.
        data: file of questions, whose first ones are taken; with neither file samples are generated.
        num_tokens: of each prompt; generated ones are counted in the demo tokenizer's tokens.

    Raises:
        ConfigurationError: a file cannot be read or has too little, or samples do not fit into the window.
    """
    if text and data:
        raise ConfigurationError(f"--text is {text} and --data {data}; give one of them")
    if text:
        samples = _excerpts(tokenizer, Path(text), number, num_tokens)
    elif data:
        samples = _asked(tokenizer, Path(data), number)
    else:
        samples = _generated(tokenizer, number, num_tokens)
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


def _excerpts(tokenizer: ChatTokenizer, path: Path, number: int, num_tokens: int) -> list[Sample]:
    try:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--text {path} cannot be read: {error}") from error
    size = num_tokens + _CONTINUATION_TOKENS
    if len(ids) < number * size:
        raise ConfigurationError(
            f"--text {path} has {len(ids)} tokens; {number} samples of {size} need {number * size}"
        )
    return [
        Sample(
            prompt=tuple(ids[start : start + num_tokens]),
            answer=tuple(ids[start + num_tokens :][: size - num_tokens]),
        )
        for start in range(0, number * size, size)
    ]
