"""`benchmarks/gpu --check` says plainly where Triton's interpreter cannot run."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import triton
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark's module, which is no package's."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "gpu"))
    yield importlib.import_module("interpreter")
    del sys.modules["interpreter"]


def test_with_the_tested_numpy_there_is_no_problem(interpreter: ModuleType) -> None:
    assert interpreter.interpreter_problem() is None


def test_a_numpy_that_makes_no_numbers_of_arrays_is_named_with_what_to_install(
    interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy 2.5 refuses what earlier ones warn of."""
    monkeypatch.setattr(np, "__version__", "2.5.2")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Conversion of an array with ndim > 0", DeprecationWarning)
        problem = interpreter.interpreter_problem()
    expected = (
        rf"Triton {re.escape(triton.__version__)}'s interpreter does not run with numpy 2\.5\.2 \(.+\); "
    )
    assert re.fullmatch(expected + r"pip install 'numpy<2\.5'", problem, flags=re.DOTALL), problem


def test_the_development_environment_has_a_numpy_that_it_runs_with() -> None:
    described = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    dev = map(Requirement, described["project"]["optional-dependencies"]["dev"])
    (numpy,) = [requirement for requirement in dev if requirement.name == "numpy"]
    assert "2.4.6" in numpy.specifier
    assert "2.5.0" not in numpy.specifier
