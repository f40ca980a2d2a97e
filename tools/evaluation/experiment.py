"""Parses the options of `kvferry eval` into tasks, contenders and units of work.

Unknown names are refused with a message that lists the allowed ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from kvferry.shared.compression.plan import CompressionPlan, ParamValue
from kvferry.shared.compression.presets import method_names, plan_for
from kvferry.shared.compression.resolve import check_plan
from kvferry.shared.errors import ConfigurationError, InvalidRequest
from kvferry.shared.model.loading import checkpoint_dtype
from kvferry.shared.model.spec import DTypeName
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.budgets import Match, Target, parse_target
from kvferry.tools.evaluation.collection import COLLECTION_TASKS, is_collection, read_collection
from kvferry.tools.evaluation.config import DEFAULT_TASKS, EvalConfig
from kvferry.tools.evaluation.data import read_data
from kvferry.tools.recall.tasks import MIN_TOKENS, TASKS, Example

Setting = Literal["aware", "once", "agnostic"]
FirstToken = Literal["prefill", "refed"]
Answers = Literal["right", "own"]
SETTINGS: tuple[Setting, ...] = ("aware", "once", "agnostic")
FULL = "full"
OWN_LENGTH = 0
"""Stands for the lengths of a user's own prompts."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method at a budget.

    Attributes:
        method: as the user wrote it, parameters included.
        plan: the method's plan; its budget is the preset's until the target is solved for.
        target: None for a method that keeps everything.
    """

    method: str
    plan: CompressionPlan
    target: Target | None

    @property
    def budget(self) -> str:
        return self.target.label if self.target else "100%"

    @property
    def digest(self) -> str:
        """A digest of the method's definition, so that records of an earlier one are not reused.

        Fields at their defaults do not count, so that a new field of plans leaves existing records valid.
        """
        text = json.dumps(_without_defaults(self.plan), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _without_defaults(value: Any) -> Any:
    if not is_dataclass(value):
        return value
    given = {}
    for each in fields(value):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if (here := getattr(value, each.name)) != default:
            given[each.name] = _without_defaults(here)
    return given


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One example: prefilled once, compressed by every contender in every setting."""

    task: str
    num_tokens: int
    depth: float | None
    held_out: bool
    seed: int


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that determines a result; records are keyed by it and by the model's fingerprint.

    Attributes:
        kv_dtype: the dtype in which bytes of K and V rows are counted.
        lengths: prompt lengths, each with its number of examples.
        answers: what earlier turns of a conversation contain.
        gap: positions skipped before the last question.
        data: in place of generated examples, those of `--data` by task and length. A file's one task is
            named after it, and its length is OWN_LENGTH, whatever the prompts' own.
    """

    contenders: tuple[Contender, ...]
    match: Match
    kv_dtype: DTypeName
    tasks: tuple[str, ...]
    lengths: dict[int, int]
    depths: tuple[float | None, ...]
    settings: tuple[Setting, ...]
    first_token: FirstToken
    answers: Answers
    first_seed: int
    held_out: bool
    gap: int
    max_new_tokens: int
    data: Mapping[tuple[str, int], tuple[Example, ...]] = field(default_factory=dict)

    def example(self, unit: Unit) -> Example:
        """Return the unit's conversation; of `data`, a unit's seed is the example's number."""
        if self.data:
            return self.data[unit.task, unit.num_tokens][unit.seed]
        return TASKS[unit.task].example(
            num_tokens=unit.num_tokens, seed=unit.seed, held_out=unit.held_out, depth=unit.depth
        )

    @cached_property
    def data_digests(self) -> Mapping[tuple[str, int], tuple[str, ...]]:
        """The digest of each example of `data`."""
        return {cell: tuple(map(example_digest, examples)) for cell, examples in self.data.items()}

    @property
    def shares_documents(self) -> bool:
        """True if examples that follow one another may be about one document, which is then run once."""
        return OWN_LENGTH not in self.lengths and bool(self.data)

    def seeds(self, task: str, num_tokens: int) -> range:
        """Return the seeds of a cell's examples."""
        number = self.lengths[num_tokens]
        if self.data:
            found = len(self.data.get((task, num_tokens), ()))
            number = min(found, number or found)
        return range(self.first_seed, self.first_seed + number)

    def units(self) -> Iterator[Unit]:
        """Yield all examples: the first seed of every cell first, so that all cells fill at the same rate.

        Examples about one document follow one another where documents are shared.
        """
        cells = [(task, num_tokens) for num_tokens in self.lengths for task in self.tasks]
        found = [(cell, seed) for cell in cells for seed in self.seeds(*cell)]
        if self.shares_documents:
            documents = [self.data[cell][seed].document for cell, seed in found]
            places = {document: place for place, document in enumerate(dict.fromkeys(documents))}
            found.sort(key=lambda unit: places[self.data[unit[0]][unit[1]].document])
        else:
            found.sort(key=lambda unit: unit[1])
        for (task, num_tokens), seed in found:
            for depth in self.depths:
                yield Unit(task=task, num_tokens=num_tokens, depth=depth, held_out=self.held_out, seed=seed)

    def settings_of(self, task: str) -> tuple[Setting, ...]:
        """Return the settings to measure; with a single question "once" equals "aware"."""
        examples = [example for (name, _), cell in self.data.items() if name == task for example in cell]
        examples = examples or [TASKS[task].example(num_tokens=min(self.lengths), seed=0)]
        is_single = all(len(example.messages) == 1 for example in examples)
        if is_single and "aware" in self.settings:
            return tuple(s for s in self.settings if s != "once")
        return self.settings


def example_digest(example: Example) -> str:
    """Return a digest that changes with the example's text."""
    return hashlib.blake2b(repr(example).encode(), digest_size=6).hexdigest()


def describe_task(name: str) -> str:
    """Return a task's name in tables; of a user's own questions it is their file's."""
    return TASKS[name].description if name in TASKS else COLLECTION_TASKS.get(name, name)


def describe_length(num_tokens: int) -> str:
    return "own prompts" if num_tokens == OWN_LENGTH else f"{num_tokens} tokens"


def read_experiment(config: EvalConfig) -> Experiment:
    """Parse the options. Raises: ConfigurationError: one names something unknown or is out of range."""
    targets = tuple(read_list("--budgets", config.budgets, parse_target))
    for target in targets:
        if config.match == "given" and target.kind == "bytes":
            raise ConfigurationError(
                f"--budgets has {target.label}; bytes need --match kept or read, --match given takes a "
                "share, tokens or own"
            )
        if config.match != "given" and target.kind == "own":
            raise ConfigurationError(f"--budgets has {target.label}; it needs --match given")
    contenders = tuple(_contenders(config.methods, targets))
    if config.gap and any(contender.method != FULL for contender in contenders):
        raise ConfigurationError(f"--gap is {config.gap}; it takes --methods full, not {config.methods}")
    if config.gap and config.batch > 1:
        raise ConfigurationError(f"--batch is {config.batch}; with --gap it must be 1")
    path = Path(config.data) if config.data else None
    is_folder = path is not None and is_collection(path)
    number = 0 if is_folder else config.examples
    lengths = dict(read_list("--lengths", config.lengths, lambda text: _length(text, number)))
    data: Mapping[tuple[str, int], tuple[Example, ...]] = {}
    names = tuple(TASKS)
    if path is not None and is_folder:
        tokenizer = ChatTokenizer.load(config.model)
        data = read_collection(
            path, lengths=tuple(lengths), count_tokens=lambda text: len(tokenizer.encode(text))
        )
        names = tuple(dict.fromkeys(task for task, _ in data))
    elif path is not None:
        own = read_data(path)
        data, lengths, names = {(path.name, OWN_LENGTH): own}, {OWN_LENGTH: len(own)}, (path.name,)
    wanted = "all" if path is not None and config.tasks == DEFAULT_TASKS else config.tasks
    return Experiment(
        contenders=contenders,
        match=config.match,
        kv_dtype=checkpoint_dtype(config.model) if config.kv_dtype == "auto" else config.kv_dtype,
        tasks=_chosen("--tasks", wanted, names),
        lengths=lengths,
        depths=tuple(read_list("--depths", config.depths, _depth)) if config.depths and not data else (None,),
        settings=cast(tuple[Setting, ...], _chosen("--settings", config.settings, SETTINGS)),
        first_token=config.first_token,
        answers=config.answers,
        first_seed=0 if data else config.first_seed,
        held_out=config.held_out,
        gap=config.gap,
        max_new_tokens=config.max_new_tokens,
        data=data,
    )


def _contenders(methods: str, targets: Sequence[Target]) -> Iterator[Contender]:
    written = list(method_names()) if methods == "all" else _items("--methods", methods)
    for method in written:
        plan = _plan(method)
        for target in targets if plan.takes_budget else (None,):
            yield Contender(method=method, plan=plan, target=target)


def _plan(text: str) -> CompressionPlan:
    """Make the plan of NAME or NAME:PARAMETER=VALUE:... A `+` in a text is a comma."""
    name, *changes = text.split(":")
    _known("--methods", name, method_names())
    plan = plan_for(name)
    parts = (plan.scorer, plan.attention, plan.layer_allocation, plan.representation)
    params = {key: value for part in parts if part is not None for key, value in part.params.items()}
    overrides: dict[str, ParamValue] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in params:
            raise ConfigurationError(
                f"--methods has {text!r}; {name} has the parameters {', '.join(params) or 'none'}, written "
                "NAME:PARAMETER=VALUE"
            )
        overrides[key] = _param(text, value, params[key])
    try:
        plan = plan_for(name, overrides=overrides or None)
        check_plan(plan, num_layers=1)
        return plan
    except InvalidRequest as error:
        raise ConfigurationError(f"--methods has {text!r}: {error.message}") from error


def _param(text: str, value: str, default: ParamValue) -> ParamValue:
    if isinstance(default, bool):
        if value not in ("true", "false"):
            raise ConfigurationError(f"--methods has {text!r}; {value!r} must be true or false")
        return value == "true"
    if isinstance(default, str):
        return value.replace("+", ",")
    try:
        return type(default)(value)
    except ValueError as error:
        raise ConfigurationError(
            f"--methods has {text!r}; {value!r} must be of type {type(default).__name__}"
        ) from error


def _length(text: str, num_examples: int) -> tuple[int, int]:
    """Parse a prompt length and its number of examples, num_examples if the text has none."""
    length, colon, examples = text.partition(":")
    if not length.isdecimal() or int(length) < MIN_TOKENS:
        raise ConfigurationError(
            f"--lengths has {text!r}; lengths are whole numbers of at least {MIN_TOKENS}"
        )
    if colon and (not examples.isdecimal() or int(examples) < 1):
        raise ConfigurationError(f"--lengths has {text!r}; LENGTH:EXAMPLES needs at least one example")
    return int(length), int(examples) if colon else num_examples


def _depth(text: str) -> float:
    try:
        depth = float(text)
    except ValueError:
        depth = -1.0
    if not 0 <= depth <= 1:
        raise ConfigurationError(f"--depths has {text!r}; depths are 0 to 1")
    return depth


def _chosen(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    if text == "all":
        return allowed
    return tuple(read_list(option, text, lambda item: _known(option, item, allowed)))


def _known(option: str, item: str, allowed: Collection[str]) -> str:
    if item not in allowed:
        raise ConfigurationError(f"{option} has {item!r}; allowed are {', '.join(allowed)}, or all")
    return item


def read_list(option: str, text: str, read: Callable[[str], T]) -> list[T]:
    """Read a comma-separated option's items. Raises ConfigurationError if one is empty or given twice."""
    return [read(item) for item in _items(option, text)]


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items) or len(set(items)) < len(items):
        raise ConfigurationError(f"{option} is {text!r}; it takes a comma-separated list without repetitions")
    return items
