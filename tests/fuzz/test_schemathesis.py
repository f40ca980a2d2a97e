"""Requests that schemathesis makes from the router's own OpenAPI document get answers that the document has.

schemathesis has an environment of its own, because it pins packages that the services have in other versions;
`make schemathesis` makes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kvtest.router import _quiet_logs as _quiet_logs
from kvtest.router import base_url as base_url
from kvtest.router import tokenizer as tokenizer

COMMAND = os.environ.get("SCHEMATHESIS_COMMAND") or shutil.which("schemathesis")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(COMMAND is None, reason="schemathesis is missing; make schemathesis installs it"),
]


def test_no_request_of_schemathesis_gets_an_answer_that_the_document_lacks(
    base_url: str, tmp_path: Path
) -> None:
    assert COMMAND is not None
    options = [
        *("run", f"{base_url}/openapi.json", "--phases", "examples,coverage,fuzzing"),
        *("--checks", ",".join(CHECKS), "--max-examples", "5", "--seed", "1", "--generation-deterministic"),
        *("--request-timeout", "20", "--no-color", "--no-shrink"),
        *("--header", "Authorization: Bearer key-a", "--warnings", "off", "--continue-on-failure"),
    ]
    done = subprocess.run(
        [COMMAND, *options], capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
