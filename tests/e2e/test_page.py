"""The built-in page in headless Chromium over the demo model: chat, streams, stop, key, keyboard, own files only.

Needs a Chromium of the machine (`apt-get install chromium`); it is looked for, never downloaded.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.spawn]

KEY = "page-key-1"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ANSWER_MS = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("demo", "--api-key", KEY, topology="EP2DP1") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # A browser comes with the system, not with pip. tests/server/test_page.py holds files and policy without one.
    if BROWSER is None:
        pytest.skip("NOT TESTED: the built-in page, as no chromium is installed here (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: ServerProcess) -> Iterator[Any]:
    """A fresh tab on the page; whatever it asked for or complained of is in `asked` and `complaints`."""
    context = browser.new_context(viewport={"width": 900, "height": 700})
    page = context.new_page()
    page.asked, page.complaints = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda line: page.complaints.append(line.text) if "Content Security" in line.text else None)
    page.goto(server.url)
    yield page
    assert not page.complaints
    assert all(url.startswith((server.url, "blob:")) for url in page.asked), page.asked
    context.close()


def enter_key(page: Any) -> None:
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_text(NAME, exact=True).wait_for()


def answer_with(page: Any, body: str) -> None:
    def answer(route: Any) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)


def test_a_question_is_answered_in_a_stream(page: Any, server: ServerProcess, tmp_path: Path) -> None:
    page.get_by_text("This server wants an API key").wait_for()
    enter_key(page)
    assert page.evaluate("document.activeElement.id") == "input"  # all by keyboard from here on
    lengths = page.evaluate_handle(
        """() => { const seen = []; new MutationObserver(() => {
             const last = document.querySelector('.assistant'); if (last) seen.push(last.textContent.length);
           }).observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true});
           return seen; }"""
    )
    page.get_by_label("Max tokens").fill("24")
    page.locator("#input").focus()
    page.keyboard.type("What does a gull eat?")
    page.keyboard.press("Enter")
    page.locator("#status", has_text=re.compile(r"^24 tokens, [0-9.]+ tokens/s$")).wait_for(timeout=ANSWER_MS)
    assert page.locator(".user").text_content() == "What does a gull eat?"
    assert page.locator(".assistant").text_content().strip()
    seen = lengths.json_value()
    assert len(set(seen)) >= 5 and seen == sorted(seen)  # it grew piece by piece
    page.screenshot(path=str(tmp_path / "page.png"))
    assert (tmp_path / "page.png").stat().st_size > 5000
    assert page.evaluate("document.activeElement.id") == "input" and page.locator("#input").input_value() == ""


def test_stop_ends_an_answer_and_its_request(page: Any, server: ServerProcess) -> None:
    enter_key(page)
    page.locator("#input").fill("Tell me a very long story about the sea.")
    page.get_by_role("button", name="Send").click()
    page.locator(".assistant").wait_for(timeout=ANSWER_MS)
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator("#status").text_content().startswith("stopped: ")
    page.locator("#input").fill("And another one, as long as you can.")
    page.keyboard.press("Enter")
    page.locator(".assistant").nth(1).wait_for(timeout=ANSWER_MS)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    page.get_by_role("button", name="new chat").click()
    assert page.locator(".message").count() == 0


def test_a_key_is_kept_by_the_tab_alone_and_can_be_forgotten(page: Any, server: ServerProcess) -> None:
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("That key is not accepted.").wait_for()
    enter_key(page)
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    page.reload()
    page.get_by_text(NAME, exact=True).wait_for()
    other = page.context.new_page()
    other.goto(server.url)
    other.get_by_text("This server wants an API key").wait_for()
    page.get_by_role("button", name="forget key").click()
    page.get_by_text("This server wants an API key").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_the_link_to_metrics_works_with_a_key(page: Any) -> None:
    enter_key(page)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="metrics").click()
    opened.value.get_by_text(re.compile("moewe_requests_running")).first.wait_for()


def test_what_a_model_says_stays_text(page: Any) -> None:
    enter_key(page)
    evil = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>&lt;b&gt;'
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": evil}, "finish_reason": None}]})
    answer_with(page, f"data: {chunk}\n\ndata: [DONE]\n\n")
    page.locator("#input").fill("<b>mine</b>")
    page.keyboard.press("Enter")
    page.locator(".assistant").wait_for()
    assert page.locator(".assistant").text_content() == evil
    assert page.locator(".user").text_content() == "<b>mine</b>"
    assert page.locator("#log img, #log script, #log b").count() == 0 and page.evaluate("window.broken") is None


def test_a_failure_is_shown_and_the_question_comes_back(page: Any) -> None:
    enter_key(page)
    for body, says in (
        ('data: {"error": {"message": "rank 1 is lost"}}\n\n', "rank 1 is lost"),
        ("data: [broken\n\n", "JSON"),
        ("", "broke off"),
    ):
        page.unroute_all()
        answer_with(page, body)
        page.locator("#input").fill("a question")
        page.keyboard.press("Enter")
        page.locator(".error", has_text=says).wait_for()
        assert page.locator("#input").input_value() == "a question"
    assert page.locator(".user").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_are_readable(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    colours = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    front, back = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (back > 600 and front < 150) if scheme == "light" else (back < 150 and front > 600)
