"""Generation: right tokens and log-probs for any model family, whatever shares the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_helpers import CONFIGS, VOCAB
from rollout_helpers import PROMPTS, attached, generate, make_model, plain_log_probs

from rlctl.errors import EngineError
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest
from rlctl_fsdp.static_cache import StaticCache


@pytest.fixture(params=["joined", "shared"])
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to store prompts; which one is taken depends on their length, and these are short."""
    monkeypatch.setattr(StaticCache, "share_from", 0 if request.param == "shared" else 1 << 30)
    return request.param


FAMILIES = {**dict.fromkeys(CONFIGS, "static"), "lfm2": "dynamic", "bloom": "dynamic", "openai-gpt": "recompute"}


@pytest.mark.usefixtures("storage")
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_a_plain_forward_pass(name: str) -> None:
    module = make_model(name)
    engine, provider = attached(module, name)
    for temperature in (1.0, 0.7):
        out = generate(engine, PROMPTS, n=2, temperature=temperature)
        assert provider.notes["decoding"].startswith(FAMILIES[name]), provider.notes
        for c in out:
            plain = plain_log_probs(module, PROMPTS[c.prompt_index], c.token_ids, temperature)
            assert c.log_probs == pytest.approx(plain, abs=2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "qwen3-moe", "gpt2", "lfm2"])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8}], ids=["plain", "greedy", "filtered"]
)
def test_a_row_does_not_see_its_batch(name: str, params: dict[str, Any]) -> None:
    engine, _ = attached(make_model(name), name)
    together = generate(engine, PROMPTS, **params)
    for i in range(len(PROMPTS)):
        # Row i samples from the stream of (seed, i): the others become the shortest possible, one of their tokens each.
        lone = generate(engine, [*([[2]] * i), PROMPTS[i]], **params)[i]
        assert lone.token_ids == together[i].token_ids
        assert lone.log_probs == pytest.approx(together[i].log_probs, abs=1e-5)
    reference = {(c.prompt_index, c.sample_index): c for c in generate(engine, PROMPTS, n=3, **params)}
    for limits in ({"max_batch_rows": 1}, {"max_batch_rows": 4}, {"max_batch_tokens": 40}):
        small, _ = attached(make_model(name), name, **limits)
        for c in generate(small, PROMPTS, n=3, **params):
            other = reference[c.prompt_index, c.sample_index]
            assert c.token_ids == other.token_ids
            assert c.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.usefixtures("storage")
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "openai-gpt"])
def test_rows_that_end_leave_the_others_as_they_were(name: str) -> None:
    engine, _ = attached(make_model(name), name)
    free = generate(engine, PROMPTS, n=4, max_tokens=12)
    ends = tuple({c.token_ids[k] for k, c in enumerate(free[:6], 2)})
    cut = generate(engine, PROMPTS, n=4, max_tokens=12, stop_token_ids=ends)
    assert len({len(c.token_ids) for c in cut}) > 2, "rows must end at different steps for this test to say something"
    for whole, c in zip(free, cut, strict=True):
        at = next((i + 1 for i, t in enumerate(whole.token_ids) if t in ends), None)
        assert c.token_ids == whole.token_ids[:at]
        assert c.log_probs == pytest.approx(whole.log_probs[:at], abs=1e-5)
        assert c.finish_reason is (FinishReason.LENGTH if at is None else FinishReason.STOP)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2"])
def test_both_ways_to_store_prompts_are_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for share_from in (0, 1 << 30):
        monkeypatch.setattr(StaticCache, "share_from", share_from)
        engine, _ = attached(make_model(name), name)
        results.append(generate(engine, PROMPTS, n=5, max_tokens=14, stop_token_ids=(4, 5, 6, 7, 8, 9)))
    for shared, joined in zip(*results, strict=True):
        assert shared.token_ids == joined.token_ids
        assert shared.log_probs == pytest.approx(joined.log_probs, abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-neox"])
def test_greedy_equals_transformers_generate(name: str) -> None:
    module = make_model(name).eval()
    engine, _ = attached(module, name)
    for prompt, c in zip(PROMPTS, generate(engine, PROMPTS, temperature=0.0, max_tokens=14), strict=True):
        ids = torch.tensor([prompt])
        theirs = module.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert c.token_ids == theirs[0, len(prompt) :].tolist()
        assert c.log_probs == pytest.approx(plain_log_probs(module, prompt, c.token_ids, 1.0), abs=2e-5)


def test_seeds() -> None:
    engine, _ = attached(make_model("llama"), "llama")
    same = [[c.token_ids for c in generate(engine, PROMPTS, n=4, seed=7)] for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != [c.token_ids for c in generate(engine, PROMPTS, n=4, seed=8)]
    fresh = [[c.token_ids for c in generate(engine, PROMPTS, n=4, seed=None)] for _ in range(2)]
    assert fresh[0] != fresh[1]
    assert len({tuple(c.token_ids) for c in generate(engine, PROMPTS[:1], n=16)}) > 8


def test_on_done_streams_and_its_exception_restores_the_module() -> None:
    module = make_model("llama").train()
    engine, _ = attached(module, "llama")
    attention = module.config._attn_implementation
    seen: list[tuple[int, int]] = []
    params = SamplingParams(n=2, max_tokens=10, seed=0, stop_token_ids=tuple(range(2, 20)), ignore_eos=True)
    out = engine.generate(GenerateRequest(PROMPTS, params), lambda c: seen.append((c.prompt_index, c.sample_index)))
    assert sorted(seen) == [(c.prompt_index, c.sample_index) for c in out]
    lengths = {(c.prompt_index, c.sample_index): len(c.token_ids) for c in out}
    assert [lengths[k] for k in seen] == sorted(lengths.values()), "a row is handed over when it ends"

    def fail(_: Completion) -> None:
        assert not torch.is_grad_enabled()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(GenerateRequest(PROMPTS, params), fail)
    assert torch.is_grad_enabled()
    assert all(m.training for m in module.modules())
    assert module.config._attn_implementation == attention


def test_attached_module_is_read_live_and_given_back() -> None:
    module = make_model("llama").train()
    module.model.layers[0].eval()  # pyright: ignore[reportCallIssue, reportIndexIssue]
    module.set_attn_implementation("eager")
    engine, provider = attached(module, "llama")
    before = generate(engine, PROMPTS)
    assert provider.module is module
    modes = {name: m.training for name, m in module.named_modules()}
    assert modes[""] is True
    assert modes["model.layers.0.mlp"] is False
    assert module.config._attn_implementation == "eager"
    loss = module(input_ids=torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-5.0)
    after = generate(engine, PROMPTS)
    assert [c.token_ids for c in before] != [c.token_ids for c in after]
    for c in after:
        plain = plain_log_probs(module, PROMPTS[c.prompt_index], c.token_ids, 1.0)
        assert c.log_probs == pytest.approx(plain, abs=2e-5)


def test_a_wrong_fast_path_is_found_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = StaticCache.advance
    monkeypatch.setattr(StaticCache, "advance", lambda cache: advance(cache) + 1)
    module = make_model("gpt2")  # learned positions: a shift shows at once
    engine, provider = attached(module, "gpt2")
    out = generate(engine, PROMPTS)
    assert provider.notes["decoding"].startswith("dynamic: not static: logits differ")
    for c in out:
        plain = plain_log_probs(module, PROMPTS[c.prompt_index], c.token_ids, 1.0)
        assert c.log_probs == pytest.approx(plain, abs=2e-5)
    forced, _ = attached(module, "gpt2", path="static")
    with pytest.raises(EngineError, match="path=static"):
        generate(forced, PROMPTS)


def test_scores_and_alternatives() -> None:
    for name in ("llama", "qwen2-window", "lfm2"):
        module = make_model(name)
        engine, _ = attached(module, name, max_batch_tokens=24)
        rows = [[*p, 13, 14, 15] for p in PROMPTS]
        for row, scores in zip(rows, engine.score(ScoreRequest(rows, topk=3, temperature=1.3)), strict=True):
            assert scores.log_probs[0] == 0.0
            assert scores.log_probs[1:] == pytest.approx(plain_log_probs(module, row[:1], row[1:], 1.3), abs=2e-5)
            with torch.no_grad():
                logits = module.eval()(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1] / 1.3
            top = logits.log_softmax(-1).topk(3)
            assert scores.topk_ids == [[], *top.indices.tolist()]
            for ours, theirs in zip(scores.topk_log_probs[1:], top.values.tolist(), strict=True):
                assert ours == pytest.approx(theirs, abs=2e-5)
    with pytest.raises(EngineError, match="positive temperature"):
        engine.score(ScoreRequest([[1, 2]], temperature=0.0))


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[3], []], {}, "prompt 1 is empty"),
        ([[3, VOCAB]], {}, "does not know"),
        ([[3] * 60], {"max_tokens": 5}, "longer than the model's positions"),
        ([[3]], {"stop": ("x",)}, "tokenizer"),
        ([[3]], {"n": 0}, "this n"),
        ([[3]], {"max_tokens": 0}, "max_tokens"),
        ([[3]], {"temperature": -0.5}, "temperature"),
        ([[3]], {"temperature": float("nan")}, "temperature"),
        ([[3]], {"top_p": 0.0}, "top_p"),
        ([[3]], {"top_k": -1}, "top_k"),
    ],
)
def test_mistakes_have_a_message(prompts: list[list[int]], params: dict[str, Any], message: str) -> None:
    engine, _ = attached(make_model("gpt2"), "gpt2")
    with pytest.raises(EngineError, match=message):
        generate(engine, prompts, **params)


def test_logits_that_are_not_finite_stop_generation() -> None:
    module = make_model("llama")
    engine, _ = attached(module, "llama")
    generate(engine, PROMPTS)
    with torch.no_grad():
        module.get_output_embeddings().weight[7] = float("nan")  # pyright: ignore[reportIndexIssue, reportOptionalMemberAccess, reportArgumentType]
    with pytest.raises(EngineError, match="not finite"):
        generate(engine, PROMPTS)


def test_no_prompts_no_completions() -> None:
    engine, _ = attached(make_model("llama"), "llama")
    assert generate(engine, []) == []


def test_generation_in_half_precision_of_a_float32_module() -> None:
    module = make_model("llama")
    engine, _ = attached(module, "llama", dtype="bfloat16")
    for c in generate(engine, PROMPTS, n=2):
        plain = plain_log_probs(module, PROMPTS[c.prompt_index], c.token_ids, 1.0)
        assert c.log_probs != pytest.approx(plain, abs=1e-6), "computed in bfloat16"
        assert c.log_probs == pytest.approx(plain, abs=0.3)
    assert next(module.parameters()).dtype is torch.float32
