"""mkdocs hooks: links of the pages to other files of the repository also work in the built site.

The pages link to `../proto/BLOCKS.md` or `../benchmarks/results/wire/`, so that they can be read in the
repository. mkdocs only knows files below docs/, so each linked file is added to the site under `repository/`
and the link is changed accordingly. A link to a folder leads to its README, or to a list of its files.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PREFIX = "repository"
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
_RELATIVE = re.compile(r"\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside docs/ that a page links to."""
    for page in files.documentation_pages():
        for target, _ in _LINK.findall(page.content_string):
            add(files, config, target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs/ lead to the copies."""
    if page.file.src_uri.startswith(PREFIX):
        return markdown
    up = "../" * page.file.src_uri.count("/")
    return _LINK.sub(lambda link: f"]({up}{PREFIX}/{site_path(link[1])}{link[2] or ''})", markdown)


def site_path(target: str) -> str:
    """Return where a file or folder of the repository is in the site; sources are shown as text."""
    path = ROOT / target
    if path.is_dir():
        return f"{target.rstrip('/')}/README.md"
    return target if path.suffix in (".md", ".png") else f"{target}.txt"


def add(files: Files, config: MkDocsConfig, target: str) -> None:
    """Add one file; for a folder its README, or a list of its files if it has none."""
    path, uri = ROOT / target, f"{PREFIX}/{site_path(target)}"
    if files.get_file_from_path(uri) is not None:
        return
    if path.is_dir():
        readme = path / "README.md"
        names = "\n".join(f"- {entry.name}" for entry in sorted(path.iterdir()))
        text = readme.read_text("utf-8") if readme.is_file() else f"# {path.name}\n\n{names}\n"
    elif path.suffix == ".png":
        files.append(File.generated(config, uri, content=path.read_bytes()))
        return
    else:
        text = path.read_text("utf-8")
    if uri.endswith(".md"):
        # The pages that copied pages link to are not copied, so these links are removed.
        text = _RELATIVE.sub("]", text)
    files.append(File.generated(config, uri, content=text))
