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
from typing import TYPE_CHECKING

from kvferry.shared.compression.interface import Method, ScorerFactory
from kvferry.shared.errors import ConfigurationError

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import LayerFormat

GROUP = "kvferry.methods"


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
    formats: dict[str, type[LayerFormat]] = {}
    for name, method in installed_methods().items():
        if method.format is None:
            continue
        representation = method.plan.representation.name
        if formats.setdefault(representation, method.format) is not method.format:
            raise ConfigurationError(
                f"method {name!r} brings a format {representation!r}; another method does too"
            )
    return formats


@functools.cache
def installed_scorers() -> Mapping[str, ScorerFactory]:
    """Scorers of the installed methods, by the name that their plans use.

    Raises: ConfigurationError: as `installed_methods`; or two methods bring different scorers of one name.
    """
    scorers: dict[str, ScorerFactory] = {}
    for name, method in installed_methods().items():
        if method.scorer is None or method.plan.scorer is None:
            continue
        if scorers.setdefault(method.plan.scorer.name, method.scorer) is not method.scorer:
            raise ConfigurationError(
                f"method {name!r} brings a scorer {method.plan.scorer.name!r}; another method does too"
            )
    return scorers


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
