"""Named methods: what may be asked of them, and how a wrong ask is named."""

from __future__ import annotations

import pytest
import torch
from kvtest.methods import PRESETS

from kvferry.shared.compression.formats import FORMATS
from kvferry.shared.compression.formats.interface import select_rows
from kvferry.shared.compression.interface import LayerInputs, installed_parts
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import method_names, plan_for
from kvferry.shared.compression.rdkv.compress import token_weights
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest


@pytest.mark.parametrize("method", method_names())
def test_every_preset_resolves_and_is_named_as_its_key(method: str) -> None:
    plan = plan_for(method)
    assert plan.method == method
    resolved = resolve_plan(plan, num_prompt_tokens=9999, max_new_tokens=7, num_layers=3, head_dim=64)
    assert len(resolved.layers) == 3
    if plan.scorer is not None:
        make_scorer(plan.scorer, rows=1)


def test_an_unknown_method_lists_the_allowed_ones() -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_for("nosuch")
    assert caught.value.param == "kv_compression.method"
    assert all(name in caught.value.message for name in ("nosuch", *PRESETS))


def test_a_budget_replaces_the_presets_and_leaves_the_preset_alone() -> None:
    assert plan_for("snapkv", budget=Budget(retention=0.5)).budget == Budget(retention=0.5)
    assert plan_for("snapkv", budget=Budget()).budget == Budget(tokens=2048)
    assert PRESETS["snapkv"].budget == Budget(tokens=2048)


@pytest.mark.parametrize(
    ("budget", "param"),
    [(Budget(tokens=5), "kv_compression.token_budget"), (Budget(retention=0.5), "kv_compression.retention")],
)
def test_full_takes_no_budget(budget: Budget, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_for("full", budget=budget)
    assert caught.value.param == param


@pytest.mark.parametrize("method", ["think", "kivi"])
def test_methods_that_keep_every_token_take_no_budget(method: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{method!r}, which keeps every token and takes no budget"):
        plan_for(method, budget=Budget(tokens=5))


@pytest.mark.parametrize("method", ["rdkv", "adakv", "think", "kivi"])
def test_the_wire_quantises_plain_rows_only(method: str) -> None:
    with pytest.raises(InvalidRequest, match=f"has wire_bits; method {method!r} takes"):
        plan_for(method, overrides={"wire_bits": 8})


def test_a_parameter_that_plans_may_lack_is_left_out_at_its_default() -> None:
    """Workers of a release that does not know it take the plan then."""
    draft = PRESETS["rdkv-draft"].representation.params
    assert draft["draft_kernel_size"] == 5
    sent = plan_for("rdkv-draft").representation.params
    assert sent == {name: value for name, value in draft.items() if name != "draft_kernel_size"}
    assert plan_for("rdkv-draft", overrides={"draft_kernel_size": 7}).representation.params == {
        **draft,
        "draft_kernel_size": 7,
    }
    plan = plan_for("rdkv-union", overrides={"with_attention": False})
    assert plan.representation == plan_for("compactor-rdkv").representation
    assert plan_for("rdkv-union", overrides={"with_attention": 0}).representation != plan.representation


MUST_HAVE: dict[str, set[str]] = {
    "accumulated_attention": set(),
    "attention_variance": {"normalisation"},
    "compactor": {
        "sketch",
        "sketch_columns",
        "solver",
        "centered",
        "seed",
        "chunk_tokens",
        "scaled",
        "leverage_weight",
        "sinks",
        "recents",
    },
    "dense": set(),
    "evict": set(),
    "exact_topk": set(),
    "heavy_hitters": set(),
    "hsa": set(),
    "keydiff": {"sinks", "recents"},
    "kivi": {"bits"},
    "merge": set(),
    "packed": {"k_bits", "v_bits"},
    "pyramid": {"window", "beta"},
    "quest": {"dense_layers"},
    "ragged": {"floor"},
    "random": {"seed"},
    "reconstruction": {"chunk_tokens", "lead_tokens", "sinks", "recents"},
    "rdkv": {"epsilon_table", "window", "kernel_size", "channel_weights", "widths", "rebudget_tokens"},
    "rows": {"wire_bits"},
    "sparq": set(),
    "streaming": {"sinks"},
    "think": {"channel_retention", "window"},
    "uniform": set(),
    "window_attention": {"window", "pooling", "kernel_size", "recents"},
}
MAY_LACK = {"rdkv": {"with_attention": False, "draft_tokens": 0, "draft_kernel_size": 5}}


def test_releases_agree_on_what_plans_must_have_and_on_what_is_meant_where_they_lack_something() -> None:
    """A new part may be added to the first list, and a new parameter to the second. All else would keep
    workers and routers of two releases from running one plan together, or have them run two."""
    formats = {**FORMATS, **installed_parts("representation")}
    may_lack = {name: dict(fmt.defaults) for name, fmt in formats.items() if fmt.defaults}
    assert may_lack == MAY_LACK
    must_have: dict[str, set[str]] = {}
    for plan in PRESETS.values():
        for part in (plan.scorer, plan.attention, plan.layer_allocation, plan.representation):
            if part is not None:
                names = part.params.keys() - may_lack.get(part.name, {}).keys()
                assert must_have.setdefault(part.name, names) == names
    assert must_have == MUST_HAVE
    for name, names in MUST_HAVE.items():
        if name in formats and name != "rows":  # of which a part may have no parameters
            assert formats[name].allowed.keys() == names | may_lack.get(name, {}).keys()


def test_overrides_replace_parameters_in_every_part_that_has_them() -> None:
    plan = plan_for("pyramidkv", overrides={"window": 8, "beta": 5, "kernel_size": 5})
    assert plan.scorer is not None
    assert plan.scorer.params == {"window": 8, "pooling": "avg", "kernel_size": 5, "recents": 8}
    assert plan.layer_allocation.params == {"window": 8, "beta": 5}
    assert plan_for("quest", overrides={"dense_layers": 0}).attention.params == {"dense_layers": 0}


def test_methods_that_score_by_the_last_queries_share_one_window_and_one_pooling_kernel() -> None:
    """RDKV once had 5 where snapkv had 7 and rocketkv 63, so tables compared kernels, not methods."""
    shared: dict[str, set[object]] = {"window": set(), "kernel_size": set(), "pooling": set()}
    for plan in PRESETS.values():
        for part in (plan.scorer, plan.layer_allocation, plan.representation):
            for name, values in shared.items():
                if part is not None and name in part.params:
                    values.add(part.params[name])
    assert shared == {"window": {32}, "kernel_size": {9}, "pooling": {"avg"}}


def test_a_kernel_reaches_the_answer_beside_the_tokens_that_a_question_matches() -> None:
    """An answer four tokens from the attended one is retained with it; with a kernel of 5 it was not."""
    queries = torch.zeros(1, 1, 32, 4)
    queries[..., 0] = 1.0
    keys = torch.zeros(1, 400, 4)
    keys[:, 100, 0] = 50.0
    for method in ("snapkv", "rocketkv", "adakv", "pyramidkv"):
        scorer = plan_for(method).scorer
        assert scorer is not None
        inputs = LayerInputs(layer=0, queries=queries, keys=keys, values=keys, scaling=1.0)
        kept = select_rows(make_scorer(scorer, rows=20)(inputs), 20)[0].tolist()
        assert set(range(96, 105)) <= set(kept)
    part = plan_for("rdkv").representation
    weights = token_weights(queries, keys, scaling=1.0, kernel_size=int(part.params["kernel_size"]))
    assert weights[0].topk(9).indices.sort().values.tolist() == list(range(96, 105))


def test_skipped_layers_join_the_presets() -> None:
    assert plan_for("rocketkv", skip_layers=(3, 1)).skip_layers == (1, 3)
    assert plan_for("rocketkv").skip_layers == ()


def test_overrides_replace_the_scorers_parameters_only() -> None:
    assert PRESETS["rocketkv"].scorer is not None
    preset_params = PRESETS["rocketkv"].scorer.params
    plan = plan_for("rocketkv", overrides={"window": 128})
    assert plan.scorer is not None
    assert plan.scorer.params == {**preset_params, "window": 128}
    assert PRESETS["rocketkv"].scorer.params["window"] == 32


@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_unknown_overrides_are_named(method: str) -> None:
    with pytest.raises(InvalidRequest, match="nosuch"):
        plan_for(method, overrides={"nosuch": 1})


@pytest.mark.parametrize(
    "overrides",
    [
        {"window": 0},
        {"window": 10**6},
        {"window": True},
        {"window": 1.5},
        {"kernel_size": 4},
        {"kernel_size": 0},
        {"pooling": "min"},
        {"recents": -1},
        {"recents": 10**6},
        {"pooling": 7},
    ],
)
def test_out_of_range_scorer_parameters_are_refused(overrides: dict[str, int | float | str]) -> None:
    scorer = plan_for("snapkv", overrides=overrides).scorer
    assert scorer is not None
    with pytest.raises(InvalidRequest):
        make_scorer(scorer, rows=10)
