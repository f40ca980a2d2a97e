"""A method from another package: found by its entry point, with its own scorer, refused when broken."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from kvtest.compression import compress_layer

from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import method_names, plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import ConfigurationError, InvalidRequest

SOURCE = """
import torch

from kvferry.shared.compression.interface import Method
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part


class EveryOther:
    observed_queries = 0
    protected_rows = 0
    depends_on_rows = False
    scores_heads_apart = True

    def __init__(self, params, rows):
        self.offset = params["offset"]

    def __call__(self, inputs):
        scores = torch.zeros(inputs.keys.shape[:2])
        scores[:, self.offset :: 2] = 1.0
        return scores


EVERY_OTHER = Method(
    plan=CompressionPlan(
        method="every-other",
        scorer=Part(name="every_other", params={"offset": 1}),
        budget=Budget(retention=0.5),
    ),
    scorer=EveryOther,
)
ALSO = Method(
    plan=CompressionPlan(method="also", scorer=EVERY_OTHER.plan.scorer),
    scorer=lambda params, rows: None,
)
SILENT = Method(
    plan=CompressionPlan(method="silent", scorer=Part(name="silent")),
    scorer=lambda params, rows: lambda inputs: torch.zeros(inputs.keys.shape[:2]),
)
SHADOW = Method(plan=CompressionPlan(method="shadow", scorer=Part(name="compactor")), scorer=EveryOther)
LATE_SNAPKV = Method(plan=CompressionPlan(method="snapkv"))
NOT_A_METHOD = EVERY_OTHER.plan
"""

Install = Callable[[str], None]


@pytest.fixture
def install(install: Callable[[str, str], None]) -> Install:
    """`install(lines)`: a distribution of `SOURCE`."""
    return functools.partial(install, SOURCE)


def test_a_method_of_another_package_resolves_and_selects(install: Install) -> None:
    assert "every-other" not in method_names()
    install("every-other = outside_kvferry_methods:EVERY_OTHER")
    assert "every-other" in method_names()
    plan = plan_for("every-other", overrides={"offset": 0})
    resolved = resolve_plan(plan, num_prompt_tokens=11, max_new_tokens=3, num_layers=2, head_dim=4)
    assert resolved.method == "every-other"
    rows = torch.arange(44.0).reshape(1, 11, 4)
    inputs = LayerInputs(layer=0, queries=rows[:, None], keys=rows, values=-rows, scaling=1.0)
    layer = compress_layer(resolved, inputs)
    assert layer["index"].tolist() == [[0, 2, 4, 6, 8, 10]]
    assert torch.equal(layer["keys"], rows[:, ::2])
    assert plan_for("every-other", budget=Budget(tokens=3)).budget == Budget(tokens=3)
    with pytest.raises(InvalidRequest, match=r"every-other.*takes offset"):
        plan_for("every-other", overrides={"window": 3})


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "every-other = outside_kvferry_methods:NO_SUCH",
            "'every-other' of kvferry.methods cannot be loaded",
        ),
        ("every-other = no_such_module:X", "cannot be loaded"),
        ("every-other = outside_kvferry_methods:NOT_A_METHOD", "must be a Method"),
        ("another-name = outside_kvferry_methods:EVERY_OTHER", "must be a Method whose plan has"),
        ("snapkv = outside_kvferry_methods:LATE_SNAPKV", "name methods snapkv"),
    ],
)
def test_an_entry_point_that_is_no_method_is_a_configuration_error(
    install: Install, lines: str, says: str
) -> None:
    install(lines)
    with pytest.raises(ConfigurationError, match=says):
        method_names()


def test_two_scorers_of_one_name_are_a_configuration_error(install: Install) -> None:
    install("every-other = outside_kvferry_methods:EVERY_OTHER\nalso = outside_kvferry_methods:ALSO")
    plan = plan_for("also", budget=Budget(tokens=3))
    with pytest.raises(ConfigurationError, match="brings a scorer 'every_other'"):
        resolve_plan(plan, num_prompt_tokens=11, max_new_tokens=3, num_layers=2, head_dim=4)


def test_a_scorer_that_does_not_say_what_it_observes_is_a_configuration_error(install: Install) -> None:
    install("silent = outside_kvferry_methods:SILENT")
    plan = plan_for("silent", budget=Budget(tokens=3))
    with pytest.raises(ConfigurationError, match="'silent' does not say observed_queries"):
        resolve_plan(plan, num_prompt_tokens=11, max_new_tokens=3, num_layers=2, head_dim=4)


def test_a_scorer_of_the_packages_own_name_is_a_configuration_error(install: Install) -> None:
    install("shadow = outside_kvferry_methods:SHADOW")
    with pytest.raises(ConfigurationError, match="name scorers compactor"):
        resolve_plan(plan_for("compactor"), num_prompt_tokens=9, max_new_tokens=1, num_layers=1, head_dim=4)
