"""The store that a worker's settings ask for counts each missing history once, whichever tiers it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.server import build_store
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.history.host_memory import available_memory_bytes
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.telemetry.metrics import PrefillMetrics

SESSION = SessionKey(owner="o", session_id="s")


@pytest.mark.parametrize("tiers", [(), ("redis",), ("disk",), ("disk", "redis")], ids="-".join)
def test_a_session_that_no_tier_holds_is_one_miss(
    demo_model: LanguageModel, redis_server: Any, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    metrics = PrefillMetrics()
    options: dict[str, object] = {"history_redis": redis_server.socket_url} if "redis" in tiers else {}
    if "disk" in tiers:
        options |= {"history_disk": str(tmp_path / "kv"), "history_disk_bytes": 1 << 20}
    store = build_store(PrefillConfig(**options), spec=demo_model.spec, metrics=metrics)  # type: ignore[arg-type]
    assert set(store.tier_bytes) == {"memory", *tiers}
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


def test_without_a_size_a_quarter_of_the_available_memory_is_for_history(demo_model: LanguageModel) -> None:
    chosen = build_store(PrefillConfig(), spec=demo_model.spec, metrics=PrefillMetrics())
    assert 0.1 < chosen.max_bytes / available_memory_bytes() < 0.5
    given = build_store(PrefillConfig(history_bytes=5000), spec=demo_model.spec, metrics=PrefillMetrics())
    assert given.max_bytes == 5000


@pytest.mark.parametrize("options", [{"history_disk": "kv"}, {"history_disk_bytes": 1 << 30}])
def test_a_folder_without_a_limit_and_a_limit_without_a_folder_store_nothing_on_disk(
    demo_model: LanguageModel, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = build_store(PrefillConfig(**options), spec=demo_model.spec, metrics=PrefillMetrics())
    assert set(store.tier_bytes) == {"memory"}
    assert not list(tmp_path.iterdir())
