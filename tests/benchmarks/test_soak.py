"""What the soak says of a figure: whether it grows."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def soak():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import soak

        yield soak
        sys.modules.pop("soak")


@pytest.mark.parametrize(("per_minute", "grows"), [(0.0, False), (0.02, False), (3.0, True), (-3.0, False)])
def test_a_slope_is_told_from_noise_and_from_a_full_cache(soak, per_minute, grows):
    rng, series = random.Random(1), soak.Series()
    for tick in range(900):
        minutes = tick / 30
        filling = min(minutes, 5.0) * 40
        value = 500 + filling + per_minute * minutes + rng.gauss(0, 2)
        series.add(minutes * 60, {"rss_mib": value})
    found = soak.judged({"decode-0": series})["decode-0"]["rss_mib"]
    assert found["grows"] is grows
    assert found["per_hour"] == pytest.approx(60 * per_minute, abs=3)


def test_a_run_too_short_for_blocks_says_nothing(soak):
    series = soak.Series()
    series.add(0.0, {"fds": 3.0})
    assert soak.judged({"r": series})["r"]["fds"]["grows"] is False


def test_this_process_has_figures(soak):
    import os

    figures = soak.read_process(os.getpid())
    assert figures["rss_mib"] > 10
    assert figures["threads"] >= 1
    assert figures["fds"] >= 3
