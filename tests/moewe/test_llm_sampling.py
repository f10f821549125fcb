"""What `LLM` makes of sampling parameters, on real ranks of a scripted checkpoint: n, ends, bad words, prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from moewe import LLM, SamplingParams
from tests.support.chain import BYTE_0, FIRST_ID, Chain, byte_id, chain

MODEL_LEN = 64


@pytest.fixture(scope="module")
def script() -> Chain:
    return chain(["AB", "CD", "EF", "GH", "IJ"])


@pytest.fixture(scope="module")
def llm(script: Chain) -> Iterator[LLM]:
    with LLM(str(script.path), max_model_len=MODEL_LEN, kv_cache_memory_bytes=1 << 22, threads=1) as opened:
        yield opened


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 32, **fields})


# --- P-TOK-05 ---------------------------------------------------------------------------------------------------------
def test_a_stop_string_across_token_borders(llm: LLM) -> None:
    (output,) = llm.generate("x", greedy(stop=["CDEFG"]))[0].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("AB", "stop", "CDEFG")
    assert len(output.token_ids) == 4
    assert "".join(llm.stream("x", greedy(stop=["CDEFG"]))) == "AB"
    (output,) = llm.generate("x", greedy(stop=["CDEFG"], include_stop_str_in_output=True))[0].outputs
    assert (output.text, output.finish_reason) == ("ABCDEFG", "stop")
    (output,) = llm.generate("x", greedy(stop=["CD", "GH"], min_tokens=2))[0].outputs
    assert (output.text, output.stop_reason) == ("ABCDEF", "GH")


# --- P-TOK-06 ---------------------------------------------------------------------------------------------------------
def test_stop_tokens_and_end_tokens(llm: LLM, script: Chain) -> None:
    third = FIRST_ID + 2
    (output,) = llm.generate("x", greedy(stop_token_ids=[third]))[0].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("ABCD", "stop", third)
    assert output.token_ids == script.token_ids[:3]
    (output,) = llm.generate("x", greedy())[0].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (script.text, "stop", None)
    assert output.token_ids == script.token_ids
    (output,) = llm.generate("x", greedy(ignore_eos=True, max_tokens=12))[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (12, "length")
    (output,) = llm.generate("x", greedy(include_stop_str_in_output=True, skip_special_tokens=False))[0].outputs
    assert output.text == script.text + "</s>"


def test_several_outputs_of_several_prompts(llm: LLM) -> None:
    # Of equal logits, so that choices differ: a large temperature.
    params = SamplingParams(n=3, temperature=100, seed=7, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    first, second = llm.generate(["ab", "abc"], params)
    for result, prompt in ((first, "ab"), (second, "abc")):
        assert [output.index for output in result.outputs] == [0, 1, 2] and result.finished
        assert len({tuple(output.token_ids) for output in result.outputs}) == 3
        assert all(output.logprobs is not None and len(output.logprobs) == 6 for output in result.outputs)
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(result.prompt_token_ids) >= len(prompt)
    (alone,) = llm.generate("ab", SamplingParams(temperature=100, seed=7, max_tokens=6, ignore_eos=True))
    assert alone.outputs[0].token_ids == first.outputs[0].token_ids
    with pytest.raises(ValueError, match="n=3 is not allowed in stream"):
        next(llm.stream("ab", params))


# --- P-API-01 ---------------------------------------------------------------------------------------------------------
def test_a_prompt_may_be_judged_alone(llm: LLM) -> None:
    prompt = [byte_id(97), FIRST_ID, FIRST_ID + 1, 5]
    (result,) = llm.generate({"prompt_token_ids": prompt}, greedy(max_tokens=0, prompt_logprobs=1))
    assert result.outputs[0].token_ids == [] and result.outputs[0].finish_reason == "length"
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    entries = result.prompt_logprobs[1:]
    assert len(entries) == 3
    for token, entry in zip(prompt[1:], entries, strict=True):
        assert entry is not None and token in entry
    assert [entry[token].rank == 1 for token, entry in zip(prompt[1:], entries, strict=True) if entry] == [
        True, True, False,
    ]  # fmt: skip
    assert len(entries[2] or {}) == 2
    (result,) = llm.generate([[5]], greedy(max_tokens=0, prompt_logprobs=1))
    assert result.prompt_logprobs == [None]
    (result,) = llm.generate([[5]], greedy(max_tokens=0))
    assert result.prompt_logprobs is None


# --- P-API-02 ---------------------------------------------------------------------------------------------------------
def test_log_probabilities_are_finite_whatever_is_banned(llm: LLM) -> None:
    bias = {token: -100.0 for token in range(BYTE_0, FIRST_ID)}
    for params in (greedy(top_k=1, logprobs=5), greedy(logit_bias=bias, logprobs=20)):
        (output,) = llm.generate("x", params)[0].outputs
        assert output.logprobs is not None
        assert all(math.isfinite(entry.logprob) for entries in output.logprobs for entry in entries.values())


def test_bad_words_are_not_said(llm: LLM) -> None:
    plain = llm.generate("x", greedy())[0].outputs[0].token_ids
    word = (FIRST_ID + 1, FIRST_ID + 2)
    other = llm.generate("x", greedy(bad_word_tokens=[word], max_tokens=5))[0].outputs[0].token_ids
    assert other[:2] == plain[:2] and other[2] != word[1]
    other = llm.generate("x", greedy(bad_words=["x"], bad_word_tokens=[[FIRST_ID]], max_tokens=1))[0].outputs[0]
    assert other.token_ids != plain[:1]


# --- P-API-05 ---------------------------------------------------------------------------------------------------------
def test_ids_that_are_no_tokens_are_refused_and_the_next_call_runs(llm: LLM, script: Chain) -> None:
    for fields, says in (({"logit_bias": {99999: 5}}, "99999"), ({"stop_token_ids": [99999]}, "99999")):
        with pytest.raises(ValueError, match=says):
            llm.generate("x", greedy(**fields))
    assert llm.generate("x", greedy())[0].outputs[0].token_ids == script.token_ids
