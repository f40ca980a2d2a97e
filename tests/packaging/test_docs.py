"""The documents stay true: what is generated is current, what they link to and name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvtest.lanes import some

from kvferry.services.launcher import other_servers
from kvferry.services.launcher.cli import command_line
from kvferry.services.launcher.config import CONFIGS, HIDDEN_FROM_SERVE, ServeConfig
from kvferry.shared.device.kernel_paths import KernelQuarantine
from kvferry.shared.process.command_line import option_name, variable_name
from kvferry.shared.telemetry.metrics import DecodeMetrics, PrefillMetrics, RouterMetrics
from kvferry.tools.caches.model import ATTENTION_NAME
from kvferry.tools.evaluation.config import HIDDEN_OPTIONS, EvalConfig

REPOSITORY = Path(__file__).parents[2]
# A proxy that refuses connections: a build that fetched anything would fail.
OFFLINE = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
OFFLINE["NO_MKDOCS_2_WARNING"] = "1"
FOREIGN_FLAGS = {
    *("--host", "--port", "--kv-transfer-config"),
    *(*other_servers._SAME, *other_servers._NEEDLESS, *other_servers._DECIDED, *other_servers._REFUSED),
}
"""Of vLLM and llama.cpp, which docs/coming-from-vllm.md explains."""
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", some(["api", "configuration", "models"], "api", "configuration"))
def test_a_reference_is_what_its_command_writes(tmp_path, page):
    made = tmp_path / f"{page}.md"
    command = [sys.executable, str(REPOSITORY / "docs" / f"make_{page}.py"), str(made)]
    subprocess.run(command, check=True, timeout=800)
    assert made.read_text() == (REPOSITORY / "docs" / f"{page}.md").read_text(), (
        f"run docs/make_{page}.py docs/{page}.md"
    )


def test_the_configuration_page_lists_every_option_of_every_command():
    text = (REPOSITORY / "docs" / "configuration.md").read_text()
    hidden = {"decode": set(), "serve": HIDDEN_FROM_SERVE, "eval": HIDDEN_OPTIONS}
    settings = {"decode": CONFIGS["decode"], "serve": ServeConfig, "eval": EvalConfig}
    for command, config in settings.items():
        for field in config.model_fields.keys() - hidden[command]:
            row = rf"^\| `{option_name(field)}` \| [^|]*\b{command}\b[^|]* \| `{variable_name(field)}` \|"
            assert re.search(row, text, re.MULTILINE), (command, field)


def test_the_site_builds_without_a_warning(tmp_path):
    """`--strict`: every page is in the navigation, every link and anchor leads somewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=800, env=os.environ | OFFLINE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    navigation = re.findall(r"^ +- [^:]+: (\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(page.name for page in (REPOSITORY / "docs").glob("*.md"))
    built = list((tmp_path / "site").rglob("*.html"))
    assert len(built) >= len(navigation)
    # A page of the site may load its own files only.
    loaded = (
        r"<(?:script|img)[^>]+src=\"([^\"]+)"
        r"|<link[^>]+rel=\"(?:stylesheet|preconnect|icon)\"[^>]+href=\"([^\"]+)"
    )
    for page in built:
        for found in re.findall(loaded, page.read_text(encoding="utf-8")):
            assert not "".join(found).startswith(("http", "//")), page


def anchors(page: Path) -> set[str]:
    """What links into a page may end with: its headings, and places that it marks."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    named = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize(
    "document", ["CHANGELOG.md", "SECURITY.md", "deploy/README.md", "examples/README.md"]
)
def test_links_into_the_pages_lead_somewhere(document):
    """Of what is not a page itself: places that have moved are still found."""
    for name, anchor in re.findall(r"docs/([\w-]+\.md)#([\w-]+)", (REPOSITORY / document).read_text()):
        assert anchor in anchors(REPOSITORY / "docs" / name), (name, anchor)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_in_code_spans_exist(page):
    spans = re.findall(
        r"`((?:services|tools|shared|kernels|proto|models|tests|docs|deploy|benchmarks)/[^`\s]*)`",
        page.read_text(),
    )
    for span in spans:
        for path in expanded(span):
            assert list(REPOSITORY.glob(path)) or "<" in path, span


def expanded(span: str) -> list[str]:
    """`a/{b,c}.py` as a shell has it."""
    found = re.search(r"\{([^}]*)\}", span)
    if found is None:
        return [span.rstrip("/")]
    return [span.replace(found[0], name) for name in found[1].split(",")]


def test_options_and_metrics_of_the_documents_exist():
    options = {option_name(field) for settings in command_line.known for field in settings.model_fields}
    options.add("--json")  # of kvferry doctor; a setting cannot be named so
    options.add("--shared-memory")  # of benchmarks/links.py
    options.add("--write")  # of kvferry launch
    options |= {"--known", "--unknown"}  # of benchmarks/kvpress_peer.py
    options |= FOREIGN_FLAGS
    names = {
        sample
        for metrics in (RouterMetrics(), PrefillMetrics(), DecodeMetrics())
        for family in metrics.registry.collect()
        for sample in (family.name, f"{family.name}_total")
    }
    names |= {family.name for family in KernelQuarantine("decode").collect()} | {ATTENTION_NAME}
    for page in (REPOSITORY / "docs").glob("*.md"):
        text = page.read_text()
        assert set(re.findall(r"`(--[a-z-]+)", text)) <= options, page.name
        assert set(re.findall(r"kvferry_\w+", text)) <= names, page.name
