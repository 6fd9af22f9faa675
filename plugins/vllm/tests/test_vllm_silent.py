"""What goes wrong in silence when weights are written into a live vLLM: each test shows the error without its cure, then the cure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed (rlctl-plugin-vllm; it has an environment of its own)")

import vllm_tiny as tiny
from transformers import PreTrainedModel

from rlctl.engine import Engine
from rlctl.errors import EngineError, GuardError
from rlctl.generation import GenerateRequest, SamplingParams
from rlctl.sync import check_coverage, check_fingerprints, fingerprint_tensor
from rlctl_vllm import compat, live, loading

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 2, 1], [3, 3]]
LONG = [[(i * 11 + j * 5) % 33 + 2 for j in range(300)] for i in range(2)]
Q = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


class Serving:
    """One engine at a time: vLLM takes no second one in a process."""

    def __init__(self) -> None:
        self.config: Mapping[str, Any] | None = None
        self.engine: Engine | None = None

    def get(self, config: Mapping[str, Any]) -> Engine:
        if self.engine is None or self.config is not config:
            self.close()
            self.engine, self.config = tiny.make_engine(config, kv_cache_mib=64), config
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    serving = Serving()
    yield serving
    serving.close()


@pytest.fixture
def dense(serving: Serving) -> Engine:
    return serving.get(tiny.LLAMA)


@pytest.fixture
def tied(serving: Serving) -> Engine:
    return serving.get(tiny.QWEN2_TIED)


@pytest.fixture
def experts(serving: Serving) -> Engine:
    return serving.get(tiny.QWEN3_MOE)


@pytest.fixture(params=["dense", "experts"])
def either(request: pytest.FixtureRequest, serving: Serving) -> tuple[Engine, Mapping[str, Any]]:
    config = tiny.LLAMA if request.param == "dense" else tiny.QWEN3_MOE
    return serving.get(config), config


def provider(engine: Engine) -> Any:
    return engine._pm.get_plugin("provider")


def load(engine: Engine, weights: Mapping[str, torch.Tensor], version: int = 1) -> dict[str, Any]:
    return engine.load_weights(iter(weights.items()), version)


def gap(engine: Engine, module: PreTrainedModel, prompts: Sequence[Sequence[int]] = PROMPTS) -> float:
    """Largest difference of log-probs of greedy tokens from Hugging Face's, in nats."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    worst = 0.0
    for c in engine.generate(GenerateRequest(prompts, params)):
        prompt = list(prompts[c.prompt_index])
        with torch.no_grad():
            rows = module(torch.tensor([[*prompt, *c.token_ids]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        found = rows.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        differences = (found - torch.tensor(c.log_probs)).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, differences.max().item())
    return worst


def refuted(engine: Engine, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose fingerprints are not those of what was sent."""
    served = engine.weight_fingerprint(list(weights))
    return [name for name, tensor in weights.items() if served[name] != fingerprint_tensor(tensor)]


# ---- a part of a fused group ------------------------------------------------------------------------------------------------
def test_a_part_of_a_fused_group_alone_spoils_the_rest_of_it_and_together_does_not(dense: Engine) -> None:
    old, new = tiny.hf_model(tiny.LLAMA, 0), tiny.hf_model(tiny.LLAMA, 1)
    mixed = tiny.hf_model(tiny.LLAMA, 0)
    sent = {name: tensor for name, tensor in tiny.weights_of(new).items() if name in (Q, GATE)}
    mixed.load_state_dict({**mixed.state_dict(), **sent})
    load(dense, tiny.weights_of(old))
    assert gap(dense, old) < 1e-4
    # Without the cure: vLLM takes what is missing of the layer for padding.
    compat.reload(provider(dense).llm, iter(sent.items()))
    compat.reset_prefix_cache(provider(dense).llm)
    assert gap(dense, mixed) > 1e-2
    assert refuted(dense, tiny.weights_of(mixed)) != []
    # With it: the rest of the group is read from what is served, and goes in beside what came.
    load(dense, tiny.weights_of(old))
    answer = load(dense, sent)
    assert sorted(answer["loaded"]) == sorted(sent)
    assert gap(dense, mixed) < 1e-4
    assert refuted(dense, tiny.weights_of(mixed)) == []
    with pytest.raises(GuardError, match=r"never sent: lm_head\.weight"):
        check_coverage(dict.fromkeys(sent, ""), answer, 1)


@pytest.mark.parametrize("order", ["backwards", "by_kind"])
def test_whole_groups_go_in_whatever_order_the_names_come(either: tuple[Engine, Mapping[str, Any]], order: str) -> None:
    engine, config = either
    module = tiny.hf_model(config, 2)
    weights = tiny.weights_of(module)
    names = sorted(weights, key=lambda n: n.rsplit(".", 2)[-2:]) if order == "by_kind" else list(weights)[::-1]
    load(engine, {name: weights[name] for name in names})
    assert gap(engine, module) < 1e-4
    assert refuted(engine, weights) == []


def test_a_buffer_that_the_sender_uses_again_does_no_harm(dense: Engine) -> None:
    module = tiny.hf_model(tiny.LLAMA, 3)
    weights = tiny.weights_of(module)
    buffer = torch.empty(max(t.numel() for t in weights.values()))

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            buffer.fill_(float("nan"))

    dense.load_weights(stream(), 1)
    assert gap(dense, module) < 1e-4
    assert refuted(dense, weights) == []


# ---- stale caches -----------------------------------------------------------------------------------------------------------
def test_keys_and_values_of_old_weights_are_forgotten(dense: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tiny.hf_model(tiny.LLAMA, 0), tiny.hf_model(tiny.LLAMA, 1)
    for cured in (False, True):
        load(dense, tiny.weights_of(old))
        assert gap(dense, old, LONG) < 1e-3
        with monkeypatch.context() as without:
            if not cured:
                without.setattr(compat, "reset_prefix_cache", lambda llm: True)
            load(dense, tiny.weights_of(new))
        assert (gap(dense, new, LONG) < 1e-3) is cured


def test_weights_that_were_not_finite_once_leave_nothing_in_the_cache(
    dense: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny.hf_model(tiny.LLAMA, 1)
    good = tiny.weights_of(module)
    bad = {**good, Q: torch.full_like(good[Q], float("nan"))}
    bad["model.layers.0.self_attn.v_proj.weight"] = torch.full_like(
        good["model.layers.0.self_attn.v_proj.weight"], torch.nan
    )
    for cured in (False, True):
        load(dense, bad)
        assert gap(dense, module, LONG) == float("inf")
        with monkeypatch.context() as without:
            if not cured:
                without.setattr(compat, "clear_cache", lambda llm: None)
            load(dense, good)
        assert refuted(dense, good) == []
        assert (gap(dense, module) < 1e-4) is cured


# ---- experts ----------------------------------------------------------------------------------------------------------------
def test_experts_are_packed_again_after_a_reload(experts: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, cured in ((1, False), (2, True)):
        module = tiny.hf_model(tiny.QWEN3_MOE, seed)
        weights = tiny.weights_of(module)
        with monkeypatch.context() as without:
            if not cured:
                without.setattr(loading, "repack_experts", lambda module, first: None)
            load(experts, weights)
        assert (gap(experts, module) < 1e-4) is cured
        wrong = refuted(experts, weights)
        assert all(".experts." in name for name in wrong)
        assert (wrong == []) is cured


def test_experts_that_came_one_by_one_are_served_like_those_of_a_layer(experts: Engine) -> None:
    module = tiny.hf_model(tiny.QWEN3_MOE, 4)
    weights = tiny.weights_of(module)
    names = provider(experts)._names
    apart = {own: part for name, tensor in weights.items() for own, part in names.publish(name, tensor).items()}
    assert len(apart) > len(weights)
    load(experts, {name: apart[name] for name in sorted(apart, reverse=True)})
    assert gap(experts, module) < 1e-4
    assert refuted(experts, apart) == []
    assert refuted(experts, weights) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_of_experts_is_undone_element_by_element(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 64, 96).to(dtype)
    packed = compat.pack_experts(weight.clone(), "vec")
    assert not torch.equal(packed, weight)
    back = torch.empty_like(weight).reshape(3, -1)
    back[:, live._order((64, 96), dtype, "vec")] = packed.reshape(3, -1)
    assert torch.equal(back.reshape(weight.shape), weight)


# ---- a tied head ------------------------------------------------------------------------------------------------------------
def test_a_tied_head_follows_its_embedding(tied: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, cured in ((1, False), (2, True)):
        module = tiny.hf_model(tiny.QWEN2_TIED, seed)
        weights = tiny.weights_of(module)
        with monkeypatch.context() as without:
            if not cured:
                without.setattr(compat, "repack_head", lambda module: None)
            load(tied, weights)
        assert (gap(tied, module) < 1e-4) is cured
        assert (refuted(tied, weights) == []) is cured


# ---- the naive way ----------------------------------------------------------------------------------------------------------
def test_the_model_s_own_load_weights_does_not_reach_the_kernels(dense: Engine) -> None:
    load(dense, tiny.weights_of(tiny.hf_model(tiny.LLAMA, 0)))
    new = tiny.hf_model(tiny.LLAMA, 1)
    try:
        compat.model_of(provider(dense).llm).load_weights(iter(tiny.weights_of(new).items()))
    except (AttributeError, RuntimeError, AssertionError, ValueError):
        pass  # where it fails nothing is wrong in silence
    else:
        assert gap(dense, new) > 1e-2
    load(dense, tiny.weights_of(new))
    assert gap(dense, new) < 1e-4


# ---- a sync that is not right -----------------------------------------------------------------------------------------------
def test_a_wrong_sync_is_refused_with_the_name_and_the_next_one_is_served(dense: Engine) -> None:
    good = tiny.weights_of(tiny.hf_model(tiny.LLAMA, 1))
    pairs = list(good.items())
    for stream, kind, words in (
        ([*pairs, ("no.such.weight", torch.zeros(2))], EngineError, "no.such.weight"),
        ([*pairs[:5], (Q, good[Q][:-1]), *pairs[5:]], EngineError, Q),
        ([*pairs, pairs[3]], GuardError, pairs[3][0]),
    ):
        with pytest.raises(kind, match=words):
            dense.load_weights(iter(stream), 2)
        with pytest.raises(EngineError, match="weights of two syncs"):
            dense.generate(GenerateRequest(PROMPTS, SamplingParams(max_tokens=1)))
    load(dense, good, 3)
    assert refuted(dense, good) == []


def test_a_sender_that_fails_half_way_leaves_an_engine_that_takes_the_next_sync(
    either: tuple[Engine, Mapping[str, Any]],
) -> None:
    engine, config = either
    module = tiny.hf_model(config, 5)
    weights = tiny.weights_of(module)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:7]
        raise ConnectionError("the other side is gone")

    with pytest.raises(ConnectionError, match="gone"):
        engine.load_weights(broken(), 2)
    load(engine, weights, 3)
    assert gap(engine, module) < 1e-4
    assert refuted(engine, weights) == []


def test_one_changed_element_is_found_in_the_live_model(dense: Engine) -> None:
    weights = tiny.weights_of(tiny.hf_model(tiny.LLAMA, 1))
    load(dense, weights)
    changed = {**weights, GATE: weights[GATE].clone()}
    changed[GATE][7, 5] += 1e-3
    load(dense, changed)
    assert refuted(dense, weights) == [GATE]
    with pytest.raises(GuardError, match=GATE):
        served = dense.weight_fingerprint(list(weights))
        check_fingerprints({n: fingerprint_tensor(t) for n, t in weights.items()}, served, 1)


def test_zeros_keep_their_sign_in_a_fingerprint(dense: Engine) -> None:
    weights = tiny.weights_of(tiny.hf_model(tiny.LLAMA, 1))
    weights[Q][0, :9] = -0.0
    weights[Q][1, :9] = 0.0
    load(dense, weights)
    assert refuted(dense, weights) == []
    provider(dense)._negative_zeros.clear()
    assert refuted(dense, weights) == [Q], "the kernel's own zeros have no sign"
