"""A thousand random requests at EP2DP2; a fifth of the clients leave. No leak, the tokens of EP1, exact metrics."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moewe import LLM, SamplingParams
from tests.support.fixtures import VOCAB_SIZE, checkpoint, copy_checkpoint, random_prompt, reference_logits
from tests.support.numerics import LOGIT_TIE
from tests.support.server_process import NAME, ServerProcess

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(900)]

NUMBER = 1000
LONG = 800  # so many tokens that nobody is done before the server sees that the client left
MOST_SEEN = 64  # more than a client sees before it leaves


def model_folder() -> Path:
    """T-QW3 with a tokenizer whose token i reads `t<i>`, so that texts show ids."""
    folder = copy_checkpoint(checkpoint("T-QW3", max_position_embeddings=1024))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


class Wish:
    """One random request; `leaves_after` chunks its client goes away (None: it stays)."""

    def __init__(self, number: int) -> None:
        dice = random.Random(number)
        self.prompt = random_prompt(dice.randint(1, 70), seed=number)
        self.leaves_after = dice.randint(1, 6) if dice.random() < 0.2 else None
        self.max_tokens = LONG if self.leaves_after else dice.randint(1, 24)
        self.stream = self.leaves_after is not None or dice.random() < 0.5

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": NAME, "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "logprobs": 0,
            "ignore_eos": True, "stream": self.stream,
        }  # fmt: skip


async def ask(client: httpx.AsyncClient, wish: Wish) -> list[int]:
    """Send one request; return the token ids that came."""
    tokens: list[int] = []

    def take(choice: dict[str, Any]) -> None:
        tokens.extend(int(word.strip().removeprefix("t")) for word in (choice["logprobs"] or {"tokens": []})["tokens"])

    if not wish.stream:
        response = await client.post("/v1/completions", json=wish.body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == wish.max_tokens
        take(response.json()["choices"][0])
        return tokens
    chunks = 0
    async with client.stream("POST", "/v1/completions", json=wish.body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            take(json.loads(line.removeprefix("data: "))["choices"][0])
            chunks += 1
            if chunks == wish.leaves_after:
                break
    return tokens


def near_tie(path: Path, prompt: list[int], agreed: list[int]) -> bool:
    """True when the reference itself hardly knows which token follows."""
    best = reference_logits(path, [*prompt, *agreed])[-1].topk(2).values
    return bool(best[0] - best[1] < LOGIT_TIE)


def test_a_thousand_random_requests() -> None:
    path = model_folder()
    wishes = [Wish(number) for number in range(NUMBER)]
    with LLM(str(path), topology="EP1DP1", skip_tokenizer_init=True, dtype="float32", threads=1) as llm:
        params = [
            SamplingParams(max_tokens=min(w.max_tokens, MOST_SEEN), temperature=0, ignore_eos=True) for w in wishes
        ]
        outputs = llm.generate([{"prompt_token_ids": w.prompt} for w in wishes], params)
        expected = [list(output.outputs[0].token_ids) for output in outputs]

    flags = ("--dtype", "float32", "--max-num-seqs", "24", "--kv-cache-memory-bytes", "900KiB")
    flags = (*flags, "--max-num-batched-tokens", "48")
    with ServerProcess(path, *flags, topology="EP2DP2") as server:
        process = psutil.Process(server.process.pid)
        descriptors = process.num_fds()
        everyone = [process, *server.children]
        of_children = [child.num_fds() for child in server.children]
        got: list[list[int]] = [[] for _ in wishes]

        async def run() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
                turn = asyncio.Semaphore(128)

                async def one(number: int) -> None:
                    async with turn:
                        got[number] = await ask(client, wishes[number])

                await asyncio.gather(*(one(number) for number in range(NUMBER)))

        asyncio.run(run())
        server.wait_idle(within=5.0)

        seen: Counter[str] = Counter()
        for wish, mine, right in zip(wishes, got, expected, strict=True):
            stayed = wish.leaves_after is None
            seen["stayed" if stayed else "left"] += 1
            seen["tokens"] += len(mine) if stayed else 0
            assert len(mine) == len(right) if stayed else len(mine) < len(right)
            agreed = next((i for i, (a, b) in enumerate(zip(mine, right)) if a != b), None)
            if agreed is not None:
                assert near_tie(path, wish.prompt, right[:agreed]), f"differs at token {agreed}: {mine} {right}"
                seen["excused"] += 1
        assert seen["left"] > 100 and seen["excused"] < 10, seen

        after = server.counters()
        finished, aborted = (after[f"moewe_requests_finished_total|{reason}"] for reason in ("length", "abort"))
        assert finished + aborted == NUMBER
        # A slow client gets several tokens in a chunk: it may leave when all of them are made and on their way.
        assert seen["stayed"] <= finished and 0.7 * seen["left"] < aborted <= seen["left"]
        assert after.get("moewe_requests_finished_total|error", 0) == 0
        assert after["moewe_prompt_tokens_total"] == sum(len(wish.prompt) for wish in wishes)
        most = seen["tokens"] + sum(wish.max_tokens for wish in wishes if wish.leaves_after)
        assert seen["tokens"] < after["moewe_generation_tokens_total"] < most

        assert all(one.is_running() for one in everyone)
        assert process.num_fds() <= descriptors + 2
        assert [child.num_fds() for child in server.children] == of_children
