"""Checks objects of operators by models that are made from their CRDs, in the environment of `make policies`.

    python operator_models.py FILE...      one line of JSON for each object: its kind, name and what is wrong

A model alone ignores a field that it does not know, so what it has read is compared with what was given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from cloudcoil.models.cert_manager.v1 import Certificate, Issuer
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

MODELS = {
    model.__name__: model for model in (Certificate, Issuer, PrometheusRule, ScaledObject, ServiceMonitor)
}


def problem(item: dict[str, Any]) -> str:
    """What is wrong with an object; empty where nothing is."""
    try:
        read = MODELS[item["kind"]].model_validate(item)
    except ValueError as error:
        return str(error)
    known = json.loads(read.model_dump_json(by_alias=True, exclude_unset=True))
    unknown = unread(item["spec"], known["spec"], "spec")
    return f"unknown fields: {', '.join(unknown)}" if unknown else ""


def unread(given: Any, read: Any, where: str) -> list[str]:
    """Paths of fields that were given and not read."""
    if isinstance(given, dict):
        return [
            path
            for name, value in given.items()
            for path in (
                unread(value, read[name], f"{where}.{name}") if name in read else [f"{where}.{name}"]
            )
        ]
    if isinstance(given, list):
        return [path for pair in zip(given, read, strict=True) for path in unread(*pair, where)]
    return []


def main() -> None:
    for file in sys.argv[1:]:
        for item in yaml.safe_load_all(Path(file).read_text(encoding="utf-8")):
            if item["kind"] in MODELS:
                found = {"kind": item["kind"], "name": item["metadata"]["name"], "problem": problem(item)}
                sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
