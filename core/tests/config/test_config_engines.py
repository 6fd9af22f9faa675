"""engine and parallel sections against the chosen backend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.config.json_schema import json_schema
from rlctl.config.load import load_config
from rlctl.config.problems import InvalidConfigError, Problem
from rlctl.errors import BackendUnavailableError, CapabilityError, RlctlError
from rlctl.plugins import PluginSet

Write = Callable[..., str]

BASE = (
    "model: {path: org/tiny}\ndata: {task: {name: sort_digits}}\nactor: {backend: plain}\nrollout: {backend: sampler}\n"
)


def problems_of(plugins: PluginSet, path: str, *overrides: str, **flags: object) -> list[Problem]:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path, overrides, flags, plugins)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.engine.parm_offload=true", "unknown key. Did you mean actor.engine.param_offload?"),
        (
            "actor.engine.pipeline_chunks=2",
            "It is a key of grid, and actor.backend is plain: remove it, or change the backend",
        ),
        ("actor.engine.max_rows=2", "It is a key of sampler, and actor.backend is plain"),
        ("actor.engine.kernel=fsat", "wanted one of auto, fast. Did you mean fast?"),
        ("actor.engine.inner.depth=0", "found 0, wanted a whole number, at least 1"),
        ("actor.engine.inner.dpth=0", "unknown key"),
        ("actor.engine=3", "found 3, wanted a mapping"),
        ("actor.engine=null", "found null (nothing), wanted a mapping"),
        ("rollout.engine.param_offload=true", "It is a key of plain, and rollout.backend is sampler"),
        ("actor.engine.zzz=2", "Keys of actor.engine: param_offload, kernel, inner"),
    ],
)
def test_engine_sections_are_checked(override: str, words: str, plugins: PluginSet, run_file: Write) -> None:
    problems = problems_of(plugins, run_file(BASE), override)
    assert len(problems) == 1
    assert words in str(problems[0])
    assert problems[0].path == override.partition("=")[0]


def test_a_reference_in_a_pool_of_its_own_has_that_pools_data_parallel_size(
    plugins: PluginSet, run_file: Write
) -> None:
    """The actor's sizes are those of the actor's pool; what the reference states itself is checked on its own pool."""
    pools = "runtime: {nproc: 2, pools: {other: {nproc: 1}}}\n"
    text = BASE.replace("plain", "grid").replace("grid}", "grid, parallel: {dp_shard: 2}}") + pools
    shared = load_config(run_file(text.replace(pools, "runtime: {nproc: 2}\n")), plugins=plugins).config
    assert shared.ref.parallel.dp_shard == 2
    own = load_config(run_file(text + "ref: {pool: other}\n"), plugins=plugins).config
    assert own.ref.parallel.dp_shard != 2
    with pytest.raises(RlctlError, match="1 ranks cannot be split over the parallel axes"):
        load_config(run_file(text + "ref: {pool: other, parallel: {tp: 2}}\n"), plugins=plugins)


def test_switching_the_backend_refuses_what_belonged_to_the_old_one(plugins: PluginSet, run_file: Write) -> None:
    path = run_file(BASE.replace("{backend: plain}", "{backend: plain, engine: {param_offload: true}}"))
    [problem] = problems_of(plugins, path, backend="grid")
    assert problem.path == "actor.engine.param_offload"
    assert problem.origin == f"{path}:3"
    assert "a key of plain, and actor.backend is grid" in problem.hint


def test_the_backend_flag_moves_actor_and_reference_together(plugins: PluginSet, run_file: Write) -> None:
    config = load_config(run_file(BASE), ["ref.backend=plain"], {}, plugins).config
    assert (config.actor.backend, config.ref.backend) == ("plain", "plain")
    path = run_file(BASE + "ref: {backend: plain}\n")
    config = load_config(path, [], {"backend": "grid"}, plugins).config
    assert (config.actor.backend, config.ref.backend) == ("grid", "grid")
    assert config.ref.engine == {"pipeline_chunks": 1}


def test_the_reference_takes_from_the_actor_what_it_does_not_state(plugins: PluginSet, run_file: Write) -> None:
    text = BASE.replace(
        "{backend: plain}", "{backend: plain, engine: {param_offload: true}, max_tokens_per_device: 4096}"
    )
    resolved = load_config(run_file(text + "ref: {engine: {kernel: fast}}\n"), plugins=plugins)
    assert resolved.config.ref.backend == "plain"
    assert resolved.config.ref.engine == {"kernel": "fast", "param_offload": True, "inner": {"depth": 1}}
    assert resolved.config.ref.max_tokens_per_device == 4096
    assert resolved.origins["ref.engine.param_offload"] == "as actor.engine.param_offload"
    assert resolved.origins["ref.backend"] == "as actor.backend"
    rows = load_config(run_file(text + "ref: {micro_batch_size_per_device: 2}\n"), plugins=plugins).config.ref
    assert (rows.micro_batch_size_per_device, rows.max_tokens_per_device) == (2, None)
    apart = load_config(run_file(text + "ref: {backend: plain}\n"), plugins=plugins).config.ref
    assert apart.engine["param_offload"] is False


def test_an_alias_is_used_with_one_notice(plugins: PluginSet, run_file: Write) -> None:
    said: list[str] = []
    resolved = load_config(run_file(BASE), ["actor.use_kl_loss=true"], {"backend": "plane"}, plugins, said.append)
    assert resolved.config.actor.backend == "plain"
    assert resolved.config.ref.backend == "plain"
    assert said == ["actor.backend: plane is another name of plain, which is used"]


def test_a_backend_that_is_not_installed_says_what_the_registry_says(plugins: PluginSet, run_file: Write) -> None:
    with pytest.raises(BackendUnavailableError, match="megatron") as caught:
        load_config(run_file(BASE), [], {"backend": "megatron"}, plugins)
    assert caught.value.next
    problems = problems_of(plugins, run_file(BASE), "rollout.n=0", backend="megatron")
    assert [p.path for p in problems] == ["rollout.n", "actor.backend"]
    assert "Next: " in str(problems[1])


def test_only_a_role_that_takes_part_needs_its_backend(plugins: PluginSet, run_file: Write) -> None:
    text = BASE.replace("rollout: {backend: sampler}\n", "")
    assert load_config(run_file(text), ["trainer.type=sft"], plugins=plugins).config.rollout.backend == "hf"
    with pytest.raises(BackendUnavailableError, match="'hf'"):
        load_config(run_file(text), plugins=plugins)
    with pytest.raises(BackendUnavailableError, match="'smapler'"):
        load_config(run_file(text), ["trainer.type=sft", "rollout.backend=smapler"], plugins=plugins)


def test_a_plugin_without_its_config_model_is_named(plugins: PluginSet, run_file: Write) -> None:
    with pytest.raises(RlctlError, match="config model of backend 'broken' cannot be imported") as caught:
        load_config(run_file(BASE), [], {"backend": "broken"}, plugins)
    assert caught.value.next == "rlctl doctor broken"


def test_a_plugin_whose_validator_crashes_is_named(plugins: PluginSet, run_file: Write) -> None:
    overrides = ["actor.backend=careless", "actor.engine.table=b"]
    with pytest.raises(RlctlError, match="config model of backend 'careless' failed") as caught:
        load_config(run_file(BASE), overrides, plugins=plugins)
    assert "KeyError" in (caught.value.found or "")
    assert load_config(run_file(BASE), overrides[:1], plugins=plugins).config.actor.engine == {"table": "a"}


def test_only_the_chosen_backends_are_imported(plugins: PluginSet, run_file: Write) -> None:
    sys.modules.pop("cfgtoy_settings", None)
    load_config(run_file(BASE), plugins=plugins)
    assert "cfgtoy_settings" in sys.modules
    assert "cfgtoy_engine" not in sys.modules


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["actor.parallel.tp=2"], "actor.parallel.tp", "plain has no tp"),
        (["actor.parallel.tp=2", "trainer.device=cuda"], "actor.parallel.tp", "plain has no tp on cuda"),
        (["actor.parallel.pp=2"], "actor.parallel.pp", "Its plugin declares nothing of this axis"),
        (["actor.parallel.sp=true"], "actor.parallel.sp", "wanted false"),
        (["actor.parallel.usp=2", "trainer.device=cpu"], "actor.parallel.usp", "Needs NCCL"),
        (["rollout.parallel.pp=2"], "rollout.parallel.pp", "sampler has no pp"),
        (["actor.parallel.dp_shard=4", "runtime.nproc=2"], "actor.parallel", "do not multiply to the world size 2"),
        (["actor.backend=grid", "actor.parallel.tp=3", "runtime.nproc=4"], "actor.parallel", "cannot be split"),
        (["actor.backend=grid", "actor.parallel.tp=2"], "actor.parallel", "1 ranks cannot be split"),
    ],
)
def test_axes_are_checked_before_anything_is_launched(
    overrides: list[str], path: str, words: str, plugins: PluginSet, run_file: Write
) -> None:
    with pytest.raises(RlctlError) as caught:
        load_config(run_file(BASE), [*overrides, "rollout.top_p=9"], plugins=plugins)
    assert isinstance(caught.value, InvalidConfigError)
    problems = {problem.path: problem for problem in caught.value.problems}
    assert set(problems) == {path, "rollout.top_p"}
    assert words in str(problems[path])


def test_axes_that_the_records_allow_pass(plugins: PluginSet, run_file: Write) -> None:
    overrides = ["actor.backend=grid", "actor.parallel.tp=2", "runtime.nproc=4", "rollout.parallel.tp=2"]
    config = load_config(run_file(BASE), overrides, plugins=plugins).config
    assert config.actor.parallel.tp == 2
    # usp is there on cuda, and nothing says that this run is on another device.
    assert load_config(run_file(BASE), ["actor.parallel.usp=2", "runtime.nproc=2"], plugins=plugins)


@pytest.mark.parametrize("where", ["config", "path"])
def test_constraints_on_heads_are_checked_where_the_model_is_known(
    where: str, plugins: PluginSet, run_file: Write, tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 6}')
    model = (
        "{path: model}" if where == "path" else "{config: {model_type: llama, num_attention_heads: 6}, tokenizer: a/b}"
    )
    path = run_file(BASE.replace("{path: org/tiny}", model))
    overrides = ["actor.backend=grid", "runtime.nproc=12"]
    [problem] = problems_of(plugins, path, *overrides, "actor.parallel.tp=4")
    assert problem.path == "actor.parallel.tp"
    assert "attention heads must divide by tp" in problem.what
    assert problem.hint == "nearest that fits: tp=3 or tp=6"
    assert load_config(path, [*overrides, "actor.parallel.tp=3"], plugins=plugins).config.actor.parallel.tp == 3


def test_what_an_axis_comes_to_is_announced(plugins: PluginSet, run_file: Write) -> None:
    said: list[str] = []
    overrides = ["actor.backend=grid", "actor.parallel.sp=true"]
    load_config(run_file(BASE), overrides, plugins=plugins, notice=said.append)
    assert said == ["actor.parallel: grid: sp is tied to tp: it is off while tp is 1"]


def test_the_json_schema_knows_the_chosen_engine_section(plugins: PluginSet) -> None:
    schema = json_schema(plugins, "plain", "sampler")
    definitions = schema["$defs"]
    assert definitions["ActorConfig"]["properties"]["engine"]["$ref"] == "#/$defs/Plain"
    assert definitions["RolloutConfig"]["properties"]["engine"]["$ref"] == "#/$defs/Sampler"
    assert definitions["Plain"]["properties"]["inner"]["$ref"] == "#/$defs/Inner"
    assert definitions["Inner"]["properties"]["depth"]["minimum"] == 1
    assert definitions["ActorConfig"]["properties"]["backend"]["enum"] == ["plain", "plane"]
    assert (
        json_schema(plugins, "sampler")["$defs"]["RolloutConfig"]["properties"]["engine"]["$ref"] == "#/$defs/Sampler"
    )
    with pytest.raises(BackendUnavailableError):
        json_schema(plugins, "nothing")


def test_an_address_is_ray_and_no_other_launcher_takes_one(plugins: PluginSet, run_file: Write) -> None:
    path = run_file(BASE)
    runtime = load_config(path, ["runtime.ray.address=auto"], plugins=plugins).config.runtime
    assert runtime.chosen_launcher() == "ray"
    assert load_config(path, ["runtime.nproc=2"], plugins=plugins).config.runtime.chosen_launcher() == "process"
    assert load_config(path, [], plugins=plugins).config.runtime.chosen_launcher() == "inline"
    for launcher in ("inline", "process"):
        [problem] = problems_of(plugins, path, "runtime.ray.address=auto", f"runtime.launcher={launcher}")
        assert "joins no cluster" in str(problem)


def test_a_pool_that_is_not_there_says_how_to_make_it(plugins: PluginSet, run_file: Write) -> None:
    [problem] = problems_of(plugins, run_file(BASE), "rollout.pool=gen")
    assert "runtime.pools={gen: {nproc: 1}}" in str(problem)


def test_sizes_of_a_follower_are_checked_where_they_are_its_own(plugins: PluginSet, run_file: Write) -> None:
    """Not when the ranks are up: a warm start, or a teacher's training, would be lost."""
    path = run_file(BASE)
    sizes = ["actor.backend=grid", "actor.use_kl_loss=true", "runtime.nproc=4", "actor.parallel.tp=2"]
    assert load_config(path, sizes, plugins=plugins).config.ref.parallel.tp == 2
    with pytest.raises(CapabilityError, match=r"ref\.parallel: 4 ranks cannot be split") as refused:
        load_config(path, [*sizes, "ref.parallel.tp=3"], plugins=plugins)
    assert "tp=3" in str(refused.value.found)
    with pytest.raises(InvalidConfigError, match="grid keeps one layout of ranks in a process") as apart:
        load_config(path, [*sizes, "ref.parallel.tp=4"], plugins=plugins)
    assert "ref.pool=ref" in str(apart.value)
    own = [*sizes, "ref.parallel.tp=4", "ref.pool=ref", "runtime.pools={ref: {nproc: 4}}"]
    assert load_config(path, own, plugins=plugins).config.ref.parallel.tp == 4
    # A backend whose engines may differ, and a reference that takes no part, are left alone.
    plain = ["actor.use_kl_loss=true", "runtime.nproc=4", "ref.parallel.dp_shard=2", "ref.parallel.dp_replicate=2"]
    with pytest.raises((CapabilityError, InvalidConfigError)) as other:
        load_config(path, plain, plugins=plugins)
    assert "one layout" not in str(other.value)
    idle = ["actor.backend=grid", "runtime.nproc=4", "actor.parallel.tp=2", "ref.parallel.tp=4"]
    assert load_config(path, idle, plugins=plugins).config.ref.parallel.tp == 4


def test_the_route_of_dancegrpo_is_explained_axis_by_axis(plugins: PluginSet, run_file: Write) -> None:
    """No plugin of ours has it; what is known of its axes is said all the same, refusals and conditions."""
    text = BASE.replace("plain", "mindspeed_mm") + "runtime: {nproc: 32}\n"
    sizes = [f"actor.parallel.{axis}=2" for axis in ("tp", "cp", "pp", "ep", "usp")]
    found = {p.path.rpartition(".")[2]: p for p in problems_of(plugins, run_file(text), *sizes)}
    assert set(found) == {"backend", "tp", "cp", "pp", "ep", "usp"}
    assert "mindspeed_mm' is not installed" in found["backend"].what
    for axis in ("pp", "ep", "usp"):
        assert found[axis].what == f"mindspeed_mm has no {axis}"
        assert "take " in found[axis].hint
    for axis in ("tp", "cp"):
        assert found[axis].what == f"mindspeed_mm has {axis} on a condition"
        assert found[axis].hint.startswith("only where")
    assert "DanceGRPO" in found["tp"].hint
    assert [p.path for p in problems_of(plugins, run_file(text), "actor.parallel.pp=2")] == [
        "actor.backend",
        "actor.parallel.pp",
    ]


@pytest.mark.parametrize("name", ["mindspeed_fsdp", "mindspeed_llm"])
def test_a_name_that_no_engine_answers_is_refused_by_name(plugins: PluginSet, run_file: Write, name: str) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        load_config(run_file(BASE.replace("plain", name)), (), {}, plugins)
    assert caught.value.what == f"no training backend is called {name!r}"


def test_a_backend_that_is_not_here_may_live_elsewhere_and_matters_to_what_starts_it(
    plugins: PluginSet, run_file: Write
) -> None:
    path = run_file(BASE)
    with pytest.raises(BackendUnavailableError) as caught:
        load_config(path, ("rollout.backend=vllm",), plugins=plugins)
    assert "rollout.python=PATH" in caught.value.details[-1]
    assert caught.value.wanted == "one that is installed: sampler"
    with pytest.raises(BackendUnavailableError) as caught:
        load_config(path, ("actor.backend=megatron",), plugins=plugins)
    assert "actor.python=PATH" in caught.value.details[-1]
    with pytest.raises(BackendUnavailableError) as caught:
        load_config(path, ("rollout.backend=nobody_knows_it",), plugins=plugins)
    assert "PATH" not in str(caught.value.details)
    found = load_config(path, ("rollout.backend=vllm",), plugins=plugins, backends=False).config
    assert found.rollout.backend == "vllm"
    with pytest.raises(InvalidConfigError, match=r"trainer\.seed"):
        load_config(path, ("rollout.backend=vllm", "trainer.seed=x"), plugins=plugins, backends=False)
