"""Whole plans from configurations, and the ranking of backends. No plugin is installed here: the catalogue speaks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl import catalogue
from rlctl.config.problems import InvalidConfigError
from rlctl.config.schema import ModelConfig, RunConfig
from rlctl.constraints import ModelFacts
from rlctl.errors import ConfigError
from rlctl.evidence import EvidenceBook, Proof
from rlctl.plan import layout, planner
from rlctl.plan.backends import Choice, Needs, rank_backends
from rlctl.plan.planner import Plan, make_plan, model_size, training_rows
from rlctl.plan.report import plan_to_json
from rlctl.plan.request import Request, find_spec, ranks_of, read_request, with_world_size
from rlctl.plan.shapes import FAMILIES
from rlctl.plan.source import find_model
from rlctl.plan.targets import require_targets
from rlctl.plugins import PluginEntry, PluginSet, Stage
from rlctl.records import (
    Axis,
    BackendKind,
    CheckStatus,
    EvidenceLevel,
    EvidenceRecord,
    ModelType,
)

LLAMA = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def request(
    device: str = "cuda",
    critic: bool = False,
    config: dict[str, Any] | None = None,
    critic_section: dict[str, Any] | None = None,
    **sections: Any,
) -> Request:
    base: dict[str, Any] = {
        "model": {"config": config or LLAMA, "tokenizer": "unused"},
        "data": {"task": {"name": "sort_digits", "train_size": 640}},
    }
    if critic_section is not None:
        base["critic"] = critic_section
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    vendor = {"cuda": "nvidia", "npu": "huawei"}.get(device)
    return Request(RunConfig.model_validate(base), "run.yaml", (), (), device, vendor, "a test", critic)


def plan(*args: Any, **sections: Any) -> Plan:
    return make_plan(request(*args, **sections), PluginSet(), EvidenceBook())


def test_adapters_take_no_second_model_and_their_own_optimizer_alone() -> None:
    full = plan(actor={"use_kl_loss": True})
    found = plan(actor={"use_kl_loss": True}, model={"lora": {"rank": 8, "target_modules": ["q_proj", "down_proj"]}})
    assert [lay.role for lay in found.layouts] == ["actor", "rollout"]
    assert "ref" in [lay.role for lay in full.layouts]
    # Four layers: q_proj 256 x 256, down_proj 512 x 256.
    adapters = 4 * 8 * (256 + 256 + 512 + 256)
    [update] = [p for p in found.memory.pools[0].phases if p.name.startswith("update of the actor")]
    sizes = {item.name: item.num_bytes for item in update.items if item.role == "actor"}
    assert found.size.total is not None
    assert sizes["optimizer"] == 8 * adapters
    assert sizes["weights"] == 4 * (found.size.total + adapters)
    assert found.memory.peak_bytes < full.memory.peak_bytes
    assert planner.roles(request(trainer={"type": "dpo"}, dpo={})) == ["actor", "ref"]
    assert planner.roles(request(trainer={"type": "dpo"}, dpo={}, model={"lora": {}})) == ["actor"]
    out = {choice.name: choice.reasons for choice in found.train_backends}
    assert out["fsdp2"] == ()
    assert all("trains no adapters (model.lora)" in out[name] for name in ("megatron", "veomni"))


@pytest.mark.parametrize(
    ("lora", "hint"),
    [
        ({"target_modules": ["w_proj"]}, "model.lora.target_modules=all-linear"),
        ({"target_modules": "q_proj"}, "model.lora.target_modules=[q_proj]"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, "all-linear"),
    ],
)
def test_adapters_on_no_layer_are_refused(lora: dict[str, Any], hint: str) -> None:
    [refusal] = plan(model={"lora": lora}).refusals
    assert refusal.where == "model.lora.target_modules"
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in refusal.what
    assert hint in refusal.nearest[0]
    with pytest.raises(ConfigError, match=re.escape(hint)):
        require_targets(request(model={"lora": lora}).config.model)


# ---- whole plans ------------------------------------------------------------------------------------------------------------
def test_a_plan_of_eight_ranks_has_every_part() -> None:
    found = plan(runtime={"nproc": 8}, actor={"parallel": {"usp": 2}, "use_kl_loss": True})
    assert [(lay.role, lay.backend, lay.world_size, lay.dp_size) for lay in found.layouts] == [
        ("actor", "fsdp2", 8, 4), ("ref", "fsdp2", 8, 8), ("rollout", "hf", 8, 8),
    ]  # fmt: skip
    assert found.refusals == ()
    assert {line.key: line.value for line in found.batch}["trajectories_per_dp_rank"] == 64
    assert found.size.total == found.size.count.total if found.size.count else False
    [pool] = found.memory.pools
    assert [phase.name.partition(":")[0] for phase in pool.phases] == [
        "generation", "scoring by the reference", "update of the actor", "weight sync",
    ]  # fmt: skip
    everywhere = {"weights", "optimizer", "rollout weights"}
    assert all(everywhere <= {i.name for i in phase.items} for phase in pool.phases)
    assert found.memory.checked
    assert found.train_backends[0].name == "fsdp2"


def test_supervised_runs_have_one_role_and_no_rollout() -> None:
    found = plan(trainer={"type": "sft"})
    assert [lay.role for lay in found.layouts] == ["actor"]
    assert found.rollout_backends == ()
    [pool] = found.memory.pools
    assert [phase.name.partition(":")[0] for phase in pool.phases] == ["training step"]


def test_roles_in_pools_of_their_own_have_their_own_memory() -> None:
    found = plan(
        runtime={"nproc": 4, "pools": {"gen": {"nproc": 2}}}, rollout={"pool": "gen"}, actor={"use_kl_loss": True}
    )
    assert {pool.pool: pool.roles for pool in found.memory.pools} == {"main": ("actor", "ref"), "gen": ("rollout",)}
    main, gen = found.memory.pools
    assert "generation" in [p.name for p in gen.phases]
    assert all("rollout weights" not in {i.name for i in p.items} for p in main.phases)
    assert all("optimizer" not in {i.name for i in p.items} for p in gen.phases)
    assert [lay.world_size for lay in found.layouts] == [4, 4, 2]


def test_one_process_shares_its_module_with_the_rollout() -> None:
    def copy_of(found: Plan) -> int:
        items = [i for p in found.memory.pools[0].phases for i in p.items if i.name == "rollout weights"]
        return max(i.num_bytes for i in items)

    assert copy_of(plan("cpu")) == 0
    assert copy_of(plan("cpu", rollout={"share_weights": False})) > 0
    assert copy_of(plan("cpu", runtime={"nproc": 2})) > 0


def test_a_critic_is_planned_and_refused_where_there_is_none() -> None:
    found = plan(critic=True, runtime={"nproc": 2})
    assert [lay.role for lay in found.layouts] == ["actor", "critic", "rollout"]
    assert not found.refusals
    update = next(p for p in found.memory.pools[0].phases if p.name.startswith("update of the critic"))
    assert {"actor", "critic"} <= {i.role for i in update.items}
    reasons = {c.name: c.reasons for c in found.train_backends}
    assert reasons["torchtitan"] == (
        "needs a critic: torchtitan has no value_model; only fsdp2, megatron, veomni have it",
    )
    assert [c.name for c in found.train_backends if c.fits] == ["fsdp2", "megatron", "veomni"]


def test_the_warm_start_is_a_phase_of_its_own() -> None:
    found = plan("cpu", warm_start={"steps": 5, "batch_size": 512})
    phases = {p.name.partition(":")[0]: p for p in found.memory.pools[0].phases}
    assert "warm start" in phases
    assert {line.key: line.value for line in found.batch}["warm_start_rows"] == 512


def test_ranks_that_cannot_be_split_leave_the_rest_of_the_plan() -> None:
    found = plan(runtime={"nproc": 6}, actor={"parallel": {"usp": 4}})
    assert [r.where for r in found.refusals] == ["actor"]
    assert found.refusals[0].nearest[0] == "usp=2"
    assert found.memory.verdict(80.0)[0] == "unknown"
    assert any("take dp as 1" in note for note in found.notes)
    assert {line.key: line.value for line in found.batch}["trajectories"] == 256


def test_a_device_that_a_backend_has_not_is_refused() -> None:
    [refusal] = [r for r in plan("mps").refusals if r.where == "rollout"]
    assert refusal.what == "hf does not run on mps"
    assert plan("npu").refusals == ()


def test_sixteen_thousand_ranks_cost_no_more_than_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    real = layout.RankPlace

    def counting(*args: Any) -> Any:
        nonlocal made
        made += 1
        return real(*args)

    monkeypatch.setattr(layout, "RankPlace", counting)
    start = time.perf_counter()
    found = plan(runtime={"nproc": 16384}, actor={"parallel": {"usp": 4, "dp_replicate": 16}, "use_kl_loss": True})
    assert made == 0
    whole = plan_to_json(found, None)
    assert made == 3 * 16384
    assert time.perf_counter() - start < 5.0
    actor = whole["roles"][0]
    assert (actor["axes"]["dp_shard"], actor["dp_size"], len(actor["ranks"])) == (256, 4096, 16384)
    assert sum(len(g["members"]) for g in actor["groups"] if g["axis"] == "usp") == 4096


# ---- backends ---------------------------------------------------------------------------------------------------------------
def rank(
    axes: dict[str, int], device: str = "cuda", world: int = 8, facts: ModelFacts | None = None, **more: Any
) -> list[Choice]:
    vendor = {"cuda": "nvidia", "npu": "huawei"}.get(device)
    needs = Needs(BackendKind.TRAIN, world, axes, device, vendor, facts=facts or ModelFacts(), **more)
    return rank_backends(needs, PluginSet(), EvidenceBook())


def test_only_megatron_has_pipeline_stages() -> None:
    found = {c.name: c for c in rank({"pp": 2})}
    assert [c.name for c in rank({"pp": 2}) if c.fits] == ["megatron"]
    assert found["veomni"].reasons == (
        "needs pp=2: VeOmni's training asserts pp = 1: every rank runs all layers; only megatron has it",
    )
    assert found["fsdp2"].reasons == ("needs pp=2: every rank runs all layers; only megatron has it",)
    assert found["megatron"].install == "pip install rlctl-plugin-megatron"
    [npu] = [c for c in rank({"pp": 2}, "npu") if c.name == "megatron"]
    assert npu.install == "pip install rlctl-plugin-mindspeed"


def test_the_order_is_state_before_all_else() -> None:
    names = [(c.name, c.state) for c in rank({}) if c.fits]
    assert names == [
        ("fsdp2", "released"), ("megatron", "released"), ("veomni", "released"), ("torchtitan", "not_built"),
        ("automodel", "not_built"), ("fsdp_turbo", "not_built"),
    ]  # fmt: skip


def test_a_name_of_two_dists_is_listed_once_by_the_one_that_fits() -> None:
    for device, dist in (("cuda", "rlctl-plugin-megatron"), ("npu", "rlctl-plugin-mindspeed")):
        [megatron] = [c for c in rank({"pp": 2}, device) if c.name == "megatron"]
        assert (megatron.dist, megatron.fits) == (dist, True)


def test_reasons_name_devices_and_constraints() -> None:
    found = {
        c.name: c
        for c in rank({"tp": 3}, world=6, facts=ModelFacts(num_heads=8, num_kv_heads=8, num_layers=4, num_experts=0))
    }
    assert "does not run on cuda/nvidia" in found["mindspeed_megatron"].reasons[0]
    assert "attention heads and key/value heads must divide by tp" in found["megatron"].reasons[0]
    assert not found["megatron"].fits
    assert rank({"sp": 1, "tp": 2, "vpp": 2, "pp": 2})[-1].reasons
    refused = {c.name: c.reasons for c in rank({"sp": 1, "tp": 2})}["veomni"]
    assert len(refused) == 1, "sp goes with tp and is not named again"


def installed(name: str = "fsdp2", requires: tuple[str, ...] = ()) -> PluginSet:
    entry = next(e for e in catalogue.entries() if e.spec.name == name)
    spec = replace(entry.spec, requirements=requires)
    return PluginSet(
        [PluginEntry("p", entry.dist or "", "1.0", "t", Stage.COMPATIBLE, CheckStatus.OK, backends=(spec,))]
    )


def test_an_installed_backend_that_is_not_usable_is_out_with_its_reason() -> None:
    needs = Needs(BackendKind.TRAIN, 1, {}, "cpu", None)
    found = {c.name: c for c in rank_backends(needs, installed(requires=("no-such-package>=1",)), EvidenceBook())}
    assert (found["fsdp2"].state, found["fsdp2"].fits) == ("broken", False)
    assert "no-such-package" in found["fsdp2"].reasons[0]
    assert found["fsdp2"].install == "rlctl doctor fsdp2"


def test_of_two_dists_the_one_of_the_device_speaks_and_what_has_no_plugin_stands_below() -> None:
    entries = [e for e in catalogue.entries() if e.spec.name == "megatron"]
    assert len(entries) == 2
    plugins = PluginSet(
        [
            PluginEntry(
                str(e.dist), str(e.dist), "1.0", "t", Stage.COMPATIBLE, CheckStatus.OK,
                backends=(replace(e.spec, requirements=("no-such-package>=1",)),),
            )
            for e in entries
        ]
    )  # fmt: skip
    found = rank_backends(Needs(BackendKind.TRAIN, 2, {"tp": 2}, "npu", "huawei"), plugins, EvidenceBook())
    names = [choice.name for choice in found]
    megatron = found[names.index("megatron")]
    assert (megatron.dist, megatron.state, megatron.fits) == ("rlctl-plugin-mindspeed", "broken", False)
    assert "no-such-package" in megatron.reasons[0]
    without = [names.index(c.name) for c in found if c.fits and c.state == "not_built"]
    assert without
    assert names.index("megatron") < min(without)


def test_evidence_moves_an_installed_backend_up_and_stale_evidence_does_not() -> None:
    needs = Needs(BackendKind.TRAIN, 2, {}, "cpu", None, model_family="llama")
    record = EvidenceRecord(
        "fsdp2",
        "language_model",
        "cpu",
        None,
        {"dp_shard": 2},
        EvidenceLevel.PARITY,
        "llama",
        "w",
        {},
        2,
        {},
        "2026-01-01",
    )
    [first, *_] = rank_backends(needs, installed(), EvidenceBook((Proof(record, "t"),)))
    assert (first.name, first.state, first.evidence, first.elsewhere) == ("fsdp2", "installed", "parity", "")
    other = replace(record, axes={"dp_shard": 4})
    [first, *_] = rank_backends(needs, installed(), EvidenceBook((Proof(other, "t"),)))
    assert (first.evidence, first.elsewhere) == ("declared", "parity, made with dp_shard=4, not with dp_shard=2")


def test_rollouts_are_ranked_by_their_own_axes() -> None:
    needs = Needs(BackendKind.ROLLOUT, 8, {"tp": 4}, "cuda", "nvidia", facts=ModelFacts(num_heads=8, num_kv_heads=8))
    found = rank_backends(needs, PluginSet(), EvidenceBook())
    assert [c.name for c in found if c.fits] == ["vllm", "sglang", "tensorrt_llm"]
    [hf] = [c for c in found if c.name == "hf"]
    assert hf.reasons == ("needs tp=4: generation runs on one device; only vllm, sglang, tensorrt_llm have it",)


def test_a_head_alone_can_put_a_backend_out() -> None:
    heads = (ModelType.LANGUAGE_MODEL, ModelType.VALUE_MODEL)
    assert [c.name for c in rank({"cp": 2}, heads=heads) if c.fits] == ["megatron"]


# ---- requests ---------------------------------------------------------------------------------------------------------------
def write(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(
        f"model: {{config: {json.dumps(LLAMA)}, tokenizer: unused}}\ndata: {{task: {{name: sort_digits}}}}\n" + text
    )
    return str(file)


def test_what_train_would_refuse_is_kept_and_the_rest_is_planned(tmp_path: Path) -> None:
    file = write(tmp_path, "actor: {ppo_mini_batch_size: 5, parallel: {tp: 2}}\nrollout: {n: 1}\n")
    found = read_request(file, ["data.train_batch_size=32"], PluginSet(), world_size=4, device="cuda")
    assert found.config.runtime.nproc == 4
    assert (found.device, found.vendor, found.device_words) == ("cuda", "nvidia", "trainer.device")
    texts = " ".join(str(fault) for fault in found.faults)
    assert "rollout.n is 1" in texts
    assert "not a multiple of actor.ppo_mini_batch_size 5" in texts
    assert "'fsdp2' is not installed" in texts
    made = make_plan(found, PluginSet(), EvidenceBook())
    assert {line.key: line.value for line in made.batch}["mini_batches"] == 7
    assert any(r.what.startswith("actor.parallel.tp=2: whole layers") for r in made.refusals)


def test_what_cannot_be_read_is_refused_as_train_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="batch_sise"):
        read_request(write(tmp_path, "actor: {batch_sise: 5}\n"), [], PluginSet())


def test_the_number_of_ranks_is_said_last() -> None:
    assert with_world_size(["runtime.nproc=2"], 8) == ("runtime.nproc=2", "runtime.nproc=8")
    assert with_world_size(["a=1"], None) == ("a=1",)


def test_ranks_and_pools_of_roles() -> None:
    run = request(
        runtime={"nproc": 4, "pools": {"gen": {"nproc": 2}, "look": {"nproc": 1}}},
        rollout={"pool": "gen"},
        ref={"pool": "look"},
    ).config
    assert {role: (run.pool_of(role), ranks_of(run, role)) for role in ("actor", "ref", "critic", "rollout")} == {
        "actor": ("main", 4), "ref": ("look", 1), "critic": ("main", 4), "rollout": ("gen", 2),
    }  # fmt: skip


def test_the_record_of_a_backend_is_the_installed_one_that_answers_the_device() -> None:
    spec = find_spec(PluginSet(), "megatron", BackendKind.TRAIN, "npu")
    assert spec is not None
    assert spec.devices == (("npu", "huawei"),)
    assert find_spec(installed("veomni"), "veomni", BackendKind.TRAIN, "cuda") is not None
    assert find_spec(PluginSet(), "nothing", BackendKind.TRAIN, "cuda") is None


@pytest.mark.parametrize(("variable", "device"), [("npu", "npu"), ("cpu", "cpu")])
def test_the_device_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, device: str
) -> None:
    monkeypatch.setenv("RLCTL_DEVICE", variable)
    found = read_request(write(tmp_path, ""), [], PluginSet())
    assert (found.device, found.device_words) == (device, "RLCTL_DEVICE")


# ---- models -----------------------------------------------------------------------------------------------------------------
def test_where_a_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = find_model(ModelConfig(path=str(tmp_path)))
    assert found.config == LLAMA
    assert found.directory == tmp_path
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    away = find_model(ModelConfig(path="someone/some-model"))
    assert away.config is None
    assert "someone/some-model is not on this machine" in away.missing
    snapshot = tmp_path / "hub" / "models--someone--some-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(MOE))
    refs = tmp_path / "hub" / "models--someone--some-model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert find_model(ModelConfig(path="someone/some-model")).config == MOE


@pytest.mark.parametrize("text", ["{", "[]", "null", '"x"', "\xff"])
def test_a_broken_config_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    found = find_model(ModelConfig(path=str(tmp_path)))
    assert found.config is None
    assert "config.json" in found.missing


def test_a_package_that_is_not_there_or_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not installed" in find_model(ModelConfig(path="package:no_such_package_at_all")).missing
    package = tmp_path / "planweights"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(tmp_path / "cache"))
    found = find_model(ModelConfig(path="package:planweights"))
    assert "not converted yet" in found.missing
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "none of llama, mistral"),
        ({}, "model_type None"),
        ({**LLAMA, "hidden_size": "wide"}, "hidden_size is 'wide', not a positive whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"model_type": "gemma3", "text_config": {"hidden_size": -1}}, "hidden_size is -1"),
    ],
)
def test_a_model_that_cannot_be_counted_is_said(config: dict[str, Any], words: str) -> None:
    size, missing = model_size(planner.ModelSource(config, None, "config.json"))
    assert size.total is None
    assert words in missing


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(1, 10**6), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-1, 3), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip
KEYS = sorted(
    {key for family in FAMILIES.values() for key in family.defaults} | {"layer_types", "text_config", "vision_config"}
)


@given(
    st.sampled_from([*FAMILIES, "gemma3", "other"]),
    st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=5),
    st.sampled_from([1, 4]),
)
@settings(max_examples=250, deadline=None)
def test_no_config_ends_a_plan_with_a_crash(family: str, junk: dict[str, Any], nproc: int) -> None:
    found = plan(config={"model_type": family, **junk}, runtime={"nproc": nproc})
    if found.size.total is None:
        assert found.memory.missing
        assert found.memory.pools == ()
    else:
        assert found.memory.peak_bytes > 0
    json.dumps(plan_to_json(found, 80.0))


def test_an_unknown_model_is_planned_without_memory() -> None:
    found = plan(config={"model_type": "mamba", "num_hidden_layers": 2})
    assert found.memory.pools == ()
    assert "number of weights of model_type mamba" in found.memory.missing
    assert found.refusals == ()
    assert found.batch


def test_an_unknown_family_with_files_has_its_state_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 10], "data_offsets": [0, 40000]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = make_plan(request(model={"config": None, "path": str(tmp_path)}), PluginSet(), EvidenceBook())
    assert found.size.total == 10_000
    update = next(p for p in found.memory.pools[0].phases if p.name.startswith("update"))
    assert {i.name: i.num_bytes for i in update.items} == {
        "weights": 40_000, "gradients": 40_000, "optimizer": 80_000, "rollout weights": 0,
    }  # fmt: skip
    assert "activations, logits and the KV cache of model_type mamba" in found.memory.missing
    assert "not counted" in found.memory.verdict(80.0)[1]


def test_training_rows_are_counted_where_that_is_cheap(tmp_path: Path) -> None:
    assert training_rows(request().config) == 640
    assert training_rows(request(data={"train_max_samples": 100}).config) == 100
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' * 7)
    assert training_rows(request(data={"task": None, "train_files": [str(file)]}).config) == 7
    assert training_rows(request(data={"task": None, "train_files": [str(tmp_path / "x.parquet")]}).config) is None
    assert training_rows(request(data={"task": None, "train_files": ["hf:a/b:train"]}).config) is None


# ---- JSON and imports -------------------------------------------------------------------------------------------------------
def test_the_plan_as_json_is_json_and_whole() -> None:
    found = plan(runtime={"nproc": 4}, actor={"use_kl_loss": True}, config=MOE)
    data = json.loads(json.dumps(plan_to_json(found, 80.0)))
    assert list(data) == [
        "source", "trainer", "device", "vendor", "device_from", "device_memory_gib", "refused", "notes", "model", "roles",
        "batch", "memory", "backends",
    ]  # fmt: skip
    assert set(data["roles"][0]["axes"]) == {a.value for a in Axis}
    phases = [p for pool in data["memory"]["pools"] for p in pool["phases"]]
    for phase in phases:
        assert phase["bytes"] == sum(i["bytes"] for i in phase["items"])
        assert all(i["formula"] for i in phase["items"])
    assert data["memory"]["peak_bytes"] == max(p["bytes"] for p in phases)
    assert data["memory"]["verdict"] == "fits"
    assert {b["name"] for b in data["backends"]} == {e.spec.name for e in catalogue.entries()}
    short = plan_to_json(found, None, ranks=False)
    assert short["roles"][0]["ranks"] == []
    assert short["roles"][0]["groups"][0]["members"] is None


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\n"
        "from rlctl.plan import planner, report, request\n"
        "from rlctl.plugins import PluginSet\nfrom rlctl.evidence import EvidenceBook\n"
        "from rlctl.config.schema import RunConfig\n"
        f"config = RunConfig.model_validate({{'model': {{'config': {LLAMA!r}, 'tokenizer': 'x'}},"
        " 'data': {'task': {'name': 'sort_digits'}}})\n"
        "r = request.Request(config, 'x', (), (), 'cpu', None, 'x')\n"
        "p = planner.make_plan(r, PluginSet(), EvidenceBook())\n"
        "report.plan_to_json(p, 80.0)\nassert p.memory.pools\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(done.stdout.split())
    assert "rlctl" in loaded
    assert loaded & {"torch", "transformers", "numpy", "safetensors", "pyarrow", "gguf"} == set()


def test_a_critic_of_the_configuration_is_planned_with_its_own_sizes() -> None:
    gae = {"algorithm": {"adv_estimator": "gae"}, "runtime": {"nproc": 2, "pools": {"judge": {"nproc": 4}}}}
    critic = {"pool": "judge", "parallel": {"usp": 2}, "backend": "fsdp2"}
    found = plan(**gae, critic_section=critic)
    assert [(lay.role, lay.pool, lay.world_size) for lay in found.layouts if lay.role == "critic"] == [
        ("critic", "judge", 4)
    ]
    topology = next(lay.topology for lay in found.layouts if lay.role == "critic")
    assert topology is not None
    assert (topology.usp, topology.dp_size) == (2, 2)
    judge = next(pool for pool in found.memory.pools if pool.pool == "judge")
    assert judge.roles == ("critic",)
    assert any(phase.name.startswith("update of the critic") for phase in judge.phases)

    def peak(**more: object) -> int:
        pools = plan(**gae, critic_section={**critic, **more}).memory.pools
        return next(pool.peak.num_bytes for pool in pools if pool.pool == "judge")

    assert peak(optim={"name": "sgd"}) < peak(), "its own optimizer has no moments"


def test_a_response_that_no_prompt_leaves_room_for_is_refused() -> None:
    """Whatever the prompts are; a limit of prompts that none reaches is no fault, as for a run."""

    def refused(response: int) -> list[tuple[str, tuple[str, ...]]]:
        made = plan(config={**LLAMA, "max_position_embeddings": 128}, data={"max_response_length": response})
        return [(refusal.where, refusal.nearest) for refusal in made.refusals]

    assert refused(127) == []
    assert refused(128) == [("data.max_response_length", ("data.max_response_length=127, or a shorter prompt limit",))]
    assert plan(data={"max_response_length": 5000}).refusals == ()
