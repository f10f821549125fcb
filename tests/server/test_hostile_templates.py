"""P-SEC-02 through the door: a model's hostile template is a 400 on chats alone; a request's own is refused."""

from __future__ import annotations

import pytest

from tests.support.asking import HI, error_of, fake, post
from tests.support.fake_replicas import make_state

HOSTILE = (
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% for i in range(1000000000) %}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
)


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_of_the_model_is_a_400_on_chats_alone(template: str) -> None:
    state = make_state(fake(), template=template)
    response = post(state, "/v1/chat/completions", HI)
    assert response.status_code == 400 and error_of(response)["code"] == "chat_template_error"
    assert post(state, "/v1/completions", {"model": "gull", "prompt": "a", "max_tokens": 1}).status_code == 200
    assert not state.hub.num_live


@pytest.mark.parametrize(
    "where", [{"chat_template": HOSTILE[0]}, {"chat_template_kwargs": {"chat_template": HOSTILE[0]}}]
)
def test_a_template_of_a_request_is_refused(where: dict[str, object]) -> None:
    response = post(make_state(fake()), "/v1/chat/completions", HI | where)
    assert response.status_code == 400 and "chat_template" in error_of(response)["message"]
