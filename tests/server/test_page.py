"""The files of the built-in page: served as they are, under a strict policy, and asking nothing of anybody else."""

from __future__ import annotations

import re

import httpx
import pytest

from moewe.server.http.page import PAGE_PATHS, POLICY
from moewe.server.state import Phase
from tests.support.asking import fake, get
from tests.support.fake_replicas import ask, make_state, with_server

KINDS = {"/": "text/html; charset=utf-8", "/static/chat.css": "text/css; charset=utf-8",
         "/static/chat.js": "text/javascript; charset=utf-8", "/static/icon.svg": "image/svg+xml"}  # fmt: skip


def test_the_page_comes_with_its_policy_from_the_first_moment() -> None:
    for state in (make_state(None), make_state(fake(), api_keys=("k",))):
        for path, kind in KINDS.items():
            answer = get(state, path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            head = ask(state, "HEAD", path)
            assert head.status_code == 200 and head.headers["content-length"] == answer.headers["content-length"]
        assert ask(state, "POST", "/").status_code in (401, 405)
    assert state.phase is Phase.READY


def test_the_policy_lets_nothing_in_but_own_files() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in POLICY.split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("frame-ancestors") == "'none'"
    assert rules.pop("form-action") == "'none'" and set(rules.values()) == {"'self'"}


def test_files_name_no_other_place_and_hold_no_inline_code() -> None:
    async def run(client: httpx.AsyncClient) -> dict[str, str]:
        return {path: (await client.get(path)).text for path in PAGE_PATHS}

    texts = with_server(make_state(fake()), run)
    for path, text in texts.items():
        assert set(re.findall(r"[a-z]+://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}, path
    html, script = texts["/"], texts["/static/chat.js"]
    assert not re.search(r"<script(?![^>]* src=)|<style|\son[a-z]+=|\sstyle=|javascript:", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|localStorage", script)
    named = {path.lstrip("/") for path in re.findall(r'(?:src|href)="([^"]+)"', html)}
    assert named == {"static/chat.css", "static/chat.js", "static/icon.svg", "metrics", "docs"}


@pytest.mark.parametrize(
    "path", ["/static/", "/static/../guard.py", "/static/%2e%2e/keys.py", "/static/chat.js/", "/index.html"]
)
def test_no_other_file_can_be_had(path: str) -> None:
    assert get(make_state(fake()), path).status_code == 404
