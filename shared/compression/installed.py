"""Methods from other installed packages: entry points of the group `kvferry.methods`.

    [project.entry-points."kvferry.methods"]
    every-other = "some_package:METHOD"        # a `Method`

They are loaded once, when a method is first looked up; importing this module loads nothing. Router and
workers must have the same packages installed: a worker refuses a method that it does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, TypeVar

from kvferry.shared.compression.interface import LayerAllocation, Method, ScorerFactory
from kvferry.shared.compression.plan import Part
from kvferry.shared.errors import ConfigurationError

if TYPE_CHECKING:
    from kvferry.shared.compression.attention.interface import AttentionKind
    from kvferry.shared.compression.formats.interface import LayerFormat

GROUP = "kvferry.methods"
_Entry = TypeVar("_Entry")


@functools.cache
def installed_methods() -> Mapping[str, Method]:
    """The installed methods by name.

    Raises: ConfigurationError: an entry point cannot be loaded, is not a `Method`, or its name is taken.
    """
    methods: dict[str, Method] = {}
    for entry in entry_points(group=GROUP):
        method = _load(entry)
        if methods.setdefault(entry.name, method) is not method:
            raise ConfigurationError(f"two entry points of {GROUP} are named {entry.name!r}")
    return methods


@functools.cache
def installed_formats() -> Mapping[str, type[LayerFormat]]:
    """Formats of the installed methods, by the name that their plans use.

    Raises: ConfigurationError: as `installed_methods`; or two methods bring different formats of one name.
    """
    methods = installed_methods().items()
    return _by_name("format", {name: (its.plan.representation, its.format) for name, its in methods})


@functools.cache
def installed_scorers() -> Mapping[str, ScorerFactory]:
    """As `installed_formats`, for scorers."""
    methods = installed_methods().items()
    return _by_name("scorer", {name: (its.plan.scorer, its.scorer) for name, its in methods})


@functools.cache
def installed_attentions() -> Mapping[str, type[AttentionKind]]:
    """As `installed_formats`, for decode attentions."""
    methods = installed_methods().items()
    return _by_name("attention", {name: (its.plan.attention, its.attention) for name, its in methods})


@functools.cache
def installed_allocations() -> Mapping[str, LayerAllocation]:
    """As `installed_formats`, for layer allocations."""
    methods = installed_methods().items()
    return _by_name(
        "allocation", {name: (its.plan.layer_allocation, its.allocation) for name, its in methods}
    )


def _by_name(what: str, brought: Mapping[str, tuple[Part | None, _Entry | None]]) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for method, (part, entry) in brought.items():
        if part is not None and entry is not None and found.setdefault(part.name, entry) is not entry:
            raise ConfigurationError(
                f"method {method!r} brings a {what} {part.name!r}; another method does too"
            )
    return found


def _load(entry: EntryPoint) -> Method:
    try:
        method = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"entry point {entry.name!r} of {GROUP} cannot be loaded: {error}"
        ) from error
    if not isinstance(method, Method) or method.plan.method != entry.name:
        raise ConfigurationError(
            f"entry point {entry.name!r} of {GROUP} is {entry.value}; it must be a Method whose plan has the "
            "entry point's name"
        )
    return method
