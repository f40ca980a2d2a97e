"""The playground in a real browser: a conversation over a document, by keyboard, on three processes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvtest.playground import (
    TIMEOUT_MS,
    ask,
    assert_well_formed,
    brightness,
    compare,
    load_example,
    number,
    toggle_settings,
)
from kvtest.playground import browser as browser
from kvtest.stack import Stack, serving
from kvtest.text_models import HERMES, make_text_model
from playwright.sync_api import ConsoleMessage, Page, Route, expect


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


def test_a_conversation_over_a_document_by_keyboard_shows_what_each_turn_moved(page, make_document, stack):
    document = make_document(7, num_words=900)
    page.locator("#settings > summary").press("Enter")
    page.locator("#method").select_option("rocketkv")
    page.locator("#budget-kind").select_option("token_budget")
    page.locator("#budget").fill("128")
    page.locator("#max-tokens").fill("16")
    page.locator("#paste summary").press("Enter")
    page.locator("#document").fill(document.text)
    ask(page, document.questions[0][0])
    ask(page, document.questions[1][0])

    expect(page.locator(".turn.user")).to_have_count(2)
    answers = page.locator(".turn.assistant .body")
    assert all(text.strip() for text in answers.all_text_contents())
    rows = [row.locator("td").all_text_contents() for row in page.locator("#turns tr").all()]
    assert [row[0] for row in rows] == ["rocketkv", "rocketkv"]
    assert number(rows[0][2]) == 0
    assert number(rows[1][2]) >= number(rows[0][1])  # all of turn 1's prompt is reused
    # full bytes, of the checkpoint's float16, over those shipped in float32
    assert all(number(row[5]) > 0.75 for row in rows)
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
    toggle_settings(page)
    page.locator("#method").select_option("streamingllm")
    page.locator("#budget-kind").select_option("retention")
    page.locator("#budget").fill("0.25")
    page.locator("#max-tokens").fill("4")
    page.locator("#message").fill(make_document(8, num_words=500).text)
    ask(page, " ")
    kept = [float(rect.get_attribute("fill-opacity")) for rect in page.locator(".strip rect").all()]
    assert len(kept) == 96
    assert kept[0] > 0  # sinks
    assert max(kept[5:60]) == 0
    assert min(kept[-20:]) == 1  # recents


def test_a_refused_request_says_why_and_gives_the_draft_back(page):
    toggle_settings(page)
    page.locator("#budget-kind").select_option("token_budget")
    page.locator("#budget").fill("0")
    page.locator("#message").fill("hello")
    page.locator("#send").click()
    expect(page.locator("#error")).to_contain_text("token_budget")
    expect(page.locator("#message")).to_have_value("hello")
    expect(page.locator(".turn")).to_have_count(0)


MARKDOWN = (
    "# Title\n\n- one **bold**\n- `code`\n\n```\n<b>no element</b>\n```\n[x](javascript:alert(1)) <img src=x>"
)


def test_everything_that_people_keep_it_open_for(page, make_document, stack):
    """System prompt, documents, copy, two methods side by side, a reload, the list, markdown, tool calls."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    document = make_document(11, num_words=400)
    toggle_settings(page)
    page.locator("#instructions summary").click()
    page.locator("#system").fill("you are a helpful assistant .")
    page.locator("#paste summary").click()
    page.locator("#document").fill(document.text)
    page.locator("#store-document").click()
    expect(page.locator("#documents input:checked")).to_have_count(1)
    page.locator("#max-tokens").fill("8")
    ask(page, document.questions[0][0])
    answer = page.locator(".turn.assistant .body").inner_text().strip()
    assert answer == document.questions[0][1]
    page.locator(".turn.assistant .copy").click()
    expect(page.locator(".turn.assistant .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").strip() == answer
    session = page.locator("#session").input_value()
    prompt = httpx.get(f"{stack.base_url}/v1/sessions/{session}/export", timeout=30).json()
    assert prompt["messages"][0] == {"role": "system", "content": "you are a helpful assistant ."} | {
        name: "" for name in prompt["messages"][0].keys() - {"role", "content"}
    }
    assert document.text in prompt["preamble"]

    # Two methods on the last question: the bytes, the first token, and the layers that keep a word.
    page.locator("#method").select_option("full")
    page.locator("#other-method").select_option("streamingllm")
    page.locator("#budget-kind").select_option("retention")
    page.locator("#budget").fill("0.25")
    compare(page)
    expect(page.locator(".comparison .facts").nth(1)).to_contain_text("first token after")
    words = page.locator(".comparison section").nth(1).locator(".words")
    told = page.locator(".comparison section").nth(1).locator(".told")
    words.locator("span").first.hover()
    expect(told).to_contain_text("4 of 4 layers keep it: 0\u20133")
    words.locator("span").nth(200).hover()
    expect(told).to_contain_text("no layer keeps it")
    words.press("ArrowRight")
    expect(words.locator(".shown")).to_have_attribute("data-token", "201")
    full = page.locator(".comparison section").nth(0)
    full.locator(".words span").nth(200).hover()
    expect(full.locator(".told")).to_contain_text("4 of 4 layers keep it")

    # It is all there after a reload, and the next turn continues it.
    page.reload()
    expect(page.locator("#model")).to_contain_text("context", timeout=TIMEOUT_MS)
    expect(page.locator(".turn.assistant .body")).to_have_text(answer)
    expect(page.locator("#turns tr")).to_have_count(1)
    expect(page.locator("#system")).to_have_value("you are a helpful assistant .")
    listed = page.locator(f"#conversations button[data-id='{session}']")
    expect(listed).to_have_attribute("aria-current", "true")
    ask(page, document.questions[1][0])
    assert number(page.locator("#turns tr").nth(1).locator("td").nth(2).text_content()) > 400

    # Another conversation begins empty, and the list leads back. So it does to one of another browser.
    page.locator("#new-session").click()
    expect(page.locator(".turn")).to_have_count(0)
    listed.click()
    expect(page.locator(".turn")).to_have_count(4)
    page.evaluate("localStorage.clear()")
    page.reload()
    expect(page.locator("#model")).to_contain_text("context", timeout=TIMEOUT_MS)
    expect(page.locator(".turn")).to_have_count(0)
    listed.click()
    expect(page.locator(".turn")).to_have_count(5)  # with the system prompt

    # What a model with tools and markdown writes.
    shown = page.evaluate(
        """([content, calls]) => {
            begin();
            conversation.messages.push({ role: "assistant", content, calls });
            showConversation();
            return document.querySelector(".turn .body").innerHTML;
        }""",
        [MARKDOWN, [{"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]],
    )
    assert "<li>one <strong>bold</strong></li><li><code>code</code></li>" in shown
    assert "&lt;b&gt;no element&lt;/b&gt;" in shown
    assert "<img" not in shown
    assert "href" not in shown
    assert "calls look_up({})" in shown
    expect(page.locator("#message")).to_have_attribute("placeholder", "Result of look_up({})")
    toggle_settings(page)
    page.locator("#instructions summary").click()
    page.locator("#tools").fill("no JSON")
    page.locator("#message").fill("a result")
    page.locator("#send").click()
    expect(page.locator("#error")).to_contain_text("The tools are no JSON")


def assert_axe_content(page: Page) -> None:
    """At both widths and in both themes."""
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 860})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert (brightness(page) > 128) == (scheme == "light")
            assert_well_formed(page)


def test_compression_is_seen_within_thirty_seconds_of_opening(page, stack):
    begin_s = time.monotonic()
    page.goto(f"{stack.base_url}/")
    load_example(page)
    compare(page)
    expect(page.locator(".comparison .kept").last).to_be_visible(timeout=TIMEOUT_MS)
    assert time.monotonic() - begin_s < 30


@pytest.fixture(scope="module")
def tools_stack(tmp_path_factory) -> Iterator[Stack]:
    """A model whose chat template has tools, as Hermes writes them."""
    folder = make_text_model(tmp_path_factory.mktemp("tools"), template=HERMES)
    with serving("--model", str(folder), "--model-name", "tools", "--in-process") as running:
        yield running


def test_a_streamed_call_is_shown_and_its_result_sent_back(browser, tools_stack):
    cities = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": cities}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    asked: list[dict[str, Any]] = []

    def demand(route: Route) -> None:
        """The random model calls because it must; what it streams is its own."""
        body = json.loads(route.request.post_data or "")
        asked.append(body)
        more = {"tool_choice": named, "seed": 3} if len(asked) == 1 else {}
        route.continue_(post_data=json.dumps({**body, **more}))

    context = browser.new_context()
    page = context.new_page()
    page.route("**/v1/chat/completions", demand)
    page.goto(f"{tools_stack.base_url}/", timeout=TIMEOUT_MS)
    expect(page.locator("#model")).to_contain_text("context", timeout=TIMEOUT_MS)
    toggle_settings(page)
    page.locator("#instructions summary").click()
    page.locator("#tools").fill(json.dumps([tool]))
    page.locator("#max-tokens").fill("200")
    ask(page, "weather?")
    shown = page.locator(".turn.assistant .call").inner_text()
    found = re.fullmatch(r"calls get_weather\((.*)\)", shown, re.DOTALL)
    assert found is not None, shown
    assert json.loads(found[1])["city"] in ("Paris", "Rome")
    expect(page.locator("#message")).to_have_attribute("placeholder", re.compile("Result of get_weather"))
    assert page.locator("#turns tr td").nth(9).inner_text() == "ended with a call"
    page.locator("#max-tokens").fill("4")
    ask(page, "sunny")
    expect(page.locator(".turn.assistant .notice")).to_contain_text("cut at the limit of 4 tokens")
    expect(page.locator(".turn.tool .body")).to_have_text("sunny")
    call, result = asked[1]["messages"][-2:]
    assert call["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": found[1]}
    assert result == {"role": "tool", "content": "sunny", "tool_call_id": call["tool_calls"][0]["id"]}
    context.close()


def test_axe_finds_nothing_to_object_to(page):
    assert_axe_content(page)
    load_example(page)
    compare(page)
    ask(page, "")
    toggle_settings(page)
    page.locator("#instructions summary").click()
    assert_axe_content(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_follows_the_system_s_theme(browser, stack, scheme):
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{stack.base_url}/", timeout=TIMEOUT_MS)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert (brightness(page) > 128) == (scheme == "light")
    page.locator("#theme").click()
    assert (brightness(page) > 128) != (scheme == "light")
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
    ask(page, "")
    expect(page.locator(".turn.assistant")).to_contain_text("6 5 6 3")
    expect(page.locator(".facts")).to_contain_text("shipped")
    assert number(page.locator("#turns tr td").nth(5).text_content()) > 3
