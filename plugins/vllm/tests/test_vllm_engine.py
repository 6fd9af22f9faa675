"""One vLLM in this process: what requests ask of it, what is refused in words, and what is left when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", reason="vllm is not installed (rlctl-plugin-vllm; it has an environment of its own)")

import vllm_tiny as tiny

from rlctl.engine import Engine
from rlctl.errors import CapabilityError, EngineError
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest
from rlctl_vllm import compat, requests

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 2, 1]]


class Letters:
    """A tokenizer of one character a token, which is all that stop strings need."""

    eos_token_id = None

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i) if i < 26 else str(i - 26) for i in ids)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = tiny.make_engine(tiny.LLAMA, kv_cache_mib=32, max_model_len=64)
    engine.load_weights(iter(tiny.weights_of(tiny.hf_model(tiny.LLAMA, 0)).items()), 1)
    yield engine
    engine.shutdown()


def provider(engine: Engine) -> Any:
    return engine._pm.get_plugin("provider")


def generate(engine: Engine, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[Completion]:
    return engine.generate(GenerateRequest(prompts, SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params})))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"n": 0}, "with this n"),
        ({"max_tokens": 62}, "longer than the engine's rows"),
        ({"stop": ("a",)}, "tokenizer"),
    ],
)
def test_what_vllm_would_take_as_something_else_is_refused(engine: Engine, params: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        generate(engine, **params)


def test_tokens_that_the_model_does_not_know_are_refused_by_row(engine: Engine) -> None:
    for prompt, words in (([], "prompt 1 is empty"), ([3, 35], "prompt 1 has a token"), ([-1], "prompt 1 has a token")):
        with pytest.raises(EngineError, match=words):
            generate(engine, [[1], prompt])
    with pytest.raises(EngineError, match="sequence 0 has a token"):
        engine.score(ScoreRequest([[99]]))
    with pytest.raises(EngineError, match="longer than the engine's rows"):
        engine.score(ScoreRequest([[1] * 64]))
    assert len(engine.score(ScoreRequest([[1] * 63]))[0].log_probs) == 63


def test_ends_of_rows_are_what_rlctl_says(engine: Engine) -> None:
    free = generate(engine, temperature=0.0)
    ends = free[0].token_ids[1]
    held = provider(engine)
    before = held._end_ids
    held._end_ids = (ends,)
    try:
        out = generate(engine, temperature=0.0, ignore_eos=False)
        again = generate(engine, temperature=0.0)
    finally:
        held._end_ids = before
    assert out[0].token_ids == free[0].token_ids[:2]
    assert out[0].finish_reason is FinishReason.STOP
    assert [c.token_ids for c in again] == [c.token_ids for c in free]


def test_a_stop_string_ends_a_row_and_its_tokens_are_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free = generate(engine, temperature=0.0)
    monkeypatch.setattr(provider(engine), "_tokenizer", Letters())
    text = Letters().decode(free[2].token_ids)
    out = generate(engine, temperature=0.0, stop=(text[2:4],))
    for plain, c in zip(free, out, strict=True):
        whole = Letters().decode(plain.token_ids)
        end = next((k for k in range(1, 9) if text[2:4] in whole[:k]), None)
        assert c.token_ids == plain.token_ids[:end]
        assert len(c.log_probs) == len(c.token_ids)
        assert (c.finish_reason is FinishReason.STOP) is (end is not None)
    assert out[2].finish_reason is FinishReason.STOP
    assert not compat.unfinished(provider(engine).llm)


def test_a_caller_that_fails_leaves_no_row_in_the_engine(engine: Engine) -> None:
    def fail(completion: Completion) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(GenerateRequest(PROMPTS, SamplingParams(n=8, max_tokens=9)), fail)
    assert not compat.unfinished(provider(engine).llm)
    assert len(generate(engine)) == 3


def test_seeds_of_rows_are_their_own() -> None:
    seeds = {requests.row_seed(seed, row) for seed in range(40) for row in range(50)}
    assert len(seeds) == 2000
    assert all(0 <= s < 1 << 63 for s in seeds)


def test_a_model_without_weights_is_not_served(engine: Engine) -> None:
    held = provider(engine)
    held._whole = False
    try:
        with pytest.raises(EngineError, match="no weights yet"):
            generate(engine)
    finally:
        held._whole = True


def test_a_second_vllm_in_one_process_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match="has a vLLM already"):
        tiny.make_engine(tiny.LLAMA, kv_cache_mib=32)
    assert len(generate(engine)) == 3


def test_a_model_that_cannot_be_followed_is_refused_when_it_is_built(engine: Engine) -> None:
    engine.shutdown()
    gpt2 = {"model_type": "gpt2", "vocab_size": 35, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    with pytest.raises(CapabilityError, match="gpt2"):
        tiny.make_engine(gpt2, kv_cache_mib=32)
    with pytest.raises(EngineError, match="multiple of 32"):
        tiny.make_engine({**tiny.QWEN3_MOE, "moe_intermediate_size": 24}, kv_cache_mib=32)
    with pytest.raises(EngineError, match="kv_cache_mib"):
        tiny.make_engine({**tiny.LLAMA, "max_position_embeddings": 65536}, kv_cache_mib=1)


def test_an_engine_that_ends_leaves_the_process_as_it_was() -> None:
    threads = torch.get_num_threads()
    other = tiny.make_engine(tiny.LLAMA, kv_cache_mib=32)
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    other.shutdown()
    assert dist.is_initialized()
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == 1


def test_raw_log_probs_are_those_of_the_model() -> None:
    module = tiny.hf_model(tiny.LLAMA, 0)
    raw = tiny.make_engine(tiny.LLAMA, kv_cache_mib=32, logprobs_mode="raw")
    try:
        raw.load_weights(iter(tiny.weights_of(module).items()), 1)
        out = generate(raw, temperature=0.5, top_k=3, seed=1)
    finally:
        raw.shutdown()
    for c in out:
        prompt = PROMPTS[c.prompt_index]
        with torch.no_grad():
            rows = module(torch.tensor([[*prompt, *c.token_ids]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = rows.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0].tolist()
        assert c.log_probs == pytest.approx(wanted, abs=1e-4)


def test_the_plan_counts_the_cache_that_is_set_aside() -> None:
    from rlctl.catalogue_memory import rollout_policy
    from rlctl_vllm import engine
    from rlctl_vllm.config import VLLMConfig

    policy = rollout_policy("vllm")
    assert policy.cache_key in VLLMConfig.model_fields
    assert policy.cache_mib_on_cpu == engine._CPU_CACHE_MIB
