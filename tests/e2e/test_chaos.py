"""Chaos in small: seeded faults between and in real processes; `benchmarks/chaos.py` runs more of it.

The last tests plant a fault in a service, which the same judgement must find.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtest.chaos.cluster import running
from kvtest.chaos.faults import Only
from kvtest.chaos.run import Report, run_round
from kvtest.chaos.script import METHODS, Script, make_script
from kvtest.lanes import is_whole

from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer

pytestmark = pytest.mark.timeout(1200)

NUM_FAULTS, ALL_FAULTS = 15, 300
MAX_ROUNDS = 60
FIRST_SEED = 1
MAX_TOKENS = (12, 24, 48)
PLANTED_ROUNDS, PLANTED_PATIENCE_S = 6, 20.0


@pytest.fixture(scope="module")
def scripts(demo_model_dir: Path) -> list[Script]:
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    tokenizer = ChatTokenizer.load(demo_model_dir)
    return [
        make_script(number, method, model, tokenizer, max_tokens=MAX_TOKENS[number % len(MAX_TOKENS)])
        for number, method in enumerate(METHODS)
    ]


async def test_every_request_ends_right_or_by_name_whatever_strikes(
    scripts: list[Script], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    report, num_faults = Report(), ALL_FAULTS if is_whole(pytestconfig) else NUM_FAULTS
    async with running(tmp_path) as cluster:
        for seed in range(FIRST_SEED, FIRST_SEED + MAX_ROUNDS):
            await run_round(cluster, scripts, seed, report)
            assert not report.outcome.violations, (seed, report.as_json())
            if report.num_faults >= num_faults:
                break
    assert report.num_faults >= num_faults, report.as_json()
    assert report.outcome.right > report.conversations


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "planted", "only", "found"),
    [
        ("decode", "leak", Only(kind="cut", phase="http"), "arena"),
        # Other signs and, of float32, half or twice the size: no row is left as it was, and none is infinite.
        ("decode", "skipped_checksum", Only(kind="flip", phase="blocks", size=65536, bits=0x80), "wrong"),
        ("decode", "wrong_generation", Only(kind="delay", phase="control"), "wrong"),
        ("router", "dropped_token", Only(kind="delay", phase="control"), "wrong"),
    ],
)
async def test_a_planted_fault_is_found(
    scripts: list[Script], tmp_path: Path, role: str, planted: str, only: Only, found: str
) -> None:
    report = Report()
    async with running(tmp_path, {role: planted}, num_each=1) as cluster:
        for seed in range(PLANTED_ROUNDS):
            await run_round(cluster, scripts, seed, report, only=only, patience_s=PLANTED_PATIENCE_S)
            if any(found in violation for violation in report.outcome.violations):
                return
    raise AssertionError(f"nobody noticed {planted}: {report.as_json()}")
