"""LoRA in one process: what is trained, the switch, merging, files, and adapters that change nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from fsdp_helpers import CONFIGS, VOCAB, batch_of, build_engine, model_section, nll, rows
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.engine import Engine
from rlctl.errors import CheckpointError, ConfigError, EngineError, GuardError
from rlctl.generation import GenerateRequest, SamplingParams, ScoreRequest
from rlctl.logits import LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.records import BackendKind
from rlctl.sync import sync_weights
from rlctl.topology import Topology
from rlctl_fsdp.lora import effect, inject, merge
from rlctl_fsdp.rollout import HFRollout
from rlctl_fsdp.rollout_weights import load_named

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'rlctl-plugin-fsdp[lora]'")

PLAN = MicroBatchPlan(max_tokens=40)
LORA = {
    "rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear", "exclude_modules": None, "use_rslora": False,
}  # fmt: skip


def section(name: str = "llama", **more: Any) -> dict[str, Any]:
    return model_section(name, lora={**LORA, **more}, seed=3)


def provider(engine: Engine) -> Any:
    return engine._pm.get_plugin("provider")


def trained(name: str = "llama", steps: int = 2, **more: Any) -> Engine:
    engine = build_engine(section(name, **more), {"lr": 5e-2})
    for _ in range(steps):
        engine.train_batch(batch_of(rows((9, 4, 13))), nll, PLAN)
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Two steps of training behind it; tests leave it as it is."""
    return trained()


def test_only_adapters_are_trained(engine):
    hf = provider(engine)._root.model
    names = {n for n, p in hf.named_parameters() if p.requires_grad}
    assert names == {n for n, _ in hf.named_parameters() if merge.is_adapter(n)}
    held = {id(p) for group in provider(engine)._stepper.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in hf.parameters() if p.requires_grad}
    assert len(names) == 2 * 14
    start = dict(build_engine(model_section("llama", seed=3), forward_only=True).export_weights())
    for name, tensor in hf.named_parameters():
        if not merge.is_adapter(name):
            assert torch.equal(tensor, start[name.replace(".base_layer.", ".")]), name
    assert all(float(p.detach().abs().max()) > 0 for n, p in hf.named_parameters() if merge.is_adapter(n))


def test_the_adapted_model_starts_as_the_base_model():
    batch = batch_of(rows((9, 4)))
    plain = build_engine(model_section("llama", seed=3)).infer_batch(batch, PLAN)["log_probs"]
    assert torch.equal(build_engine(section()).infer_batch(batch, PLAN)["log_probs"], plain)


def test_the_reference_by_the_switch_equals_a_separate_one(engine):
    batch = batch_of(rows((9, 4, 13), seed=5))
    reference = build_engine(model_section("llama", seed=3), forward_only=True).infer_batch(batch, PLAN)["log_probs"]
    adapted = engine.infer_batch(batch, PLAN)["log_probs"]
    assert float((engine.infer_batch(batch, PLAN, base=True)["log_probs"] - reference).abs().max()) == 0
    assert float((adapted - reference).abs().max()) > 1e-2
    # And the adapters are back.
    assert torch.equal(engine.infer_batch(batch, PLAN)["log_probs"], adapted)


def test_the_switch_comes_back_after_an_error(engine):
    batch = batch_of(rows((9, 4)))
    adapted = engine.infer_batch(batch, PLAN)["log_probs"]
    with pytest.raises(Exception, match="token"):
        engine.infer_batch(batch.with_items(input_ids=batch.items["input_ids"] + VOCAB), PLAN, base=True)
    assert torch.equal(engine.infer_batch(batch, PLAN)["log_probs"], adapted)


def test_a_model_without_adapters_is_no_base_of_itself():
    with pytest.raises(EngineError, match="cannot score as its base model"):
        build_engine(model_section("llama"), forward_only=True).infer_batch(batch_of(rows((4,))), PLAN, base=True)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gpt2", "gpt-neox", "qwen3-moe"])
def test_the_merged_export_is_the_adapted_model(name):
    engine = trained(name)
    batch = batch_of(rows((9, 4, 13), seed=5))
    merged = {n: t.clone() for n, t in engine.export_weights()}
    plain = build_engine(model_section(name, seed=3), forward_only=True)
    assert list(merged) == [n for n, _ in plain.export_weights()]
    before = plain.infer_batch(batch, PLAN)["log_probs"]
    report = load_named(provider(plain)._root.model, iter(merged.items()))
    assert not report["missing"]
    assert not report["unexpected"]
    adapted = engine.infer_batch(batch, PLAN)["log_probs"]
    assert float((plain.infer_batch(batch, PLAN)["log_probs"] - adapted).abs().max()) < 2e-6
    assert float((before - adapted).abs().max()) > 1e-2


def test_merging_leaves_what_is_trained_alone(engine):
    held = {n: p.clone() for n, p in provider(engine)._root.model.named_parameters()}
    first = {n: t.clone() for n, t in engine.export_weights()}
    assert all(torch.equal(held[n], p) for n, p in provider(engine)._root.model.named_parameters())
    assert all(torch.equal(first[n], t) for n, t in engine.export_weights())
    low = dict(engine.export_weights("bfloat16"))
    # Rounded once, from float32.
    assert all(torch.equal(low[n], t.to(torch.bfloat16)) for n, t in first.items())


# ---- sync -----------------------------------------------------------------------------------------------------------
def rollout() -> Engine:
    """The embedded rollout; its section has no adapters, as a run gives it."""
    made = Engine(HFRollout(), BackendKind.ROLLOUT, "hf")
    made.build(Topology(), {"device": "cpu"}, {"config": dict(CONFIGS["llama"]), "dtype": "float32"})
    return made


def says(engine: Engine, ids: list[int]) -> torch.Tensor:
    return torch.tensor(engine.score(ScoreRequest([ids]))[0].log_probs[1:])


@pytest.mark.parametrize("share", [True, False])
def test_the_rollout_serves_the_adapted_model_after_a_sync(engine, share):
    ids = rows((12,), seed=5)[0]
    batch = batch_of([ids], prompt=1)
    adapted, base = (engine.infer_batch(batch, PLAN, base=b)["log_probs"][1:] for b in (False, True))
    served = rollout()
    report = sync_weights(engine, served, 1, share=share, verify=True, dtype=None)
    assert report.how == ("shared" if share else "copy")
    assert float((says(served, ids.tolist()) - adapted).abs().max()) < 2e-6
    assert float((says(served, ids.tolist()) - base).abs().max()) > 1e-2
    greedy = SamplingParams(n=1, temperature=0.0, max_tokens=6, ignore_eos=True)
    found = served.generate(GenerateRequest([ids.tolist()], greedy))[0].token_ids
    whole = torch.cat([ids, torch.tensor(found)])
    scores = provider(engine)._root.model(input_ids=whole[None], use_cache=False).logits[0, len(ids) - 1 : -1]
    assert list(found) == scores.argmax(-1).tolist()


def test_a_sync_that_leaves_the_adapters_out_is_refused(engine, monkeypatch):
    """Without this check it passes every other: each tensor comes once, and what is served is what was sent."""
    monkeypatch.setattr(merge.Merged, "_merge", _base_alone)
    with pytest.raises(GuardError, match="do not reach whoever takes them"):
        sync_weights(engine, rollout(), 1, share=False, verify=True, dtype=None)
    monkeypatch.setattr(merge.Merged, "check", lambda self: None)
    sync_weights(engine, rollout(), 1, share=False, verify=True, dtype=None)


def _base_alone(self: Any, layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    self._at_work += bool(merge.delta(layer).any())
    return merge.whole(tensor)


def test_changes_that_the_dtype_rounds_away_are_refused():
    engine = build_engine(section() | {"dtype": "bfloat16"}, {"lr": 1e-12})
    engine.train_batch(batch_of(rows((9,))), nll, PLAN)
    with pytest.raises(GuardError, match="are the base weights"):
        list(engine.export_weights())


# ---- files ----------------------------------------------------------------------------------------------------------
def test_peft_loads_the_adapter_directory(engine, tmp_path):
    assert engine.export_adapters(tmp_path / "adapter")
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "adapter",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["llama"]))
    start = build_engine(model_section("llama", seed=3), forward_only=True).export_weights()
    base.load_state_dict(dict(start), strict=True)
    loaded: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    ids = rows((12,), seed=5)[0][None]
    mine = provider(engine)._root.model(input_ids=ids, use_cache=False).logits
    assert float((loaded(input_ids=ids, use_cache=False).logits - mine).detach().abs().max()) < 1e-6
    with loaded.disable_adapter():
        assert float((loaded(input_ids=ids, use_cache=False).logits - mine).detach().abs().max()) > 1e-2
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, sorted(config.target_modules)[:2]) == (4, 8.0, ["down_proj", "gate_proj"])


def test_a_checkpoint_holds_adapters_and_goes_on_bit_equal(engine, tmp_path):
    engine.save_state(tmp_path / "state")
    names = [n for n, p in provider(engine)._root.model.named_parameters() if p.requires_grad]
    stored = set(FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata)
    moments = {f"optim.{n}.{moment}" for n in names for moment in ("exp_avg", "exp_avg_sq", "step")}
    assert stored == {f"model.{n}" for n in names} | moments
    resumed = build_engine(section(), {"lr": 5e-2})
    resumed.load_state(tmp_path / "state")
    batch = batch_of(rows((9, 4, 13)))
    other = trained(steps=2)
    steps = [e.train_batch(batch, nll, PLAN).step for e in (resumed, other)]
    assert steps[0] == steps[1]
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(resumed.export_weights(), other.export_weights(), strict=True)
    )


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (lambda: section() | {"seed": 4}, "adapters on another base model"),
        (lambda: model_section("llama", seed=3), "adapters in the checkpoint, none here"),
        (lambda: section(rank=8), r"found:   model.lora.rank=8\n +wanted:  model.lora.rank=4"),
    ],
)
def test_a_checkpoint_of_another_base_or_rank_is_refused(engine, tmp_path, other, found):
    engine.save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match=found):
        build_engine(other()).load_state(tmp_path / "state")


# ---- which layers ---------------------------------------------------------------------------------------------------
def layers(targets: Any, name: str = "llama", **more: Any) -> list[str]:
    engine = build_engine(section(name, target_modules=targets, **more))
    return [n for n, _ in inject.adapted_layers(provider(engine)._root.model)]


def test_target_modules_are_names_or_a_regular_expression():
    assert layers(["q_proj", "v_proj"]) == [
        f"model.layers.{i}.self_attn.{n}" for i in range(2) for n in ("q_proj", "v_proj")
    ]
    assert layers(r"model\.layers\.1\..*_proj", exclude_modules=["down_proj"]) == [
        *(f"model.layers.1.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")),
        "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "targets", "found"),
    [
        ("llama", ["q_proj", "w_proj"], "'w_proj' matches no layer"),
        ("llama", ["lm_head"], "matches lm_head, a Linear"),
        ("llama", ["embed_tokens"], "a Embedding"),
        ("llama", "q_proj", "'q_proj' matches no layer"),
        ("llama", "q_proj", "next:    model.lora.target_modules=[q_proj]: text alone is a regular expression"),
        ("llama", ["lm_head"], "the head, which takes no adapter, as the loss reads its weight by itself"),
        ("llama", r"model\.layer\..*_proj", r"'model\.layer\..*_proj' matches no layer"),
        ("llama", "*proj", "no regular expression"),
        ("qwen3-moe", ["q_proj", "gate_proj"], "one tensor for all of them"),
        ("qwen3-moe", ["gate"], "a Qwen3MoeTopKRouter"),
    ],
)
def test_targets_that_take_no_adapter_are_refused(name, targets, found):
    with pytest.raises(ConfigError) as caught:
        layers(targets, name)
    assert found in str(caught.value)


def test_a_mixture_of_experts_says_that_its_experts_have_none():
    engine = build_engine(section("qwen3-moe"))
    assert "fused experts have none" in engine.info.notes["lora"]


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(EngineError) as caught:
        build_engine(section())
    assert caught.value.next == "pip install 'rlctl-plugin-fsdp[lora]'"


# ---- the effect probe -----------------------------------------------------------------------------------------------
def test_the_probe_leaves_no_trace():
    engine = build_engine(section())
    hf = provider(engine)._root.model
    assert all(p.grad is None for p in hf.parameters())
    assert all(not p.any() for n, p in hf.named_parameters() if ".lora_B." in n)
    state = torch.get_rng_state()
    provider(engine)._check_adapters()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_probe_finds_its_weights_again_where_they_were_moved_meanwhile():
    """As they are with engine.param_offload, on an accelerator."""
    hf = provider(trained())._root.model
    before = {n: p.detach().clone() for n, p in hf.named_parameters()}
    with effect.perturbed(hf):
        for n, p in hf.named_parameters():
            assert torch.equal(p, before[n]) is (".lora_B." not in n)
            p.data = p.data.clone()
    assert all(torch.equal(p, before[n]) for n, p in hf.named_parameters())


def _bypassed(layer: Any) -> None:
    """The model multiplies by the weight itself, as fused kernels do."""
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)


def _detached(layer: Any) -> None:
    plain = layer.lora_B["default"].forward
    layer.lora_B["default"].forward = lambda x: plain(x).detach()


@pytest.mark.parametrize("break_it", [_bypassed, _detached])
@pytest.mark.parametrize("only", [None, "model.layers.1.mlp.up_proj"])
def test_adapters_that_change_nothing_are_refused(monkeypatch, break_it, only):
    add = inject.add_adapters

    def broken(model: Any, *args: Any) -> Any:
        for name, layer in inject.adapted_layers(add(model, *args)):
            if only in (None, name):
                break_it(layer)
        return model

    monkeypatch.setattr("rlctl_fsdp.rooted.add_adapters", broken)
    with pytest.raises(EngineError) as caught:
        build_engine(section())
    assert caught.value.what == (
        "the adapters of model.lora change nothing"
        if only is None
        else "some adapters of model.lora would never learn: no gradient reaches them"
    )
    assert only is None or only in str(caught.value)


# ---- dtypes, dropout, value models ----------------------------------------------------------------------------------
def test_the_base_may_be_bfloat16_under_adapters_in_float32():
    engine = build_engine(section() | {"dtype": "bfloat16"}, {"lr": 5e-2})
    hf = provider(engine)._root.model
    assert {str(p.dtype) for n, p in hf.named_parameters() if merge.is_adapter(n)} == {"torch.float32"}
    assert {str(p.dtype) for n, p in hf.named_parameters() if not merge.is_adapter(n)} == {"torch.bfloat16"}
    batch = batch_of(rows((9, 4, 13)))
    losses = [engine.train_batch(batch, nll, PLAN).loss for _ in range(4)]
    assert losses[-1] < losses[0] - 0.05
    assert {t.dtype for _, t in engine.export_weights()} == {torch.bfloat16}


def test_dropout_is_repeatable_and_off_in_scoring():
    batch = batch_of(rows((9, 4, 13)))
    ends = []
    for _ in range(2):
        engine = build_engine(section(dropout=0.5), {"lr": 5e-2})
        ends.append([engine.train_batch(batch, nll, PLAN).loss for _ in range(3)])
        scores = [engine.infer_batch(batch, PLAN)["log_probs"] for _ in range(2)]
        assert torch.equal(*scores)
    assert ends[0] == ends[1]
    assert ends[0] != _losses(batch)


def _losses(batch: Any) -> list[float]:
    engine = build_engine(section(), {"lr": 5e-2})
    return [engine.train_batch(batch, nll, PLAN).loss for _ in range(3)]


def _to_one(reader: Any, batch: Any) -> LossOutput:
    values = reader.values()
    return LossOutput(loss=((values - 1) ** 2 * batch.items["item_weight"]).sum(), items={})


def test_a_value_model_trains_its_head_beside_the_adapters(tmp_path):
    engine = build_engine(section() | {"model_type": "value_model"}, {"lr": 5e-2})
    names = {n for n, p in provider(engine)._root.model.named_parameters() if p.requires_grad}
    assert {n for n in names if not merge.is_adapter(n)} == {"score.weight"}
    assert len(names) == 2 * 14 + 1
    assert not engine.export_adapters(tmp_path / "adapter"), "its head is no adapter"
    batch = batch_of(rows((9, 4)))
    before = engine.infer_batch(batch, PLAN, ("values",))["values"]
    for _ in range(2):
        engine.train_batch(batch, _to_one, PLAN)
    after = engine.infer_batch(batch, PLAN, ("values",))["values"]
    assert float((after - before).abs().max()) > 0.1
    plain = build_engine(model_section("llama", seed=4, model_type="value_model"), forward_only=True)
    assert not load_named(provider(plain)._root.model, engine.export_weights())["missing"]
    assert float((plain.infer_batch(batch, PLAN, ("values",))["values"] - after).abs().max()) < 2e-6
