"""The router's options."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pydantic import ValidationError

from kvferry.services.router.completion.compression import PlanChooser
from kvferry.services.router.completion.engine_fields import KvCompression
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.shared.errors import ConfigurationError, KvferryError
from kvferry.shared.model.spec import LayerSpec, ModelSpec

SPEC = ModelSpec(
    name="m",
    fingerprint="f",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    max_model_len=512,
    dtype="float32",
    eos_token_ids=(1,),
)


def test_defaults_are_those_of_the_specification() -> None:
    config = RouterConfig()
    assert config.listen == "127.0.0.1:8000"
    assert config.default_method == "rdkv"
    assert config.session_wait_s < config.keepalive_s  # so that a busy session is a 409
    assert config.keepalive_s == 30
    assert config.max_body_bytes == 8 * 2**20
    assert config.max_header_bytes == 64 * 2**10
    assert config.read_timeout_s == 30


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_DECODE_WORKERS", "decode:9002, other:1")
    monkeypatch.setenv("KVFERRY_SESSION_TTL_S", "5")
    config = RouterConfig()
    assert split_list(config.decode_workers) == ("decode:9002", "other:1")
    assert config.session_ttl_s == 5


@pytest.mark.parametrize(
    "options",
    [
        {"listen": "8000"},
        {"listen": "host:99999"},
        {"prefill_workers": "a:1,b"},
        {"session_ttl_s": 0},
        {"keepalive_s": 0},
        {"metrics_access": "maybe"},
        {"unknown": 1},
    ],
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises((ValidationError, KvferryError)):
        RouterConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"default_method": "magic"},
        {"allowed_methods": "full,magic", "default_method": "full"},
        {"allowed_methods": "full"},
        {"default_method": "full", "default_retention": 0.5},
    ],
)
def test_methods_that_cannot_be_are_refused_at_start(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        PlanChooser(RouterConfig(**options))  # type: ignore[arg-type]


def test_keys_do_not_show_in_the_settings() -> None:
    assert "secret" not in repr(RouterConfig(api_keys="secret"))


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("0.0.0.0:1", False)],
)
def test_metrics_are_open_on_loopback_by_default(listen: str, loopback: bool) -> None:
    assert RouterConfig(listen=listen, api_keys="k").metrics_are_open is loopback


@pytest.mark.parametrize(
    ("options", "plain", "capped"),
    [
        ({}, ("rdkv", 512), ("rocketkv", 512)),
        ({"default_retention": 0.7}, ("rdkv", None), ("rocketkv", 512)),
        ({"allowed_methods": "rdkv,snapkv,full"}, ("rdkv", 512), ("full", None)),
        ({"default_method": "snapkv"}, ("snapkv", 2048), ("snapkv", 2048)),
    ],
)
def test_a_default_that_does_not_go_with_the_model_is_replaced(
    options: dict[str, object], plain: tuple[str, int | None], capped: tuple[str, int | None]
) -> None:
    chooser = PlanChooser(RouterConfig(**options))  # type: ignore[arg-type]
    for expected, layers in ((plain, ()), (capped, (LayerSpec(), LayerSpec(has_plain_softmax=False)))):
        plan = chooser.default(replace(SPEC, layers=layers))
        assert (plan.method, plan.budget.tokens) == expected


def test_a_method_that_a_request_names_is_not_replaced() -> None:
    model = replace(SPEC, layers=(LayerSpec(has_plain_softmax=False),) * 2)
    wanted = KvCompression(method="rdkv", token_budget=9)
    chosen = PlanChooser(RouterConfig()).choose(wanted, (1, 2), model)
    assert asyncio.run(chosen).plan.method == "rdkv"  # and decode refuses it by name
