"""Scores of an answer's text beside exact match, as RULER, LongBench and SCBench define them.

`public_formats.py` chooses a score for each record; `scoring.py` applies it.

Deviation: text without spaces is compared character by character, where LongBench segments Chinese words;
ROUGE-L is the F1 of the longest common subsequence of words, where the benchmarks split sentences as well.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ARTICLES = ("a", "an", "the")
_PUNCTUATION = ("P", "S")
"""Unicode's categories of punctuation and symbols."""
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")
"""One character of Chinese or Japanese, or a run of others."""
_NUMBER = re.compile(r"\d+")
_COMMENTS = ("#", "//", "`")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one question's answer is scored against.

    Attributes:
        score: a name of `SCORES`.
        texts: right answers; with "contains_all" and "facts" the parts of the one right answer.
        classes: with "classification" all labels.
        first_line: whether only the answer's first line counts.
    """

    score: str
    texts: tuple[str, ...]
    classes: tuple[str, ...] = ()
    first_line: bool = False

    def __post_init__(self) -> None:
        assert self.score in SCORES, self.score
        assert self.texts

    @property
    def right(self) -> tuple[str, ...]:
        """Whole right answers, for exact match."""
        return (", ".join(self.texts),) if self.score in ("contains_all", "facts") else self.texts

    def __call__(self, answer: str) -> float:
        """Score the answer, 0 to 1."""
        if self.first_line:
            answer = answer.lstrip("\n").partition("\n")[0]
        return SCORES[self.score](answer, self)


def _contains_all(answer: str, reference: Reference) -> float:
    """Return RULER's string_match_all: the share of texts that the answer contains."""
    return sum(text.lower() in answer.lower() for text in reference.texts) / len(reference.texts)


def _contains_any(answer: str, reference: Reference) -> float:
    """Return RULER's string_match_part: whether the answer contains any of the texts."""
    return float(any(text.lower() in answer.lower() for text in reference.texts))


def _fact(answer: str, reference: Reference) -> float:
    """Return whether the answer has all words of a right one consecutively; articles do not count."""
    words = _content_words(answer)
    return float(any(_occurs(_content_words(text), words) for text in reference.texts))


def _facts(answer: str, reference: Reference) -> float:
    """Return the share of facts that the answer has."""
    words = _content_words(answer)
    return sum(_occurs(_content_words(text), words) for text in reference.texts) / len(reference.texts)


def _occurs(part: Sequence[str], words: Sequence[str]) -> bool:
    starts = range(len(words) - len(part) + 1)
    return bool(part) and any(words[i : i + len(part)] == part for i in starts)


def _classification(answer: str, reference: Reference) -> float:
    """Return 1 / the number of labels that the answer contains, if the right one is among them, else 0.

    Labels that are a part of the right one do not count.
    """

    def score(right: str) -> float:
        named = [label for label in reference.classes if label in answer]
        named = [label for label in named if label == right or label not in right]
        return 1 / len(named) if right in named else 0.0

    return max(map(score, reference.texts))


def _retrieval(answer: str, reference: Reference) -> float:
    """Return the share of the answer's numbers that are the right one's."""

    def score(right: str) -> float:
        wanted, found = _NUMBER.findall(right), _NUMBER.findall(answer)
        return sum(number == wanted[0] for number in found) / len(found) if wanted and found else 0.0

    return max(map(score, reference.texts))


def _f1(answer: str, reference: Reference) -> float:
    """Return the harmonic mean of precision and recall of words, without case, punctuation and articles."""

    def score(words: Sequence[str], right: Sequence[str]) -> float:
        return _harmonic((Counter(words) & Counter(right)).total(), len(words), len(right))

    return max(score(_content_words(answer), _content_words(text)) for text in reference.texts)


def _rouge_l(answer: str, reference: Reference) -> float:
    def score(words: Sequence[str], right: Sequence[str]) -> float:
        return _harmonic(_common_subsequence(words, right), len(words), len(right))

    return max(score(_WORD.findall(answer), _WORD.findall(text)) for text in reference.texts)


def _edit_similarity(answer: str, reference: Reference) -> float:
    """Return the F1 of the longest common subsequence of characters, of the first line that is code."""
    lines = [line for line in answer.lstrip("\n").split("\n") if not line.strip().startswith(_COMMENTS)]
    code = lines[0] if lines else ""
    return max(_harmonic(_common_subsequence(code, text), len(code), len(text)) for text in reference.texts)


SCORES: dict[str, Callable[[str, Reference], float]] = {
    "contains_all": _contains_all,
    "contains_any": _contains_any,
    "fact": _fact,
    "facts": _facts,
    "classification": _classification,
    "retrieval": _retrieval,
    "f1": _f1,
    "rouge_l": _rouge_l,
    "edit_similarity": _edit_similarity,
}


def _content_words(text: str) -> list[str]:
    """Split a text into words in lower case, without punctuation and articles."""
    plain = "".join(c for c in text.lower() if unicodedata.category(c)[0] not in _PUNCTUATION)
    return [word for word in _WORD.findall(plain) if word not in _ARTICLES]


def _harmonic(num_common: int, num_words: int, num_right: int) -> float:
    """Return the F1 of num_common matches."""
    return 2 * num_common / (num_words + num_right) if num_common else 0.0


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    before = [0] * (len(b) + 1)
    for item in a:
        row = [0]
        for j, other in enumerate(b):
            row.append(before[j] + 1 if item == other else max(before[j + 1], row[j]))
        before = row
    return before[-1]
