"""The playground in a real browser: a conversation over a document, by keyboard, on three processes."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

pytestmark = pytest.mark.xdist_group("stack")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on PATH")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=TIMEOUT_MS)
        yield running
        running.close()


@pytest.fixture
def page(browser, stack) -> Iterator[Page]:
    """The page, loaded and ready; it must log no error and ask nobody else for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(TIMEOUT_MS)
    opened = context.new_page()
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # The browser logs every answer that is an error, also those that the page expects and shows.
        if message.type == "error" and "Failed to load resource" not in message.text:
            problems.append(message.text)

    opened.on("console", note)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(f"{stack.base_url}/")
    expect(opened.locator("#ready")).to_have_text("ready", timeout=TIMEOUT_MS)
    expect(opened.locator("#model")).to_contain_text("context", timeout=TIMEOUT_MS)
    yield opened
    context.close()
    assert problems == []
    assert [url for url in asked if not url.startswith((stack.base_url, "data:"))] == []


def ask(page: Page, text: str) -> None:
    """Type and send, and wait for the turn's end."""
    count = page.locator("#turns tr").count()
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(page.locator("#turns tr")).to_have_count(count + 1, timeout=TIMEOUT_MS)
    expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT_MS)


def number(text: str) -> float:
    found = re.match(r"[\d.,]+", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


def test_a_conversation_over_a_document_by_keyboard_shows_what_each_turn_moved(page, make_document, stack):
    document = make_document(7, num_words=900)
    page.locator("#method").select_option("rocketkv")
    page.locator("#budget-kind").select_option("token_budget")
    page.locator("#budget").fill("128")
    page.locator("#max-tokens").fill("16")
    page.locator("#paste summary").press("Enter")
    page.locator("#document").fill(document.text)
    page.locator("#message").focus()
    ask(page, document.questions[0][0])
    ask(page, document.questions[1][0])

    expect(page.locator(".turn.user")).to_have_count(2)
    answers = page.locator(".turn.assistant > span:nth-of-type(2)")
    assert all(text.strip() for text in answers.all_text_contents())
    rows = [row.locator("td").all_text_contents() for row in page.locator("#turns tr").all()]
    assert [row[0] for row in rows] == ["rocketkv", "rocketkv"]
    assert number(rows[0][2]) == 0
    assert number(rows[1][2]) >= number(rows[0][1])  # all of turn 1's prompt is reused
    assert all(number(row[5]) > 1.5 for row in rows)  # full bytes over shipped bytes
    assert page.locator("#chart rect").count() == 4
    expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile("Turn 2: .* shipped of"))

    session = page.locator("#session").input_value()
    deadline_s = time.monotonic() + TIMEOUT_MS / 1000
    while (recorded := httpx.get(f"{stack.base_url}/v1/sessions/{session}", timeout=30).json()) and recorded[
        "turns"
    ] < 2:
        assert time.monotonic() < deadline_s, recorded  # a turn is recorded after its last chunk
        time.sleep(0.05)
    page.locator("#delete-session").click()
    expect(page.locator("#turns tr")).to_have_count(0)
    assert httpx.get(f"{stack.base_url}/v1/sessions/{session}", timeout=30).status_code == 404


def test_a_strip_shows_which_tokens_each_turn_kept(page, make_document):
    page.locator("#method").select_option("streamingllm")
    page.locator("#budget-kind").select_option("retention")
    page.locator("#budget").fill("0.25")
    page.locator("#max-tokens").fill("4")
    page.locator("#message").fill(make_document(8, num_words=500).text)
    page.locator("#message").focus()
    ask(page, " ")
    kept = [float(rect.get_attribute("fill-opacity")) for rect in page.locator(".strip rect").all()]
    assert len(kept) == 96
    assert kept[0] > 0  # sinks
    assert max(kept[5:60]) == 0
    assert min(kept[-20:]) == 1  # recents


def test_a_refused_request_says_why_and_gives_the_draft_back(page):
    page.locator("#budget-kind").select_option("token_budget")
    page.locator("#budget").fill("0")
    page.locator("#message").fill("hello")
    page.locator("#send").click()
    expect(page.locator("#error")).to_contain_text("token_budget")
    expect(page.locator("#message")).to_have_value("hello")
    expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_follows_the_system_s_theme(browser, stack, scheme):
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{stack.base_url}/", timeout=TIMEOUT_MS)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    red = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
    assert (red > 128) == (scheme == "light")
    page.locator("#theme").click()
    switched = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
    assert (switched > 128) != (scheme == "light")
    context.close()


def test_every_control_has_a_name(page):
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")]
            .filter((node) => !node.labels?.length && !node.ariaLabel && !node.textContent.trim())
            .map((node) => node.id)"""
    )
    assert unnamed == []


def test_the_example_ships_a_fraction_of_the_kv_and_is_answered_rightly(stack):
    example = httpx.get(f"{stack.base_url}/example", timeout=30).json()
    answer = httpx.post(f"{stack.base_url}/v1/chat/completions", json=example, timeout=120).json()
    assert answer["choices"][0]["message"]["content"].strip() == "6 5 6 3"
    assert "the pin of the golden station is 6 5 6 3 ." in example["messages"][0]["content"]
    assert 3 * answer["kv"]["shipped_bytes"] < answer["kv"]["full_bytes"]
    assert "reason" not in answer["kv"]
    short = {**example, "messages": [{"role": "user", "content": "what is the pin ?"}]}
    answer = httpx.post(f"{stack.base_url}/v1/chat/completions", json=short, timeout=120).json()
    assert (answer["kv"]["method"], answer["kv"]["reason"]) == (
        "full",
        "the budget of 128 tokens covers the prompt",
    )


def test_the_page_loads_the_example_and_shows_what_it_shipped(page):
    page.locator("#example").click()
    expect(page.locator("#message")).to_have_value("what is the pin of the golden station ?")
    expect(page.locator("#budget")).to_have_value("128")
    page.locator("#message").focus()
    ask(page, "")
    expect(page.locator(".turn.assistant")).to_contain_text("6 5 6 3")
    expect(page.locator(".facts")).to_contain_text("shipped")
    assert number(page.locator("#turns tr td").nth(5).text_content()) > 3
