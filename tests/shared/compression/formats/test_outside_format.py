"""A format that another package brings: found by its entry point, compressed, received, opened, attended."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kvtest.compression import Placed, compress_layer, formats_for, make_inputs

from kvferry.shared.cache.arena import header_of
from kvferry.shared.compression.formats import num_observed_queries
from kvferry.shared.compression.formats.interface import InvalidTensors
from kvferry.shared.compression.plan import Budget, ResolvedPlan
from kvferry.shared.compression.presets import method_names, plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import ConfigurationError, InvalidRequest

SOURCE = (Path(__file__).parent / "outside_format.py").read_text(encoding="utf-8")
ENTRY = "half-precision = outside_kvferry_methods:HALF_PRECISION"
Install = Callable[[str], None]


@pytest.fixture
def install(install: Callable[[str, str], None]) -> Install:
    """`install(lines)`: a distribution of the module beside this one."""
    return functools.partial(install, SOURCE)


def resolve(num_tokens: int, *, budget: int = 20, **overrides: float) -> ResolvedPlan:
    plan = plan_for("half-precision", budget=Budget(tokens=budget), overrides=overrides)
    return resolve_plan(plan, num_prompt_tokens=num_tokens, max_new_tokens=6, num_layers=2, head_dim=7)


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize(("num_tokens", "rows"), [(97, 40), (41, 40), (33, 33)])
def test_it_attends_in_the_arena_as_its_naive_code(
    install: Install, num_tokens: int, rows: int, group_size: int
) -> None:
    install(ENTRY)
    assert "half-precision" in method_names()
    resolved = resolve(num_tokens, scale=0.25)
    assert resolved.method == "half-precision"
    assert [layer.rows for layer in resolved.layers] == [rows, rows]
    inputs = make_inputs(num_tokens, group_size=group_size, head_dim=7)
    fmt, _ = formats_for(resolved, inputs)
    assert fmt.name == "halved"
    assert num_observed_queries(resolved, (fmt, fmt)) == 1
    tensors = compress_layer(resolved, inputs)
    assert header_of(tensors) == fmt.tensors()
    assert tensors["keys"].dtype is torch.float16
    placed = Placed.of(fmt)
    cache, naive = placed.open(tensors), fmt.naive(tensors)
    rows_of = torch.randn(2, 2, 5, 7)
    for step in range(5):
        queries, (key, value) = torch.randn(2, group_size, 7), rows_of[:, :, step]
        output = cache.append_and_attend(queries, key, value, num_appended=step, scaling=0.3)
        expected = naive.fork().attend(queries, key, value, scaling=0.3)
        assert not torch.equal(expected, naive.fork().attend(queries, key, -value, scaling=0.3))
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        naive.attend(queries, key, value, scaling=0.3)
    assert all(torch.equal(a, b) for a, b in zip(cache.generated_rows(5), rows_of, strict=True))
    assert cache.used_bytes(5) <= placed.layout_bytes
    assert fmt.kept_bytes() == sum(tensor.nbytes for tensor in tensors.values())


def test_its_own_checks_refuse_plans_and_tensors(install: Install) -> None:
    install(ENTRY)
    with pytest.raises(InvalidRequest, match=r"half-precision.*takes .*scale"):
        resolve(97, window=3)
    inputs = make_inputs(97, head_dim=7)
    fmt, _ = formats_for(resolve(97), inputs)
    tensors = dict(compress_layer(resolve(97), inputs))
    tensors["keys"][0, 3, 2] = torch.nan
    with pytest.raises(InvalidTensors, match="halved keys must be finite"):
        Placed.of(fmt).open(tensors)
    with pytest.raises(InvalidTensors) as caught:
        fmt.receive({"keys": header_of(tensors)["keys"]}, Placed.of(fmt).regions)
    assert caught.value.reason == "layer_header"


def test_without_the_package_it_is_refused_by_name(install: Install) -> None:
    with pytest.raises(InvalidRequest, match="half-precision"):
        plan_for("half-precision")


def test_two_formats_of_one_name_are_a_configuration_error(install: Install) -> None:
    install(f"{ENTRY}\nalso = outside_kvferry_methods:ALSO")
    with pytest.raises(ConfigurationError, match="brings a format 'halved'"):
        resolve(97)


def test_a_format_of_the_packages_own_name_is_a_configuration_error(install: Install) -> None:
    install("shadow = outside_kvferry_methods:SHADOW")
    with pytest.raises(ConfigurationError, match="name formats kivi"):
        resolve_plan(plan_for("full"), num_prompt_tokens=9, max_new_tokens=1, num_layers=1, head_dim=4)
