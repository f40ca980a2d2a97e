"""The playground in a real browser: what its tests share."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OTHER_HOST = "kvferry.test"
"""A name of this machine that a browser does not trust as it trusts loopback."""
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"),
    f"--host-resolver-rules=MAP {OTHER_HOST} 127.0.0.1",
]
TIMEOUT_MS = 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on PATH")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=TIMEOUT_MS)
        yield running
        running.close()


def toggle_settings(page: Page) -> None:
    page.locator("#settings > summary").click()


def ask(page: Page, text: str) -> None:
    """Type and send, and wait for the turn's end."""
    count = page.locator("#turns tr").count()
    page.locator("#message").focus()
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(page.locator("#turns tr")).to_have_count(count + 1, timeout=TIMEOUT_MS)
    expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT_MS)


def load_example(page: Page) -> None:
    page.locator("#example").click()
    expect(page.locator("#message")).not_to_have_value("", timeout=TIMEOUT_MS)


def compare(page: Page) -> None:
    """Run both methods on the draft or the last question."""
    page.locator("#compare").click()
    expect(page.locator(".comparison .kept")).to_have_count(2, timeout=TIMEOUT_MS)
    expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT_MS)


def number(text: str | None) -> float:
    found = re.match(r"[\d.,]+", text or "")
    assert found is not None, text
    return float(found[0].replace(",", ""))


def brightness(page: Page) -> int:
    """Return how light the page's background is, from 0 to 255."""
    return int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])


def assert_well_formed(page: Page) -> None:
    """The page is no wider than the window, and axe finds nothing in it."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    found = Axe().run(page).response["violations"]
    assert [f"{violation['id']}: {violation['nodes'][0]['html']}" for violation in found] == []
