"""Several choices: n, batches of prompts, and both, whole and streamed; with ids and usage."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.asking import HI, error_of, events, fake, post
from tests.support.fake_replicas import FakeReplicas, make_state, tokenizer, with_server

ASKED = {"model": "gull", "prompt": "x", "max_tokens": 2}


def echoing() -> FakeReplicas:
    """Says the last token of the prompt again and again."""
    return FakeReplicas(tokenizer(), lambda prompt: [prompt[-1]] * 9)


def test_choices_of_each_prompt_stand_together() -> None:
    replicas = echoing()
    body = post(make_state(replicas), "/v1/completions", ASKED | {"prompt": ["a", "bc"], "n": 3, "seed": 7}).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "aa"), (1, "aa"), (2, "aa"), (3, "cc"), (4, "cc"), (5, "cc"),
    ]  # fmt: skip
    # A prompt counts once, however many choices it has: BOS and one or two letters.
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    seeds = [params.seed for _, params, _ in replicas.submitted.values()]
    assert seeds[0] == seeds[3] == 7 and len(set(seeds)) == 3 and seeds[:3] == seeds[3:]
    assert all(params.n == 1 for _, params, _ in replicas.submitted.values())


def test_streamed_choices_add_up_to_the_whole() -> None:
    asked = ASKED | {"prompt": ["a", "bc"], "n": 2}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    whole = post(make_state(echoing()), "/v1/completions", asked).json()
    *chunks, usage, done = events(post(make_state(echoing()), "/v1/completions", asked | options))
    texts, reasons = [""] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [["length"]] * 4 and done == "DONE"
    assert usage["usage"] == whole["usage"]


def test_chat_choices_have_a_role_and_an_end_each() -> None:
    asked = HI | {"n": 2, "max_tokens": 3}
    whole = post(make_state(fake()), "/v1/chat/completions", asked).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1] and whole["usage"]["completion_tokens"] == 6
    chunks = [
        c["choices"][0] for c in events(post(make_state(fake()), "/v1/chat/completions", asked | {"stream": True}))[:-1]
    ]
    for index, choice in enumerate(whole["choices"]):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["delta"].get("content", "") for chunk in own) == choice["message"]["content"]
        assert [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]] == ["length"]


def test_usage_so_far_stands_in_every_chunk_on_request() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path, asked in (("/v1/completions", ASKED), ("/v1/chat/completions", HI | {"max_tokens": 2})):
        *chunks, usage, _ = events(post(make_state(fake()), path, asked | options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 2 and usage["usage"]["completion_tokens"] == 2


def test_p_api_19_more_choices_than_allowed_are_refused_before_any_is_run() -> None:
    replicas = fake()
    for n, most in ((100_000, 128), (5, 4)):
        state = make_state(replicas, max_n=4 if most == 4 else 128)
        for path, body in (("/v1/completions", ASKED), ("/v1/chat/completions", HI)):
            response = post(state, path, body | {"n": n})
            assert response.status_code == 400 and error_of(response)["param"] == "n"
            assert str(most) in error_of(response)["message"]
    response = post(make_state(replicas), "/v1/completions", ASKED | {"prompt": ["a"] * 60, "n": 2})  # 100 fit
    assert response.status_code == 400 and "120 outputs" in error_of(response)["message"]
    assert not replicas.submitted


@pytest.mark.parametrize(("fields", "status"), [({"best_of": 1}, 200), ({"best_of": 2, "n": 2}, 200),
                                                ({"best_of": 2}, 400), ({"best_of": 0}, 400)])  # fmt: skip
def test_best_of_is_only_n(fields: dict[str, Any], status: int) -> None:
    assert post(make_state(fake()), "/v1/completions", ASKED | fields).status_code == status


def test_ids_of_prompt_and_output_are_told_on_request() -> None:
    tokens = tokenizer()
    asked = ASKED | {"return_token_ids": True}
    prompt, said = tokens.encode("x"), tokens.encode("the sea", add_special_tokens=False)[:2]
    (choice,) = post(make_state(fake()), "/v1/completions", asked).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, said)
    chunks = [
        c["choices"][0] for c in events(post(make_state(fake()), "/v1/completions", asked | {"stream": True}))[:-1]
    ]
    assert chunks[0]["prompt_token_ids"] == prompt and all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert [token for chunk in chunks for token in chunk["token_ids"]] == said
    body = post(make_state(fake()), "/v1/chat/completions", HI | {"max_tokens": 2, "return_token_ids": True}).json()
    assert tokens.decode(body["prompt_token_ids"]) == "<|user|>hi\n<|assistant|>"
    assert body["choices"][0]["token_ids"] == said
    chunks = events(post(make_state(fake()), "/v1/chat/completions",
                         HI | {"max_tokens": 2, "return_token_ids": True, "stream": True}))[:-1]  # fmt: skip
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == said


def test_tokens_may_be_named_by_their_ids() -> None:
    tokens = tokenizer().encode("the sea", add_special_tokens=False)[:2]
    names = [f"token_id:{token}" for token in tokens]
    asked = ASKED | {"logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = post(make_state(fake()), "/v1/completions", asked).json()["choices"]
    assert choice["logprobs"]["tokens"] == names and names[0] in choice["logprobs"]["top_logprobs"][0]
    asked = HI | {"max_tokens": 2, "logprobs": True, "return_tokens_as_token_ids": True}
    (choice,) = post(make_state(fake()), "/v1/chat/completions", asked).json()["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_choices_of_all_prompts(stream: bool) -> None:
    replicas = fake("the sea and the sea", pause=0.2)
    state = make_state(replicas)
    asked = ASKED | {"prompt": ["a", "b"], "n": 3, "max_tokens": 16, "stream": stream}

    async def run(client: httpx.AsyncClient) -> None:
        import asyncio

        task = asyncio.ensure_future(client.post("/v1/completions", json=asked))
        while replicas.num_running < 6:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(1.0):
            while replicas.num_running or state.hub.num_live or state.hub.num_calls:
                await asyncio.sleep(0.01)

    with_server(state, run)
    assert len(replicas.aborted) == 6
