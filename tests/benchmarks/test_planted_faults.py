"""The faults that are planted to test the tests fit the sources, and the committed run caught them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvtest.planted_faults import MAX_MISSED, PLANTED_FAULTS, PlantedFault, plant

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "planted-faults" / "latest.json"
PRODUCT = ("kernels", "services", "shared")
NUM_KNOWN = 9
MIN_OTHERS = 14

every_fault = pytest.mark.parametrize("fault", PLANTED_FAULTS, ids=lambda fault: fault.name)


def copied(fault: PlantedFault, folder: Path) -> Path:
    """The fault's file in a folder that has nothing else."""
    path = folder / fault.path
    path.parent.mkdir(parents=True)
    return Path(shutil.copyfile(ROOT / fault.path, path))


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    assert RESULT.exists(), f"run benchmarks/planted_faults.py, which writes {RESULT.relative_to(ROOT)}"
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


@every_fault
def test_a_planted_file_still_compiles(fault: PlantedFault, tmp_path: Path) -> None:
    path = copied(fault, tmp_path)
    before = path.read_text(encoding="utf-8")
    plant(tmp_path, fault)
    after = path.read_text(encoding="utf-8")
    assert before.count(fault.old) == 1
    assert after == before.replace(fault.old, fault.new) != before
    compile(after, fault.path, "exec")


@every_fault
def test_a_fault_is_in_the_product_and_has_tests_near_it(fault: PlantedFault) -> None:
    assert Path(fault.path).parts[0] in PRODUCT
    assert fault.near
    assert all((ROOT / path).exists() for path in fault.near), fault.near
    assert all(path.startswith("tests/") for path in fault.near), fault.near


@pytest.mark.parametrize(("old", "count"), [("no such text\n", 0), ("import", 2)])
def test_a_text_that_does_not_stand_there_once_is_refused(old: str, count: int, tmp_path: Path) -> None:
    fault = replace(PLANTED_FAULTS[0], old=old)
    path = copied(fault, tmp_path)
    path.write_text("import json\nimport os\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{fault.name}.* stands {count} times in {fault.path}"):
        plant(tmp_path, fault)
    assert path.read_text(encoding="utf-8") == "import json\nimport os\n"


def test_there_are_faults_of_every_known_kind_and_others() -> None:
    assert len({fault.name for fault in PLANTED_FAULTS}) == len(PLANTED_FAULTS)
    assert sum(fault.known for fault in PLANTED_FAULTS) == NUM_KNOWN
    assert len(PLANTED_FAULTS) >= NUM_KNOWN + MIN_OTHERS


def test_the_committed_run_planted_every_fault(result: dict[str, Any]) -> None:
    listed = [(tried["name"], tried["what"], tried["known"]) for tried in result["faults"]]
    assert listed == [(fault.name, fault.what, fault.known) for fault in PLANTED_FAULTS]
    assert result["planted"] == len(listed)
    assert result["caught"] == sum(tried["caught"] for tried in result["faults"])


def test_the_committed_run_caught_every_known_fault_and_nearly_all_others(result: dict[str, Any]) -> None:
    missed = [tried for tried in result["faults"] if not tried["caught"]]
    assert not [tried["name"] for tried in missed if tried["known"]]
    assert len(missed) <= MAX_MISSED
    assert all(tried["by"].startswith("tests/") for tried in result["faults"] if tried["caught"])
