"""Two lanes of the tests: `pytest` runs a covering set of each matrix, `pytest --all` runs everything.

A test that only `--all` runs has the mark `full`. A test with several parameters that has the mark
`covering(strength)` runs with so few of its combinations that each value occurs (1), or each pair of values
of two parameters (2). Of a long list of values `some` names those that run in both lanes. Tests have the same
names in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

FAST_EXAMPLES, ALL_EXAMPLES = 25, 200
"""Of each property. A test with its own number is one whose examples take long."""

Combination = tuple[int, ...]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run whole matrices, not a covering set of each")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs with --all only")
    config.addinivalue_line("markers", "covering(strength): without --all, a covering set of the parameters")
    # A change is judged by the same examples each time; "search" looks for new ones (CONTRIBUTING.md).
    unhurried = settings(
        deadline=None,  # the machine may be busy
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    examples = ALL_EXAMPLES if is_whole(config) else FAST_EXAMPLES
    settings.register_profile("repeatable", unhurried, derandomize=True, max_examples=examples)
    settings.register_profile("search", unhurried, print_blob=True, max_examples=ALL_EXAMPLES)
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("repeatable")


def is_whole(config: pytest.Config) -> bool:
    """Return whether this run has `--all`."""
    return bool(config.getoption("--all"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_whole(config):
        return
    left_out = {item for item in items if item.get_closest_marker("full")} | set(_beyond_covering(items))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def some(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return all values as parameters, of which those that are not among `fast` run with `--all` only."""
    params = [value if isinstance(value, ParameterSet) else pytest.param(value) for value in values]
    known = [param.values[0] for param in params]
    assert all(value in known for value in fast), f"{fast} are not all among {known}"
    return [
        param
        if param.values[0] in fast
        else pytest.param(*param.values, marks=[*param.marks, pytest.mark.full], id=param.id)
        for param in params
    ]


def _beyond_covering(items: Iterable[pytest.Item]) -> Iterable[pytest.Item]:
    """Items of a covered test that its covering set leaves out."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering"):
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None
        (strength,) = marker.args
        taken = covering([_combination(case) for case in cases], strength)
        yield from (case for number, case in enumerate(cases) if number not in taken)


def _combination(item: pytest.Item) -> Combination:
    """Which object each parameter has; a list's values are the same objects in all of its combinations."""
    params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    return tuple(id(params[name]) for name in sorted(params))


def covering(combinations_: Sequence[Combination], strength: int) -> set[int]:
    """Return places of combinations that together have all that any of them has.

    Args:
        combinations_: one value of each parameter.
        strength: 1: each value of each parameter; 2: each pair of values of two parameters.

    Takes the combination with most that is missing, and of equals the first, until nothing is missing.
    """
    had = [set(combinations(enumerate(values), min(strength, len(values)))) for values in combinations_]
    missing = set().union(*had)
    taken: set[int] = set()
    while missing:
        best = max(range(len(had)), key=lambda number: (len(had[number] & missing), -number))
        taken.add(best)
        missing -= had[best]
    return taken
