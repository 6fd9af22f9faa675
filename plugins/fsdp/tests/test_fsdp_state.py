"""Export and reload, save and resume, the optimizer step, and errors that name their remedy."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil

import pytest
import torch
from fsdp_helpers import CONFIGS, VOCAB, batch_of, build_engine, model_section, nll, rows
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.errors import BatchError, CapabilityError, CheckpointError, ConfigError, EngineError
from rlctl.logits import LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.topology import Topology
from rlctl_fsdp import export
from rlctl_fsdp.phases import phase

PLAN = MicroBatchPlan(max_tokens=32)
BATCH = batch_of(rows((9, 4, 13, 9)))
EXPORTED = ["llama", "llama-tied", "qwen2", "qwen3", "gemma3", "gpt-neox", "olmo2", "qwen3-moe", "mistral", "gpt2"]


def _write(engine, directory, family) -> None:
    AutoConfig.for_model(**CONFIGS[family]).save_pretrained(directory)
    tensors = {n: t.contiguous().clone() for n, t in engine.export_weights()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("wrap", ["auto", "always"])
@pytest.mark.parametrize("family", EXPORTED)
def test_export_is_reloaded_exactly(family, wrap, tmp_path) -> None:
    engine = build_engine(model_section(family), wrap=wrap)
    engine.train_batch(BATCH, nll, PLAN)
    _write(engine, tmp_path, family)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    reloaded = build_engine({"path": str(tmp_path), "dtype": "float32"})
    again = {n: t.clone() for n, t in reloaded.export_weights()}
    first = load_file(tmp_path / "model.safetensors")
    assert again.keys() == first.keys()
    assert all(torch.equal(again[n], first[n]) for n in first)
    model.save_pretrained(tmp_path / "by-transformers")
    theirs = load_file(tmp_path / "by-transformers" / "model.safetensors")
    assert theirs.keys() == first.keys(), "the names are those that save_pretrained writes"
    assert all(torch.equal(theirs[n], first[n]) for n in first)
    scores = [e.infer_batch(BATCH, PLAN)["log_probs"] for e in (engine, reloaded)]
    torch.testing.assert_close(scores[0], scores[1], atol=0 if wrap == "auto" else 1e-6, rtol=0)
    engine.shutdown()


@pytest.mark.parametrize(("family", "asked"), [("llama", 1), ("qwen3-moe", None)])
def test_names_in_files_are_asked_for_once_where_they_are_those_in_memory(family, asked, monkeypatch) -> None:
    """To ask walks the whole model, so that once a tensor it takes longer than the copies. Where weights are fused it is needed."""
    model = build_engine(model_section(family)).local_module()
    calls: list[int] = []
    ask = export.revert_weight_conversion

    def counted(model, tensors):
        calls.append(len(tensors))
        return ask(model, tensors)

    monkeypatch.setattr(export, "revert_weight_conversion", counted)
    for _ in range(2):
        names = [name for name, _ in export.export_weights(model, None)]
    assert sorted(names) == sorted(ask(model, model.state_dict()))
    assert len(calls) == asked if asked is not None else len(calls) > 10


def test_export_is_lazy_and_casts() -> None:
    engine = build_engine(model_section("llama"))
    iterator = engine.export_weights("bfloat16")
    name, tensor = next(iterator)
    assert (name, tensor.dtype) == ("model.embed_tokens.weight", torch.bfloat16)
    assert "lm_head.weight" in dict(iterator)
    assert "lm_head.weight" not in dict(build_engine(model_section("llama-tied")).export_weights())
    live = dict(engine.local_module().named_parameters())["model.embed_tokens.weight"]
    assert dict(engine.export_weights())["model.embed_tokens.weight"].data_ptr() == live.data_ptr(), "no copy is made"


@pytest.mark.parametrize("wrap", ["auto", "always"])
def test_a_resumed_run_is_bit_equal(wrap, tmp_path) -> None:
    optim = {"lr": 1e-2, "lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "total_training_steps": 6}

    def steps(engine, count):
        seen = []
        for _ in range(count):
            noise = torch.rand(())  # draws from the random state that must come back
            out = engine.train_batch(BATCH, nll, PLAN)
            seen.append((out.loss, out.step.grad_norm, out.step.lr, float(noise)))
        return seen

    engine = build_engine(model_section("llama-tied"), optim, wrap=wrap)
    torch.manual_seed(3)
    steps(engine, 3)
    engine.save_state(tmp_path / "state")
    wanted = steps(engine, 3)
    weights = {n: t.clone() for n, t in engine.export_weights()}
    engine.shutdown()
    torch.manual_seed(99)
    resumed = build_engine(model_section("llama-tied", seed=5), optim, wrap=wrap)
    resumed.load_state(tmp_path / "state")
    assert steps(resumed, 3) == wanted
    assert all(torch.equal(t, weights[n]) for n, t in resumed.export_weights())
    resumed.shutdown()


def test_a_checkpoint_without_moments_or_of_another_model_is_refused(tmp_path) -> None:
    engine = build_engine(model_section("llama"))
    engine.save_state(tmp_path / "fresh")
    engine.train_batch(BATCH, nll, PLAN)
    engine.save_state(tmp_path / "state")
    for where, change in (("fresh", {"has_moments": True}), ("state", {"world_size": 8})):
        numbers = tmp_path / where / "engine.json"
        numbers.write_text(json.dumps(json.loads(numbers.read_text()) | change))
    with pytest.raises(CheckpointError, match="does not hold all") as missing:
        engine.load_state(tmp_path / "fresh")
    assert "optim." in str(missing.value)
    with pytest.raises(CheckpointError, match="another number of ranks"):
        engine.load_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="no complete engine checkpoint"):
        engine.load_state(tmp_path / "nowhere")
    engine.save_state(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "no-rng")
    (tmp_path / "no-rng" / "rng_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="random state"):
        engine.load_state(tmp_path / "no-rng")
    with pytest.raises(CheckpointError, match="does not hold all"):
        build_engine(model_section("qwen2")).load_state(tmp_path / "good")
    wider = model_section("llama")
    wider["config"] = {**wider["config"], "intermediate_size": 2 * wider["config"]["intermediate_size"]}
    with pytest.raises(CheckpointError, match="a model with other sizes") as sizes:
        build_engine(wider).load_state(tmp_path / "good")
    assert "mlp" in str(sizes.value)


def test_random_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        engine = build_engine(model_section("llama", seed=seed), forward_only=True)
        assert torch.equal(torch.get_rng_state(), before), "the process's own random state is left alone"
        return torch.cat([t.reshape(-1) for _, t in engine.export_weights()])

    assert torch.equal(weights(1, 10), weights(1, 20))
    assert not torch.equal(weights(1, 10), weights(2, 10))


def test_random_weights_of_a_directorys_config(tmp_path) -> None:
    AutoConfig.for_model(**CONFIGS["llama"]).save_pretrained(tmp_path)
    random = build_engine({"path": str(tmp_path), "init": "random", "seed": 4})
    same = build_engine(model_section("llama", seed=4))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(random.export_weights(), same.export_weights(), strict=True))


def test_the_step_equals_torch_and_follows_the_schedule() -> None:
    optim = {
        "lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 0.5,
        "lr_scheduler_type": "linear", "lr_warmup_steps": 2, "min_lr_ratio": 0.1, "total_training_steps": 5,
    }  # fmt: skip
    engine = build_engine(model_section("llama"), optim)
    plain = build_engine(model_section("llama")).local_module()
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    bare = [p for p in plain.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    rates = []
    for lr in (5e-3, 1e-2, 1e-2, 7e-3, 4e-3):
        out = engine.train_batch(BATCH, nll, MicroBatchPlan(max_rows=4))
        rates.append(out.step.lr)
        tokens = BATCH.split_items(BATCH.items["input_ids"])
        loss = torch.zeros(())
        for row in tokens:
            log_p = plain(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            mask = batch_of([row]).items["loss_mask"][1:]
            loss = loss - log_p.gather(-1, row[1:, None])[:, 0][mask].sum() / float(BATCH.items["loss_mask"].sum())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert out.step.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert out.step.grad_norm > 0.5, "clipping is at work"
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad()
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 7e-3, 4e-3])
    for (name, mine), theirs in zip(engine.local_module().named_parameters(), plain.parameters(), strict=True):
        assert float((mine - theirs).detach().abs().max()) < 2e-5, name


@pytest.mark.parametrize("wrap", ["auto", "always"])
def test_a_step_with_a_non_finite_norm_is_skipped(wrap) -> None:
    engine = build_engine(model_section("llama"), wrap=wrap)
    engine.train_batch(BATCH, nll, PLAN)
    before = {n: t.clone() for n, t in engine.export_weights()}

    def poisoned(reader, batch) -> LossOutput:
        return LossOutput(loss=nll(reader, batch).loss * float("inf"))

    out = engine.train_batch(BATCH, poisoned, PLAN)
    assert out.step.skipped
    assert not math.isfinite(out.step.grad_norm)
    assert all(torch.equal(before[n], t) for n, t in engine.export_weights())
    after = engine.train_batch(BATCH, nll, PLAN)
    assert not after.step.skipped, "the bad gradients are gone"
    assert math.isfinite(after.step.grad_norm)
    engine.shutdown()


def test_several_calls_add_up_before_one_step() -> None:
    one, two = (build_engine(model_section("llama")) for _ in range(2))
    weighted = BATCH.with_items(item_weight=BATCH.items["loss_mask"].float() / 20)
    one.forward_backward([weighted], nll, forward_only=False)
    for part in weighted.chunks(1):
        two.forward_backward([part], nll, forward_only=False)
    assert one.optimizer_step().grad_norm == pytest.approx(two.optimizer_step().grad_norm, rel=1e-5)
    with pytest.raises(EngineError, match="no gradients"):
        one.optimizer_step()


def test_scoring_engines_have_no_optimizer(tmp_path) -> None:
    engine = build_engine(model_section("llama"), forward_only=True)
    assert not any(p.requires_grad for p in engine.local_module().parameters())
    assert engine.infer_batch(BATCH, PLAN)["log_probs"].abs().sum() > 0
    for call in (
        lambda: engine.train_batch(BATCH, nll, PLAN),
        engine.optimizer_step,
        lambda: engine.save_state(tmp_path),
    ):
        with pytest.raises(EngineError, match=r"optimizer|score only"):
            call()


def test_the_mode_is_set_before_each_call_although_generation_changes_it() -> None:
    engine = build_engine(model_section("llama"))
    seen = []

    def looking(reader, batch) -> LossOutput:
        seen.append(engine.local_module().training)
        return nll(reader, batch)

    engine.train_batch(BATCH, looking, PLAN)
    engine.local_module().eval()
    engine.train_batch(BATCH, looking, PLAN)
    engine.infer_batch(BATCH, PLAN)
    assert all(seen)
    assert engine.local_module().training is False


def test_temperature_divides_the_logits() -> None:
    engine = build_engine(model_section("llama"))
    cold = engine.infer_batch(BATCH.with_meta(temperature=0.5), PLAN, ("entropy",))["entropy"]
    warm = engine.infer_batch(BATCH, PLAN, ("entropy",))["entropy"]
    mask = BATCH.items["loss_mask"]
    assert bool((cold[mask] < warm[mask]).all())


def test_batches_that_would_fail_later_are_refused() -> None:
    engine = build_engine(model_section("llama"))
    foreign = BATCH.with_items(input_ids=BATCH.items["input_ids"] + VOCAB)
    with pytest.raises(BatchError, match="outside the model's vocabulary"):
        engine.infer_batch(foreign, PLAN)
    mask = BATCH.items["loss_mask"].clone()
    mask[9] = True
    with pytest.raises(BatchError, match="row 0 scores its first token"):
        engine.forward_backward([BATCH.select([1]).with_items(loss_mask=mask[9:13])], nll, forward_only=True)


def test_models_that_cannot_be_had_are_errors_with_a_remedy(tmp_path) -> None:
    cases = {
        "cannot be loaded": {"path": str(tmp_path / "nothing")},
        "knows no model_type": {"config": {"model_type": "lama"}},
        "has no key 'num_hidden_layer'": {"config": {"model_type": "llama", "num_hidden_layer": 2}},
        "keeps no master weights": {"config": CONFIGS["llama"], "dtype": "float16"},
        "builds no causal language model": {"config": {"model_type": "vit"}},
    }
    for words, model in cases.items():
        with pytest.raises((EngineError, ConfigError), match=words):
            build_engine(model)
    engine = build_engine(model_section("llama"))
    _write(engine, tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match="lacks weights") as error:
        build_engine({"path": str(tmp_path)})
    assert "up_proj" in str(error.value)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError, match="cannot be loaded"):
        build_engine({"path": str(tmp_path)})


def test_what_the_backend_lacks_is_refused_by_name(monkeypatch) -> None:
    from rlctl_fsdp.engine import FSDPEngine

    with pytest.raises(CapabilityError, match="dp_shard, dp_replicate and usp only") as error:
        FSDPEngine().rlctl_build_mesh(Topology(world_size=2, tp=2), {"device": "cpu"})
    assert "tp=2" in str(error.value)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EngineError, match="nothing launched them") as error:
        FSDPEngine().rlctl_build_mesh(Topology(world_size=2, dp_shard=2), {"device": "cpu"})
    assert "--nproc 2" in str(error.value)
    if importlib.util.find_spec("torch_npu") is None:
        with pytest.raises(CapabilityError, match="no npu device"):
            FSDPEngine().rlctl_build_mesh(Topology(), {"device": "npu"})
    if not torch.cuda.is_available():
        with pytest.raises(CapabilityError, match="no cuda device"):
            FSDPEngine().rlctl_build_mesh(Topology(), {"device": "cuda"})
    with pytest.raises(ConfigError, match="needs its length"):
        build_engine(model_section("llama"), {"lr": 1e-3, "lr_scheduler_type": "cosine"})


def test_out_of_memory_names_its_phase() -> None:
    with (
        pytest.raises(EngineError, match="out of memory during backward \\(3 rows\\)") as error,
        phase("backward", "3 rows"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert "activation_checkpointing" in str(error.value)
    with pytest.raises(EngineError, match="out of memory during scoring"), phase("scoring"):
        torch.empty(1 << 50)
    with pytest.raises(RuntimeError, match="something else"), phase("scoring"):
        raise RuntimeError("something else")


def test_a_loss_that_leaves_the_model_out_has_zero_gradients() -> None:
    engine = build_engine(model_section("llama"))
    engine.forward_backward([BATCH], lambda _reader, _batch: LossOutput(loss=torch.zeros(())), forward_only=False)
    assert engine.optimizer_step().grad_norm == 0.0


def test_results_carry_no_graph() -> None:
    engine = build_engine(model_section("llama"))

    def careless(reader, batch) -> LossOutput:
        log_probs = reader.log_prob()
        return LossOutput(log_probs.sum(), {"a": log_probs.sum()}, {"b": log_probs.max()}, {"c": log_probs})

    (out,) = engine.forward_backward([BATCH], careless, forward_only=False)
    assert not out.items["c"].requires_grad
    assert out.sums["a"] == pytest.approx(float(out.items["c"].sum()), rel=1e-5)
    assert out.maxes["b"] == 0.0, "unscored positions are zero"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers here")
def test_parts_sent_away_come_back_when_they_are_used() -> None:
    config = {**CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 1024}
    engines = [build_engine({"config": config, "tokenizer": "unused"}, device="cuda") for _ in range(2)]
    for engine in engines:
        engine.train_batch(BATCH, nll, PLAN)
    torch.cuda.synchronize()
    here = torch.cuda.memory_allocated()
    engines[1].move("cpu", "model", "optimizer", "grad")
    assert here - torch.cuda.memory_allocated() > 3 * 4 * engines[1].info.num_parameters * 0.9
    assert {p.device.type for p in engines[1]._pm.get_plugin("provider")._root.parameters()} == {"cpu"}
    outs = [engine.train_batch(BATCH, nll, PLAN) for engine in engines]
    assert outs[0].step.grad_norm == pytest.approx(outs[1].step.grad_norm, rel=1e-4)
    with pytest.raises(EngineError, match="no such part"):
        engines[1].move("cpu", "weights")
