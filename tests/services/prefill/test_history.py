"""The store that a worker's settings ask for counts each missing history once, whichever tiers it has."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.history import build_store
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.interface import LanguageModel

SESSION = SessionKey(owner="o", session_id="s")


@pytest.mark.parametrize("with_redis", [False, True])
def test_a_session_that_no_tier_holds_is_one_miss(
    demo_model: LanguageModel, redis_server: Any, with_redis: bool
) -> None:
    metrics = PrefillMetrics()
    options = {"history_redis": redis_server.socket_url} if with_redis else {}
    store = build_store(PrefillConfig(**options), spec=demo_model.spec, metrics=metrics)  # type: ignore[arg-type]
    try:
        for number, has_history in enumerate((False, True)):
            store.begin(SESSION, "r", (1, 2, 3), has_history=has_history).abort()
            misses = {
                sample.labels["reason"]: sample.value
                for family in metrics.history_miss.collect()
                for sample in family.samples
                if sample.name.endswith("_total")
            }
            assert misses == ({"absent": 1} if number else {})
    finally:
        store.close()
