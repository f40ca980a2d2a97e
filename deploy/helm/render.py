"""Renders the chart into plain manifests with Helm's own engine, from helm-python-sdk.

    python deploy/helm/render.py [FOLDER]      FOLDER: deploy/kubernetes

Run it after a change of the chart, and commit what it wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

HERE = Path(__file__).parent
CHART = HERE / "kvferry"
TARGET = HERE.parent / "kubernetes"
NAME, NAMESPACE = "kvferry", "kvferry"
VARIANTS: dict[str, dict[str, Any]] = {"gpu": {}, "cpu": {}}
"""By file; `cpu` has values-cpu.yaml."""
HEADER = "# Made by deploy/helm/render.py from deploy/helm/kvferry. kubectl apply --filename THIS-FILE\n"


def values_of(variant: str) -> dict[str, Any]:
    """The values that a variant changes."""
    file = CHART / f"values-{variant}.yaml"
    return dict(yaml.safe_load(file.read_text(encoding="utf-8"))) if file.exists() else {}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The chart's objects, in the order of their files.

    Raises: HelmRenderError: the chart refuses the values.
    """
    with Chart.load(CHART) as chart:
        rendered = chart.render(values, name=NAME, namespace=NAMESPACE)
    return [
        item
        for path in sorted(rendered)
        if path.endswith(".yaml")
        for item in yaml.safe_load_all(rendered[path])
        if item is not None
    ]


def manifest(values: dict[str, Any]) -> str:
    """One file with the namespace and every object."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    items = [namespace, *render(values)]
    for item in items[1:]:
        item["metadata"]["namespace"] = NAMESPACE
    return HEADER + "---\n".join(yaml.safe_dump(item, sort_keys=False, width=110) for item in items)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        (folder / f"{variant}.yaml").write_text(manifest(values_of(variant)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
