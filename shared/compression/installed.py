"""The parts of plans by name: the package's own, and those of other installed packages' methods, which are
entry points of the group `kvferry.methods`.

    [project.entry-points."kvferry.methods"]
    every-other = "some_package:METHOD"        # a `Method`

They are loaded once, when a method is first looked up; importing this module loads nothing. Router and
workers must have the same packages installed: a worker refuses a method that it does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from kvferry.shared.compression.interface import Method
from kvferry.shared.compression.plan import look_up
from kvferry.shared.errors import ConfigurationError

GROUP = "kvferry.methods"
_BROUGHT = {
    "scorer": "scorer",
    "representation": "format",
    "attention": "attention",
    "layer_allocation": "allocation",
}
"""The parts of a plan that a `Method` may bring, and what it calls them."""
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
def installed_parts(part: str) -> Mapping[str, Any]:
    """What installed methods bring for a part of a plan, by the name that plans use.

    Args: part: an attribute of `CompressionPlan`, one of `_BROUGHT`.
    Raises: ConfigurationError: as `installed_methods`; or two methods bring different ones of one name.
    """
    what, found = _BROUGHT[part], dict[str, Any]()
    for method, its in installed_methods().items():
        named, entry = getattr(its.plan, part), getattr(its, what)
        if named is not None and entry is not None and found.setdefault(named.name, entry) is not entry:
            raise ConfigurationError(
                f"method {method!r} brings a {what} {named.name!r}; another method does too"
            )
    return found


def all_parts(part: str, own: Mapping[str, _Entry]) -> Mapping[str, _Entry]:
    """The package's own entries for a part of a plan, then those of installed methods.

    Raises: ConfigurationError: as `installed_parts`; or an installed method uses a name of the package.
    """
    return with_installed(f"{_BROUGHT[part]}s", own, installed_parts(part))


def find_part(part: str, name: str, own: Mapping[str, _Entry]) -> _Entry:
    """An entry of `all_parts`. Raises: InvalidRequest: none has this name. Else as `all_parts`."""
    return look_up(part, name, all_parts(part, own))


def with_installed(
    what: str, own: Mapping[str, _Entry], installed: Mapping[str, _Entry]
) -> Mapping[str, _Entry]:
    """The package's entries of a registry, then those of installed packages.

    Raises: ConfigurationError: an installed package uses a name of the package.
    """
    if taken := sorted(set(own) & set(installed)):
        raise ConfigurationError(f"installed packages name {what} {', '.join(taken)}; the package has them")
    return {**own, **installed}


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
