"""A change of layout over HTTP and by `moewe apply`: what is refused, what is answered, what the command says."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import pytest

from moewe.runtime.fleet import Fleet
from moewe.runtime.new_layout import NewLayout
from moewe.runtime.replicas import ReplicaSet
from moewe.runtime.resolve import Resolved
from moewe.server.advise.apply import ChangeFailedError, apply
from moewe.server.client.asking import NoAnswerError
from moewe.server.errors import ApiError
from moewe.server.http import layout_change
from moewe.server.http.layout_change import LayoutChanger
from moewe.server.state import ServerState
from moewe.topologies import Topology
from moewe.topologies.advisor.records import Advice
from tests.runtime.test_replicas import fake_resolved
from tests.server.test_top import Pages, small_server
from tests.support.asking import error_of, fake, get, post
from tests.support.fake_replicas import make_state


def with_changer(**options: Any) -> ServerState:
    state = make_state(fake(), **options)
    resolved = fake_resolved("EP2DP1")
    fleet = Fleet(ReplicaSet(resolved, None))  # type: ignore[arg-type]  nothing is started
    state.layout_changer = LayoutChanger(state, fleet, resolved, print, lambda *_: None)
    return state


def test_the_command_waits_for_the_end_and_says_how_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change = {"before": "EP2DP2", "after": "EP4DP1", "way": "beside", "turns": 1, "turn": 1, "state": "done",
              "reason": "", "seconds": 9.5}  # fmt: skip
    pages = Pages()
    with small_server(pages) as root:
        pages.by_path["/v1/topology/apply?topology=EP4DP1"] = (202, json.dumps(change | {"state": "running"}).encode())
        pages.by_path["/v1/topology/apply"] = (200, json.dumps({"change": change}).encode())
        assert apply({"url": (root,), "topology": "EP4DP1"}) == 0
        assert capsys.readouterr().out.endswith("from EP2DP2 to EP4DP1, beside\nEP4DP1 runs after 9.5 s\n")
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("moewe.server.advise.apply.time.sleep", Mock(side_effect=KeyboardInterrupt))
            apply({"url": (root,), "topology": "EP4DP1"})
        assert "goes on without this command; GET " in capsys.readouterr().err
        failed = change | {"state": "failed", "reason": "no \x1b[2J room"}
        pages.by_path["/v1/topology/apply"] = (200, json.dumps({"change": failed}).encode())
        with pytest.raises(ChangeFailedError, match=r"^EP2DP2 goes on: no \?\[2J room$"):
            apply({"url": (root,), "topology": "EP4DP1"})
        pages.by_path["/v1/topology/apply"] = (403, b'{"error": {"message": "start it with --allow-apply"}}')
        with pytest.raises(NoAnswerError, match="answers 403: start it with --allow-apply"):
            apply({"url": (root,)})
        pages.by_path["/v1/topology/apply"] = (202, b"[]")
        with pytest.raises(NoAnswerError, match="no change"):
            apply({"url": (root,)})


def test_nobody_changes_the_layout_of_a_server_that_does_not_allow_it() -> None:
    response = post(with_changer(), "/v1/topology/apply", {})
    assert response.status_code == 403 and "--allow-apply" in error_of(response)["message"]
    assert get(with_changer(), "/v1/topology/apply").json() == {"change": None}
    assert post(make_state(None), "/v1/topology/apply", {}).status_code == 503


def test_a_layout_in_a_body_is_not_taken_for_none() -> None:
    response = post(with_changer(allow_apply=True), "/v1/topology/apply", {"topology": "EP1DP2"})
    assert response.status_code == 400 and "name the layout in the URL" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("query", "status", "why"),
    [
        ("", 409, "no other layout is advised"),
        ("?topology=EP2", 400, "EPxDPy"),
        ("?topology=" + 9999 * "A", 400, 100 * "A" + "...' is not of the form"),
        ("?topolgy=EP1DP2", 400, "'topolgy' is no parameter"),
        ("?topology=EP2DP1", 400, "runs already"),
    ],
)
def test_what_is_no_change_is_refused(query: str, status: int, why: str) -> None:
    response = post(with_changer(allow_apply=True), f"/v1/topology/apply{query}", {})
    assert response.status_code == status and why in error_of(response)["message"]


def test_the_advised_layout_is_the_default_and_one_change_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    state = with_changer(allow_apply=True)
    state.advice = Advice(number=1, time=1.0, topology="EP2DP1", verdict="change", advised="EP1DP2", gain=1, reason="")

    def refuse(running: Resolved, topology: Topology, **_: Any) -> NewLayout:
        raise ValueError(f"{topology.short()} has no room; use less")

    monkeypatch.setattr(layout_change, "new_layout", refuse)
    response = post(state, "/v1/topology/apply", {})
    assert response.status_code == 400 and "EP1DP2 has no room" in error_of(response)["message"]
    changer = state.layout_changer
    assert isinstance(changer, LayoutChanger)
    changer._is_planning = True
    with pytest.raises(ApiError, match="already") as error:
        asyncio.run(changer.begin(None))
    assert error.value.status == 409
