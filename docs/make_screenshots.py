"""Takes the pictures of the playground: a real conversation with the demo model in headless Chromium.

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
FILLER = "the old sailor painted the quiet bridge . the young doctor visited the green market . "
DOCUMENT = (
    f"{FILLER * 12}remember that the pin of the red castle is 4 2 7 1 . {FILLER * 9}"
    f"the access code of the blue lighthouse is 9 0 5 3 . {FILLER * 12}"
)
QUESTIONS = (
    "what is the access code of the blue lighthouse ?",
    "what is the pin of the red castle ?",
    "what is the access code of the blue lighthouse ?",
)


def converse(page: Page) -> None:
    """Paste the document, ask each question and wait for its answer."""
    expect(page.locator("#ready")).to_have_text("ready", timeout=TIMEOUT_MS)
    page.locator("#budget-kind").select_option("token_budget")
    page.locator("#budget").fill("128")
    page.locator("#max-tokens").fill("16")
    page.locator("#paste summary").click()
    page.locator("#document").fill(DOCUMENT)
    for turn, question in enumerate(QUESTIONS, start=1):
        page.locator("#message").fill(question)
        page.locator("#send").click()
        expect(page.locator("#turns tr")).to_have_count(turn, timeout=TIMEOUT_MS)
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
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.goto(f"http://{address}/")
                converse(page)
                page.screenshot(path=folder / "playground.png")
                page.emulate_media(color_scheme="dark")
                page.set_viewport_size({"width": 390, "height": 844})
                page.screenshot(path=folder / "playground-phone.png", full_page=True)
                browser.close()
            finally:
                server.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
