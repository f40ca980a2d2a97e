"""What the leading rank and the others tell one another, beside tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.shared.model.interface import Division


@dataclass(frozen=True, kw_only=True)
class Join:
    """Join the group. Attributes: store: file by which the ranks find one another; num_threads: for torch."""

    rank: int
    num_ranks: int
    store: str
    backend: str
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load a rank's part of a model; arguments as of `load_model`."""

    path_or_id: str | Path
    device: str
    dtype: str
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A rank has its part of the weights. Attributes: error: why it has not; "" if it has."""

    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call a method; see `FollowingRank.target`. Attributes: is_answered: with its result, or its error."""

    name: str
    args: tuple[Any, ...]
    is_answered: bool = False


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Run a prompt's pass; arguments as of `LanguageModel.prefill`. Its token ids follow by broadcast."""

    num_tokens: int
    start: int
    num_queries: int | None
    with_logits: bool
    division: Division | None


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Run a decode step over the first slots. Its token ids and positions follow by broadcast."""

    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """Noted by a follower: what it wants to be told at once. Attributes: number: of its questions so far."""

    number: int
    what: object


@dataclass(frozen=True, kw_only=True)
class Answer:
    """To the question of this number."""

    number: int
    answer: object


@dataclass(frozen=True)
class Proceed:
    """Go on with the pass: the leading rank is done with what it does alone."""


@dataclass(frozen=True)
class Abort:
    """End the pass: it failed or was cancelled in what the leading rank does alone."""
