"""Takes the pictures of the playground: the example, asked of the demo model in headless Chromium.

python docs/make_screenshots.py docs/images
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

TIMEOUT_MS = 60_000
QUESTIONS = (
    "what is the access code of the golden bridge ?",
    "what is the magic number of the green library ?",
)


def ask(page: Page, turn: int) -> None:
    page.locator("#send").click()
    expect(page.locator("#turns tr")).to_have_count(turn, timeout=TIMEOUT_MS)
    expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT_MS)


def converse(page: Page) -> None:
    """Ask the example's question, then others about its document."""
    expect(page.locator("#ready")).to_have_text("ready", timeout=TIMEOUT_MS)
    page.locator("#example").click()
    expect(page.locator("#message")).not_to_have_value("", timeout=TIMEOUT_MS)
    ask(page, 1)
    for turn, question in enumerate(QUESTIONS, start=2):
        page.locator("#message").fill(question)
        ask(page, turn)


def compare(page: Page) -> None:
    """Compare two methods on the example's question."""
    page.locator("#new-session").click()
    page.locator("#example").click()
    expect(page.locator("#message")).not_to_have_value("", timeout=TIMEOUT_MS)
    page.locator("#compare").click()
    expect(page.locator(".comparison .kept")).to_have_count(2, timeout=TIMEOUT_MS)
    expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT_MS)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        ready = Path(scratch, "ready.json")
        command = [
            str(Path(sys.executable).with_name("kvferry")),
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--ready-file",
            str(ready),
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                while not ready.exists():
                    assert server.poll() is None, "kvferry serve ended"
                    time.sleep(0.1)
                address = json.loads(ready.read_text())["address"]
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
                )
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                page.goto(f"http://{address}/")
                converse(page)
                page.screenshot(path=folder / "playground.png")
                compare(page)
                page.screenshot(path=folder / "playground-comparison.png")
                page.emulate_media(color_scheme="dark")
                page.set_viewport_size({"width": 390, "height": 844})
                page.reload()
                expect(page.locator("#ready")).to_have_text("ready", timeout=TIMEOUT_MS)
                expect(page.locator("#turns tr")).to_have_count(3)
                page.screenshot(path=folder / "playground-phone.png", full_page=True)
                browser.close()
            finally:
                server.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
