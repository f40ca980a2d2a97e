"""Prints a CycloneDX bill of materials of the image that it runs in.

Python distributions come from their metadata, Debian packages from dpkg's database. Run at image build by
the environment's interpreter; knows nothing of what was only in earlier stages.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from urllib.parse import quote


def python_components() -> list[dict[str, object]]:
    """One component for each distribution that this interpreter finds."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        purl = f"pkg:pypi/{name}@{quote(distribution.version)}"
        component: dict[str, object] = {
            "type": "library", "bom-ref": purl, "name": name, "version": distribution.version, "purl": purl,
        }  # fmt: skip
        if expression := distribution.metadata.get("License-Expression"):
            component["licenses"] = [{"expression": expression}]
        found[purl] = component
    return list(found.values())


def debian_components() -> list[dict[str, object]]:
    """One component for each installed package of the base."""
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\n"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    distribution = platform.freedesktop_os_release()["ID"]
    components: list[dict[str, object]] = []
    for line in listed.splitlines():
        name, version, architecture = line.split("\t")
        purl = f"pkg:deb/{distribution}/{name}@{quote(version)}?arch={architecture}"
        components.append(
            {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        )
    return components


def bill_of_materials() -> dict[str, object]:
    """The document; see https://cyclonedx.org/docs/1.5/json/."""
    version = metadata.version("kvferry")
    components = [*debian_components(), *python_components()]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "kvferry", "version": version}},
        "components": sorted(components, key=lambda component: str(component["purl"])),
    }


if __name__ == "__main__":
    json.dump(bill_of_materials(), sys.stdout, indent=1)
    sys.stdout.write("\n")
