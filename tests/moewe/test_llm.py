"""`LLM` and its session: prompts of every form, one or many parameters, log-probabilities, limits and losses."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moewe
from moewe import LLM, SamplingParams
from moewe.llm import Logprob
from moewe.runtime import session
from moewe.runtime.messages import INVALID_REQUEST, Delta, Failed, LogprobEntry, Ready
from moewe.runtime.plan import unpack
from moewe.runtime.replicas import ReplicaLost
from moewe.runtime.resolve import Resolved
from tests.support.chain import BOS, EOS, byte_id, chain
from tests.support.fixtures import copy_checkpoint, drop_tensors, edit_json

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


class EchoReplicas:
    """Answers every prompt with its own tokens, two at a time, then ends; stands in for real engines."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.failure: Failed | None = None
        self.lose_after: int | None = None
        self.submitted: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.most_pending = 0
        self.closed = 0
        self._left: deque[tuple[str, list[int], SamplingParams]] = deque()

    @property
    def ready(self) -> list[Ready]:
        length = self.resolved.config.model.max_model_len
        assert length is not None
        return [Ready(num_blocks=9, block_size=16, max_model_len=length, max_num_seqs=4, memory_bandwidth=(1.0,),
                      weight_bytes=(1,), weight_bytes_read=(1,), pids=(1,))]  # fmt: skip

    def wait_ready(self, timeout: float | None = None) -> None:
        if self.failure is not None:
            raise ReplicaLost(self.failure.reason)

    def submit(self, request_id: str, prompt: bytes, params: SamplingParams, priority: int = 0) -> None:
        tokens = self.submitted[request_id] = unpack(prompt).tolist()
        self._left.append((request_id, tokens[: params.max_tokens], params))
        self.most_pending = max(self.most_pending, len(self._left))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def poll(self, timeout: float | None = 0.0) -> list[Delta]:
        if self.lose_after is not None and len(self.submitted) > self.lose_after:
            self.failure = Failed(reason="rank 1 was killed", rank=1)
            return [Delta(request_id=request_id, finish_reason="error", error="lost") for request_id, *_ in self._left]
        request_id, tokens, params = self._left.popleft()
        now, later = tuple(tokens[:2]), tokens[2:]
        if later:
            self._left.append((request_id, later, params))
        logprobs = ()
        if params.logprobs is not None:
            logprobs = tuple(
                (LogprobEntry(token_id=token, logprob=-0.5, rank=1, decoded_token="x"),
                 LogprobEntry(token_id=0, logprob=-2.0, rank=2, decoded_token=None)) for token in now
            )  # fmt: skip
        text = "".join(chr(token - byte_id(0)) for token in now if token >= byte_id(0))
        return [Delta(request_id=request_id, token_ids=now, text=text, logprobs=logprobs,
                      finish_reason=None if later else "length")]  # fmt: skip

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[EchoReplicas]:
    found: list[EchoReplicas] = []

    class Factory:
        @staticmethod
        def start(resolved: Resolved, on_loading: Any = None, parts: Any = None) -> EchoReplicas:
            found.append(EchoReplicas(resolved))
            return found[-1]

    monkeypatch.setattr(session, "ReplicaSet", Factory)
    return found


@pytest.fixture
def llm(made: list[EchoReplicas]) -> Iterator[LLM]:
    path = chain(["a"], chat_template=TEMPLATE, max_position_embeddings=64).path
    with LLM(
        str(path), topology="EP2DP1", max_queued_requests=8, max_num_seqs=4, kv_cache_memory_bytes=1 << 20
    ) as opened:
        yield opened


def ids(text: str) -> list[int]:
    return [byte_id(byte) for byte in text.encode()]


def test_the_facade_is_lazy() -> None:
    code = "import moewe, sys; moewe.SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert {"LLM", "SamplingParams", "EngineConfig", "__version__"} <= set(dir(moewe))
    with pytest.raises(AttributeError, match="nothing"):
        moewe.nothing  # noqa: B018


def test_text_and_token_ids_in_every_form(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0)
    forms: list[Any] = ["hello", {"prompt": "hello"}, ids("hello"), {"prompt_token_ids": ids("hello")}]
    for output in llm.generate(forms, greedy):
        assert output.prompt_token_ids == ids("hello") and output.finished
        assert output.outputs[0].text == "hell" and output.outputs[0].token_ids == ids("hell")
        assert output.outputs[0].finish_reason == "length" and output.outputs[0].logprobs is None
    assert [output.prompt for output in llm.generate(forms, greedy)] == ["hello", "hello", None, None]


def test_a_damaged_checkpoint_starts_nothing(made: list[EchoReplicas]) -> None:
    folder = drop_tensors(copy_checkpoint(chain(["a"]).path), "lm_head.weight")
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        LLM(str(folder), kv_cache_memory_bytes=1 << 20)
    assert made == []


def test_a_single_prompt_needs_no_list(llm: LLM) -> None:
    for prompt in ("hello", ids("hello"), {"prompt": "hello"}):
        (output,) = llm.generate(prompt)  # type: ignore[arg-type]
        assert output.outputs[0].text == "hello"
    assert llm.generate([]) == []


def test_parameters_one_for_all_or_one_each(llm: LLM) -> None:
    outputs = llm.generate(["abcd", "efgh"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    assert [output.outputs[0].text for output in outputs] == ["a", "efg"]
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.generate("a", [SamplingParams(), SamplingParams()])


def test_logprobs_are_a_dict_per_token(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(logprobs=1))
    (completion,) = output.outputs
    assert completion.logprobs is not None and len(completion.logprobs) == 3
    assert completion.logprobs[1] == {
        byte_id(ord("b")): Logprob(logprob=-0.5, rank=1, decoded_token="x"),
        0: Logprob(logprob=-2.0, rank=2, decoded_token=None),
    }
    assert completion.cumulative_logprob == -1.5


def test_more_prompts_than_the_queue_takes(llm: LLM, made: list[EchoReplicas]) -> None:
    prompts = [f"number {i}" for i in range(50)]
    outputs = llm.generate(prompts, progress=True)
    assert [output.outputs[0].text for output in outputs] == prompts
    assert made[0].most_pending <= 8 + 2 * 4  # a queue, and the slots of both ranks


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (output,) = llm.chat(conversation, SamplingParams(max_tokens=32))
    assert output.prompt == "u:hi;a:ho;" == output.outputs[0].text
    assert [output.prompt for output in llm.chat([conversation, conversation[:1]])] == ["u:hi;a:ho;", "u:hi;"]


def test_variables_reach_the_template_and_another_one_may_be_given(made: list[EchoReplicas], tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ mood }}:{{ messages[0].content }}")
    with LLM(
        str(chain(["a"], chat_template=TEMPLATE).path), chat_template=str(file), kv_cache_memory_bytes=1 << 20
    ) as llm:
        (output,) = llm.chat([{"role": "user", "content": "hi"}], chat_template_kwargs={"mood": "dry"})
        assert output.prompt == "dry:hi"
        with pytest.raises(ValueError, match=r"chat_template_kwargs\.messages"):
            llm.chat([{"role": "user", "content": "hi"}], chat_template_kwargs={"messages": []})


def test_the_models_sampling_defaults_hold_without_parameters(made: list[EchoReplicas]) -> None:
    path = copy_checkpoint(chain(["a"], max_position_embeddings=64).path)
    edit_json(path / "generation_config.json", {"temperature": 0.5, "max_new_tokens": 1000, "eos_token_id": [9]})
    with LLM(str(path), kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=1000)
        assert len(llm.generate("x" * 40)[0].outputs[0].token_ids) == 24  # what the context holds
        assert len(llm.generate("hello", SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3
        assert made[-1].resolved.model.eos_token_ids == (9, EOS)
    with LLM(str(path), generation_config="none", kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert made[-1].resolved.model.eos_token_ids == (9, EOS)  # end tokens hold all the same


def test_streaming_yields_text_and_leaving_aborts(llm: LLM, made: list[EchoReplicas]) -> None:
    assert list(llm.stream("hello", SamplingParams(max_tokens=32))) == ["he", "ll", "o"]
    stream = llm.stream("hello")
    assert next(stream) == "he"
    stream.close()  # type: ignore[attr-defined]
    assert made[0].aborted == [list(made[0].submitted)[-1]]
    # What still comes of the one that was left belongs to nobody.
    assert llm.generate("ok")[0].outputs[0].text == "ok"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "prompt has 0 tokens"),
        ("", "prompt has 0 tokens"),
        ("x" * 64, "prompt has 64 tokens, but max_model_len is 64"),
        ("x" * 60, "max_tokens=16 make 76.*lower max_tokens to at most 4"),
        ({"prompt_token_ids": [5, 100_000]}, "prompt_token_ids.1=100000"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids.0=-1"),
        ({"prompt_token_ids": [1.5]}, "has 1.5"),
        ({"text": "a"}, "either prompt or prompt_token_ids"),
    ],
)
def test_prompts_that_can_never_run(llm: LLM, made: list[EchoReplicas], prompt: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llm.generate(["fine", prompt])
    assert made[0].submitted == {}


def test_one_call_at_a_time(llm: LLM) -> None:
    stream = llm.stream("hello")
    next(stream)
    with pytest.raises(RuntimeError, match="one call at a time"):
        llm.generate("a")
    stream.close()  # type: ignore[attr-defined]
    assert llm.generate("a")


def test_losing_a_rank_ends_the_call(llm: LLM, made: list[EchoReplicas]) -> None:
    made[0].lose_after = 0
    with pytest.raises(session.EngineLostError, match="rank 1 was killed") as error:
        llm.generate("hello")
    assert error.value.exit_code == 3


def test_close_is_once_and_for_all(llm: LLM, made: list[EchoReplicas]) -> None:
    llm.close()
    llm.close()
    assert made[0].closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_closing_ends_a_call_that_runs(llm: LLM) -> None:
    stream = llm.stream("hello")
    next(stream)
    llm.close()
    with pytest.raises(session.EngineLostError, match="closed while it generated"):
        next(stream)


def test_a_request_that_an_engine_refuses_is_an_error(
    llm: LLM, made: list[EchoReplicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, raised in ((INVALID_REQUEST, True), (None, False)):
        monkeypatch.setattr(made[0], "poll", lambda timeout, code=code: [
            Delta(request_id=list(made[0].submitted)[-1], finish_reason="error", error="no", error_code=code)
        ])  # fmt: skip
        if raised:
            with pytest.raises(ValueError, match="no"):
                llm.generate("a")
        else:
            assert llm.generate("a")[0].outputs[0].error == "no"


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (None, None, "prompts=None is no prompt"),
        ([None], None, "prompt=None is no prompt"),
        ("a", {"max_tokens": 3}, r"give SamplingParams\(\.\.\.\)"),
        ("a", 3, "give one SamplingParams"),
        (["a"], [3], "give one SamplingParams"),
    ],
)
def test_things_of_the_wrong_kind(llm: LLM, prompts: Any, params: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        llm.generate(prompts, params)


def test_without_tokenizer_only_token_ids(made: list[EchoReplicas]) -> None:
    path = chain(["a"]).path
    with LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24) as llm:
        assert llm.generate({"prompt_token_ids": [BOS, EOS]})[0].outputs[0].token_ids == [BOS, EOS]
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.generate("text")
        with pytest.raises(ValueError, match=r"stop=.*needs text"):
            llm.generate([[BOS]], SamplingParams(stop="x"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_modellen": 5}, "did you mean max_model_len?"),
        ({"max_model_len": "5"}, "max_model_len='5'"),
        ({"topology": "EP2"}, "did you mean EP2DP1?"),
        ({"topology": "EP5DP1"}, "use EP4DP1"),
        ({"dtype": "int3"}, "int3"),
        ({"max_model_len": 100_000}, "max_model_len=100000"),
        ({"topology": 3}, "topology=3 is not allowed"),
        ({"seed": 10**23}, "seed="),
        ({"chat_template": "nowhere.jinja"}, "chat_template='nowhere.jinja' cannot be read"),
        ({"chat_template": "other"}, "neither a file nor the name of a template of this model (it has: none)"),
        ({"generation_config": "/nowhere"}, "generation_config='/nowhere' names no file"),
        ({"tensor_parallel_size": 2}, "one topology says it all"),
        ({"quantization": "fp8"}, "quantization='fp8' is not allowed; use int8 or int4"),
    ],
)
def test_wrong_options_are_named(made: list[EchoReplicas], options: dict[str, Any], says: str) -> None:
    path = chain(["a"]).path
    with pytest.raises(ValueError) as error:
        LLM(str(path), **options)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert made == []


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, made: list[EchoReplicas]) -> None:
    monkeypatch.setattr(EchoReplicas, "failure", Failed(reason="engine gone"), raising=False)
    monkeypatch.setattr(EchoReplicas, "__setattr__", lambda self, name, value: None if name == "failure" else
                        object.__setattr__(self, name, value))  # fmt: skip
    with pytest.raises(session.EngineLostError, match="engine gone") as error:
        LLM(str(chain(["a"]).path), kv_cache_memory_bytes=1 << 24)
    assert error.value.exit_code == 1 and made[0].closed == 1


def test_no_chat_template_is_said(made: list[EchoReplicas]) -> None:
    with LLM(str(chain(["a"]).path), kv_cache_memory_bytes=1 << 24) as llm:
        with pytest.raises(ValueError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
