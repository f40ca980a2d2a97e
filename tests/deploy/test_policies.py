"""The rendered manifests before checkov's policies, and the operators' objects before models of their CRDs.

Both tools are in the environment that `make policies` makes. Exceptions are in deploy/policy-exceptions.toml.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
TOOLS = REPOSITORY / ".venv-policies" / "bin"
MODELS = Path(__file__).with_name("operator_models.py")
EXCEPTIONS = tomllib.loads((REPOSITORY / "deploy" / "policy-exceptions.toml").read_text(encoding="utf-8"))
VALUES: dict[str, dict[str, Any]] = {
    "gpu": {},
    "cert-manager": {"certs": {"from": "cert-manager"}},
    "keda": {"autoscaling": {"kind": "keda"}},
    "disk": {"prefill": {"historyDisk": "100Gi"}, "models": {"existingClaim": "models"}},
}

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (TOOLS / "checkov").exists(), reason="checkov is not installed; make policies"),
]


def run(*command: str | Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={**variables, "LOG_LEVEL": "ERROR"},
    )
    assert done.stdout, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for each of the values."""
    spec = importlib.util.spec_from_file_location("render", REPOSITORY / "deploy" / "helm" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    folder = tmp_path_factory.mktemp("manifests")
    for name, values in VALUES.items():
        (folder / f"{name}.yaml").write_text(render.manifest(values), encoding="utf-8")
    return folder


def test_checkov_finds_what_the_exceptions_name_and_no_more(manifests: Path) -> None:
    options = ("--framework", "kubernetes", "--compact", "--quiet", "--skip-download", "--output", "json")
    result = json.loads(run(TOOLS / "checkov", "--directory", manifests, *options))
    assert result["summary"]["parsing_errors"] == 0
    assert result["summary"]["passed"] > 1000
    found: dict[str, set[str]] = {}
    for check in result["results"]["failed_checks"]:
        # Deployment.kvferry.kvferry-router, and for its pods Pod.kvferry.kvferry-router.LABELS
        workload = check["resource"].split(".")[2].removeprefix("kvferry-")
        found.setdefault(check["check_id"], set()).add(workload)
    assert found == {name: set(exception["workloads"]) for name, exception in EXCEPTIONS.items()}
    for name, exception in EXCEPTIONS.items():
        assert len(exception["reason"]) > 40, name


def test_objects_of_operators_have_fields_that_their_crds_know(manifests: Path) -> None:
    found = [json.loads(line) for line in run(TOOLS / "python", MODELS, *manifests.iterdir()).splitlines()]
    assert {entry["kind"] for entry in found} == {
        "Certificate", "Issuer", "PrometheusRule", "ScaledObject", "ServiceMonitor",
    }  # fmt: skip
    assert not [entry for entry in found if entry["problem"]]


def test_the_models_refuse_what_is_wrong_or_unknown(manifests: Path, tmp_path: Path) -> None:
    items = [*yaml.safe_load_all((manifests / "keda.yaml").read_text(encoding="utf-8"))]
    scaled, other = (item for item in items if item["kind"] == "ScaledObject")
    scaled["spec"]["triggers"][0]["metdata"] = {}
    other["spec"]["triggers"] = "many"
    spoilt = tmp_path / "spoilt.yaml"
    spoilt.write_text(yaml.safe_dump_all([scaled, other]), encoding="utf-8")
    first, second = (
        json.loads(line)["problem"] for line in run(TOOLS / "python", MODELS, spoilt).splitlines()
    )
    assert first == "unknown fields: spec.triggers.metdata"
    assert "triggers" in second
