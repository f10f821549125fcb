"""Random requests for a server, good ones, wrong ones and ones that are given up, and what their clients must see.

Not a load generator (server/bench): it checks every answer. `SoakClient.seen` and `SoakClient.tokens` are what the
server's own metrics are held against afterwards.
Units: tokens, seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.server_process import NAME

WORDS = ["gull", "tern", "auk", "naïve", "Möwe", "鳥", "🐦", "\n", "the", "of", "a"]
CHOICES = ["yes", "no", "perhaps"]
REGEX = "[0-9]{2}:[0-9]{2}"
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["n", "kind"],
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "kind": {"enum": CHOICES}},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "description": "Look", "parameters": SCHEMA}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Each with the statuses that are right for it.
WRONG: list[tuple[str, Any, int]] = [
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10_000}, 400),
    (COMPLETIONS, {"prompt": "x" * 20_000, "max_tokens": 1}, 400),
    (COMPLETIONS, {"prompt": [10**9]}, 400),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400),
    (COMPLETIONS, {"prompt": "x", "model": "nobody"}, 404),
    (COMPLETIONS, {"prompt": "x", "guided_regex": "(["}, 400),
    (COMPLETIONS, {"prompt": "x", "heat": 1}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "gull", "content": "x"}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, 400),
    (CHAT, b"{not json", 400),
    (CHAT, b'{"messages": "\xff\xfe"}', 400),
]


@dataclass
class Asked:
    """One good request: where, what, and what its choices must be like."""

    path: str
    body: dict[str, Any]
    form: str = "text"

    @property
    def num_choices(self) -> int:
        prompts = self.body.get("prompt", "")
        many = len(prompts) if isinstance(prompts, list) and isinstance(prompts[0], str) else 1
        return many * self.body.get("n", 1)

    @property
    def most_tokens(self) -> int:
        return self.num_choices * self.body["max_tokens"]


@dataclass
class SoakClient:
    """One client that asks one thing after the other.

    Attributes:
        seen: ended choices by reason, `left` choices that were given up, error answers as `error STATUS`.
        tokens: `prompt` and `completion` of answers that were read to the end, `left` the most that others can be.
        problems: whatever was not as it must be.
        longest: the good request that took most time, and what it was.
    """

    number: int
    client: httpx.AsyncClient
    seen: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest: tuple[float, str] = (0.0, "")

    def __post_init__(self) -> None:
        self.dice = random.Random(self.number)

    async def run(self, until: float) -> None:
        """Ask until the clock of the event loop says `until`."""
        while asyncio.get_running_loop().time() < until:
            try:
                await self._once()
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}"[:500])
            if self.dice.random() < 0.1:
                await asyncio.sleep(self.dice.uniform(0.0, 1.0))

    async def warm_up(self) -> None:
        """Ask for what takes most memory: long prompts that are judged token by token."""
        ids = [self.dice.randrange(100, 40_000) for _ in range(440)]
        body = {"model": NAME, "prompt": ids, "max_tokens": 4, "prompt_logprobs": 20, "logprobs": 20, "n": 2}
        await self._good(Asked(COMPLETIONS, body))

    async def _once(self) -> None:
        kind = self.dice.random()
        if kind < 0.12:
            await self._wrong()
        elif kind < 0.30:
            await self._give_up(self._asked())
        elif kind < 0.35:
            path = self.dice.choice(["/metrics", "/health", "/ready", "/v1/models", "/v1/topology", "/version"])
            assert (await self.client.get(path)).status_code == 200, path
        else:
            await self._good(self._asked())

    # --- what is asked -----------------------------------------------------------------------------------------------
    def _asked(self) -> Asked:
        dice = self.dice
        body: dict[str, Any] = {"model": NAME, "max_tokens": int(2 ** dice.uniform(0, 6.5))}
        if dice.random() < 0.6:
            body |= {"temperature": dice.choice([0, 0.3, 1.0, 2.0]), "seed": dice.randrange(1 << 40)}
        for name, value in {
            "top_p": 0.8, "top_k": 20, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
            "repetition_penalty": 1.3, "logit_bias": {"300": -5, "301": 2.5}, "stop": ["the", ". "], "ignore_eos": True,
            "bad_words": ["gull"], "stop_token_ids": [5, 6], "include_stop_str_in_output": True,
            "skip_special_tokens": False, "return_token_ids": True, "user": "u",
        }.items():  # fmt: skip
            if dice.random() < 0.15:
                body[name] = value
        if dice.random() < 0.2:
            body["n"] = dice.randint(2, 4)
        asked = self._chat(body) if dice.random() < 0.5 else self._completion(body)
        if dice.random() < 0.5:
            asked.body |= {"stream": True, "stream_options": {"include_usage": True}}
            asked.body.pop("prompt_logprobs", None)
        return asked

    def _words(self, most: int) -> str:
        return " ".join(self.dice.choice(WORDS) for _ in range(self.dice.randint(1, most)))

    def _completion(self, body: dict[str, Any]) -> Asked:
        dice = self.dice
        ids = [dice.randrange(100, 40_000) for _ in range(dice.randint(1, 200))]
        body["prompt"] = dice.choice([self._words(60), ids, [self._words(10), self._words(20)]])
        for name, value in {"logprobs": 3, "echo": True, "prompt_logprobs": 2}.items():
            if dice.random() < 0.2:
                body[name] = value
        form = dice.choice(["text", "text", "text", "choice", "regex"])
        if form != "text" and not body.keys() & {"echo", "stop", "include_stop_str_in_output", "stop_token_ids"}:
            body |= {"guided_choice": CHOICES} if form == "choice" else {"guided_regex": REGEX}
            return Asked(COMPLETIONS, body, form)
        return Asked(COMPLETIONS, body)

    def _chat(self, body: dict[str, Any]) -> Asked:
        dice = self.dice
        body["messages"] = [{"role": "user", "content": self._words(40)}]
        if dice.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": dice.randint(0, 5)}
        form = dice.choice(["text", "text", "json", "call", "auto"])
        if form != "text" and not body.keys() & {"stop", "stop_token_ids", "skip_special_tokens"}:
            body["max_tokens"] = 60
            if form == "json":
                named = {"name": "answer", "schema": SCHEMA}
                body["response_format"] = {"type": "json_schema", "json_schema": named}
            else:
                named = {"type": "function", "function": {"name": "look"}}
                body |= {"tools": [TOOL], "tool_choice": "auto" if form == "auto" else named}
            return Asked(CHAT, body, form)
        return Asked(CHAT, body)

    # --- what is done with it ----------------------------------------------------------------------------------------
    async def _wrong(self) -> None:
        path, body, expected = self.dice.choice(WRONG)
        if isinstance(body, bytes):
            answer = await self.client.post(path, content=body, headers={"content-type": "application/json"})
        else:
            answer = await self.client.post(path, json={"model": NAME, **body})
        self.seen[f"error {answer.status_code}"] += 1
        assert answer.status_code == expected and answer.json()["error"]["message"], (body, answer.text)

    async def _give_up(self, asked: Asked) -> None:
        """Hang up after a moment or after some events; short answers may end before."""
        self.seen["left"] += asked.num_choices
        self.tokens["left"] += asked.most_tokens
        if not asked.body.get("stream"):
            try:
                async with asyncio.timeout(self.dice.uniform(0.0, 1.0)):
                    await self.client.post(asked.path, json=asked.body)
            except TimeoutError:
                pass
            return
        events, most = 0, self.dice.randint(0, 20)
        async for _ in self._stream(asked):
            events += 1
            if events > most:
                return

    async def _good(self, asked: Asked) -> None:
        began = asyncio.get_running_loop().time()
        try:
            await self._answered(asked)
        finally:
            took = asyncio.get_running_loop().time() - began
            what = f"{asked.path} {asked.form}, {asked.num_choices} of at most {asked.body['max_tokens']} tokens"
            self.longest = max(self.longest, (took, what))

    async def _answered(self, asked: Asked) -> None:
        if asked.body.get("stream"):
            texts, reasons, usage = await self._read(asked)
        else:
            answer = await self.client.post(asked.path, json=asked.body)
            assert answer.status_code == 200, (answer.status_code, answer.text, asked.body)
            choices = answer.json()["choices"]
            texts, usage = [_text_of(choice) for choice in choices], answer.json()["usage"]
            reasons = [choice["finish_reason"] for choice in choices]
        assert len(reasons) == asked.num_choices and usage["completion_tokens"] <= asked.most_tokens, (asked, usage)
        for reason in reasons:
            self.seen["stop" if reason == "tool_calls" else reason] += 1
        self.tokens["prompt"] += usage["prompt_tokens"] * asked.body.get("n", 1)
        self.tokens["completion"] += usage["completion_tokens"]
        for text, reason in zip(texts, reasons, strict=True):
            if reason in ("stop", "tool_calls"):
                _check_form(asked, text)

    async def _stream(self, asked: Asked) -> AsyncIterator[str]:
        async with self.client.stream("POST", asked.path, json=asked.body) as response:
            assert response.status_code == 200, (response.status_code, await response.aread(), asked.body)
            async for line in response.aiter_lines():
                if line:
                    assert line.startswith("data: "), line
                    yield line[6:]

    async def _read(self, asked: Asked) -> tuple[list[str], list[str], dict[str, int]]:
        texts, reasons = [""] * asked.num_choices, [""] * asked.num_choices
        usage: dict[str, int] = {}
        last = ""
        async for last in self._stream(asked):
            if last == "[DONE]":
                continue
            chunk = json.loads(last)
            assert "error" not in chunk, chunk
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                index = choice["index"]
                assert not reasons[index], "a choice goes on after its end"
                texts[index] += _text_of(choice)
                reasons[index] = choice["finish_reason"] or ""
        assert last == "[DONE]" and all(reasons) and usage, (asked.body, last)
        return texts, reasons, usage


class SteadyClient(SoakClient):
    """One who asks for the same all the time, and must get the same tokens whatever else runs."""

    async def warm_up(self) -> None:
        """Ask while nobody else does, which says what is right."""
        self.right = await self._tokens()
        assert len(self.right) > 8, self.right

    async def run(self, until: float) -> None:
        """Ask until the clock of the event loop says `until`, and once when all else should be over."""
        while (now := asyncio.get_running_loop().time()) < until:
            await self._again()
            await asyncio.sleep(max(0.0, min(2.0, until - now)))
        await self._again()

    async def _again(self) -> None:
        self.seen["again"] += 1
        try:
            tokens = await self._tokens()
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}"[:500])
        else:
            if tokens != self.right:
                self.problems.append(f"seeded tokens {tokens} were {self.right}")

    async def _tokens(self) -> list[int]:
        body = {"model": NAME, "prompt": "The gull", "seed": 7, "temperature": 1.0, "max_tokens": 16}
        answer = await self.client.post(COMPLETIONS, json={**body, "ignore_eos": True, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        [choice], usage = answer.json()["choices"], answer.json()["usage"]
        self.seen[choice["finish_reason"]] += 1
        self.tokens["prompt"] += usage["prompt_tokens"]
        self.tokens["completion"] += usage["completion_tokens"]
        found: list[int] = choice["token_ids"]
        return found


def _text_of(choice: dict[str, Any]) -> str:
    """The text of a choice or of a chunk, or the arguments of its call."""
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice.get("delta") or {}
    calls = message.get("tool_calls") or []
    return "".join(call["function"].get("arguments", "") for call in calls) or message.get("content") or ""


def _check_form(asked: Asked, text: str) -> None:
    match asked.form:
        case "choice":
            assert text in CHOICES, text
        case "regex":
            assert re.fullmatch(REGEX, text), text
        case "json" | "call":
            found = json.loads(text)
            assert found["kind"] in CHOICES and found["n"] in range(10) and len(found) == 2, text
