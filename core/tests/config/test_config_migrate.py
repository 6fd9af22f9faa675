"""Files of other projects: what is translated, what is not, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.algorithms.table import ADVANTAGES, POLICY_LOSSES
from rlctl.config.check import check
from rlctl.config.document import Document, dotted
from rlctl.config.load import load_config
from rlctl.config.migrate import RULES, LeftOut, migrate
from rlctl.config.migrate_kinds import Left
from rlctl.config.schema import RunConfig
from rlctl.config.schema_paths import annotation_at, walk
from rlctl.config.yaml_source import parse
from rlctl.errors import ConfigError
from rlctl.plugins import PluginSet

Write = Callable[..., str]

VERL = """\
data:
  train_files: rows.jsonl
  val_files: [rows.jsonl]
  prompt_key: question
  train_batch_size: 64
  max_prompt_length: 128
  max_response_length: 256
  filter_overlong_prompts: True
  truncation: error
  image_key: images
actor_rollout_ref:
  hybrid_engine: true
  model: {path: org/tiny, use_remove_padding: true, lora_rank: 0}
  actor:
    strategy: fsdp
    optim: {lr: 1e-6, lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.0, weight_decay: 0.1}
    ppo_mini_batch_size: 16
    ppo_micro_batch_size_per_gpu: 4
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 16384
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    clip_ratio: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    grad_clip: 0.5
    loss_agg_mode: token-mean
    ulysses_sequence_parallel_size: 1
    fsdp_config: {param_offload: true, fsdp_size: -1}
  rollout:
    name: vllm
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.6
    n: 5
    top_k: -1
    prompt_length: ${data.max_prompt_length}
    response_length: ${oc.select:data.nothing,256}
    val_kwargs: {do_sample: false, top_k: -1, n: 1}
  ref:
    log_prob_micro_batch_size_per_gpu: 8
algorithm: {adv_estimator: gae, use_kl_in_reward: false, gamma: 0.99, lam: 0.95}
critic:
  strategy: fsdp
  optim: {lr: 1e-5, lr_warmup_steps: -1}
  model: {path: org/judge, use_remove_padding: true, fsdp_config: {fsdp_size: -1, param_offload: false}}
  ppo_micro_batch_size_per_gpu: 4
  cliprange_value: 0.2
  ppo_epochs: 2
  grad_clip: 1.0
trainer:
  logger: console
  n_gpus_per_node: 8
  critic_warmup: 20
  nnodes: 2
  save_freq: -1
  test_freq: 5
  total_epochs: 15
  experiment_name: ${now}
custom_reward_function: {path: score.py, name: f}
"""


def test_a_verl_file_becomes_ours() -> None:
    result = migrate(VERL, "verl.yaml")
    assert result.values == {
        "data": {
            "train_files": ["rows.jsonl"],
            "val_files": ["rows.jsonl"],
            "columns": {"prompt": "question"},
            "train_batch_size": 64,
            "max_prompt_length": 128,
            "max_response_length": 256,
            "overlong_prompts": "filter",
        },
        "model": {"path": "org/tiny"},
        "actor": {
            "backend": "fsdp2",
            "optim": {"lr": 1e-6, "weight_decay": 0.1, "clip_grad": 0.5},
            "ppo_mini_batch_size": 16,
            "max_tokens_per_device": 16384,
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "policy_loss": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
            "loss_agg_mode": "token-mean",
            "parallel": {"usp": 1},
            "engine": {"param_offload": True},
        },
        "rollout": {
            "backend": "vllm",
            "parallel": {"tp": 2},
            "n": 5,
            "top_k": 0,
            "val_kwargs": {"temperature": 0.0, "top_k": 0, "n": 1},
        },
        "ref": {"micro_batch_size_per_device": 8},
        "algorithm": {"adv_estimator": "gae", "gamma": 0.99, "lam": 0.95},
        "critic": {
            "backend": "fsdp2",
            "optim": {"lr": 1e-5, "clip_grad": 1.0},
            "model": {"path": "org/judge"},
            "engine": {"param_offload": False},
            "micro_batch_size_per_device": 4,
            "value_clip": 0.2,
            "ppo_epochs": 2,
            "warmup_steps": 20,
        },
        "runtime": {"nproc": 16},
        "trainer": {"logger": ["console"], "save_freq": 0, "test_freq": 5, "total_epochs": 15},
        "reward": {"components": [{"name": "score.py:f"}]},
    }
    lost = {item.path: (item.line, item.reason) for item in result.left_out if not item.needless}
    assert set(lost) == {
        "data.image_key",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "trainer.experiment_name",
    }
    assert lost["data.image_key"] == (10, "rlctl has no such key")
    needless = {item.path for item in result.left_out if item.needless}
    assert {"critic.model.use_remove_padding", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"} <= needless
    assert result.origins["rollout.n"] == "actor_rollout_ref.rollout.n"
    assert result.to_set == ()


def test_every_key_of_the_old_file_is_accounted_for() -> None:
    from rlctl.config.document import leaves

    document, _ = parse(VERL, "verl.yaml")
    result = migrate(VERL, "verl.yaml")
    named = {*result.origins.values(), *(item.path for item in result.left_out)}
    # One new value may come from several old keys, and names the first of them.
    shared = {
        "trainer.nnodes",
        "custom_reward_function.name",
        "actor_rollout_ref.rollout.prompt_length",
        "actor_rollout_ref.rollout.response_length",
        "actor_rollout_ref.actor.clip_ratio_high",
    }
    keys = {dotted(loc).partition("[")[0] for loc, _ in leaves(document.data)}
    assert keys - named <= shared, keys - named


def test_a_critic_of_a_file_that_uses_none_is_left_out() -> None:
    result = migrate(VERL.replace("adv_estimator: gae", "adv_estimator: grpo"), "verl.yaml")
    assert result.values["algorithm"] == {"adv_estimator": "grpo"}
    assert "critic" not in result.values
    needless = {item.path for item in result.left_out if item.needless}
    assert {"critic", "algorithm.gamma", "algorithm.lam", "trainer.critic_warmup"} <= needless
    bare = migrate("algorithm: {adv_estimator: gae}\nmodel: {path: a/b}\ndata: {train_files: [x]}\n", "verl.yaml")
    assert bare.values["critic"] == {}
    assert bare.to_set == ()
    unknown = migrate("algorithm: {adv_estimator: magic}\n", "verl.yaml").left_out
    assert [item.reason for item in unknown if item.path == "algorithm.adv_estimator"] == [
        f"algorithm.adv_estimator takes one of {', '.join(ADVANTAGES)}, or path/to/file.py:function"
    ]


def test_a_trl_file_becomes_ours() -> None:
    text = """\
model_name_or_path: org/tiny
dataset_name: org/rows
learning_rate: 1e-6
num_generations: 8
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
max_prompt_length: 512
max_completion_length: 256
beta: 0.04
epsilon: 0.2
loss_type: dr_grpo
scale_rewards: false
max_steps: 100
warmup_ratio: 0.1
lr_scheduler_type: polynomial
temperature: 0.9
bf16: true
output_dir: out
"""
    result = migrate(text, "trl.yaml")
    assert result.values == {
        "model": {"path": "org/tiny"},
        "data": {
            "train_files": ["hf:org/rows:train"],
            "train_batch_size": 4,
            "max_prompt_length": 512,
            "max_response_length": 256,
        },
        "actor": {
            "optim": {"lr": 1e-6},
            "micro_batch_size_per_device": 8,
            "use_kl_loss": True,
            "kl_loss_coef": 0.04,
            "policy_loss": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
            "loss_agg_mode": "seq-mean-token-sum-norm",
        },
        "rollout": {"n": 8, "temperature": 0.9},
        "algorithm": {"norm_adv_by_std_in_grpo": False},
        "trainer": {"total_training_steps": 100},
    }
    assert [item.path for item in result.left_out if not item.needless] == [
        "warmup_ratio",
        "lr_scheduler_type",
        "bf16",
        "output_dir",
    ]


def test_trl_s_preference_configurations_become_ours() -> None:
    text = """\
model_name_or_path: org/tiny
dataset_name: org/pairs
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
beta: 0.3
loss_type: ipo
rpo_alpha: 0.5
label_smoothing: 0.0
precompute_ref_log_probs: true
"""
    result = migrate(text, "trl.yaml")
    assert result.values["dpo"] == {
        "loss_type": "ipo", "average_log_probs": True, "beta": 0.3, "nll_coef": 0.5, "label_smoothing": 0.0
    }  # fmt: skip
    assert result.values["trainer"] == {"type": "dpo"}
    assert result.values["data"]["train_batch_size"] == 8
    assert result.values["actor"] == {"micro_batch_size_per_device": 8}
    assert not [item.path for item in result.left_out if not item.needless]
    listed = migrate(text.replace("loss_type: ipo", "loss_type: [sigmoid]"), "trl.yaml").values
    assert listed["dpo"]["loss_type"] == "sigmoid"
    assert "average_log_probs" not in listed["dpo"]
    other = migrate(text.replace("ipo", "exo_pair"), "trl.yaml")
    assert [item.path for item in other.left_out if not item.needless] == ["loss_type"]
    reward = "model_name_or_path: a/b\ndataset_name: a/c\nlearning_rate: 1e-5\ncenter_rewards_coefficient: 0.01\n"
    made = migrate(reward, "trl.yaml").values
    assert (made["rm"], made["trainer"]) == ({"center_rewards_coefficient": 0.01}, {"type": "rm"})


def test_a_file_of_ours_passes_through() -> None:
    text = "model: {path: a/b}\ndata: {task: {name: sort_digits, args: {length: 3}}}\nactor: {engine: {kernel: x}}\n"
    result = migrate(text, "ours.yaml")
    assert result.values == parse(text, "ours.yaml")[0].data
    assert result.left_out == ()


def test_what_is_missing_is_named_and_values_that_do_not_fit_are_taken_out() -> None:
    result = migrate("trainer: {seed: many}\nactor_rollout_ref: {rollout: {n: 1, temperature: hot}}\n", "x.yaml")
    assert [line.partition(":")[0] for line in result.to_set] == ["model", "data"]
    assert {item.path: item.reason for item in result.left_out} == {
        "trainer.seed": "trainer.seed takes a whole number, at least 0",
        "actor_rollout_ref.rollout.temperature": "rollout.temperature takes a number, more than 0",
    }
    assert result.values["rollout"] == {"n": 1}


def test_the_new_file_loads(run_file: Write, plugins: PluginSet, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def f(): ...\n")
    result = migrate(VERL, "verl.yaml")
    path = run_file(result.to_yaml())
    overrides = ["actor.backend=grid", "actor.engine={}", "rollout.backend=sampler"]
    overrides += ["critic.backend=grid", "critic.engine={}"]
    config = load_config(path, overrides, plugins=plugins).config
    assert config.runtime.nproc == 16
    assert config.actor.policy_loss.clip_ratio_high == 0.28
    _, problems = check(RunConfig, Document(result.values))
    assert problems == []


def test_every_rule_sets_keys_that_exist() -> None:
    engine = {"activation_checkpointing", "param_offload", "optimizer_offload", "reshard_after_forward"}
    engine |= {"param_dtype", "distributed_optimizer", "recompute"}
    tried = 0
    for path, rule in RULES.items():
        for value in (1, True, False, "error", "fsdp", "vllm", "bf16", "grpo", 0.5, ["x"], None):
            leaves = {
                "custom_reward_function.path": "a.py",
                "actor.use_dynamic_bsz": True,
                "ref.log_prob_use_dynamic_bsz": True,
                "algorithm.adv_estimator": "gae",
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.type": "adaptive",
                "reward_model.overlong_buffer.enable": True,
                "algorithm.filter_groups.enable": True,
                "actor.adaptive_entropy.enabled": True,
            }
            outcome = rule(value, leaves)
            if isinstance(outcome, Left):
                assert outcome.reason, path
                continue
            for target in outcome:
                loc = tuple(target.split("."))
                known = annotation_at(loc) is not None or (loc[1] == "engine" and loc[2] in engine)
                assert known, (path, target)
                tried += 1
    assert tried > 100
    assert len(list(walk())) > 100


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n"])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate(text, "x.yaml")
    assert caught.value.next


def test_the_settings_of_verls_megatron_are_those_of_ours() -> None:
    old = """
actor_rollout_ref:
  model: {path: org/tiny, enable_gradient_checkpointing: true}
  actor:
    strategy: megatron
    megatron:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 4
      virtual_pipeline_model_parallel_size: 2
      sequence_parallel: true
      param_offload: true
      grad_offload: true
      use_distributed_optimizer: false
      dtype: bfloat16
      override_transformer_config: {recompute_granularity: full, recompute_method: uniform}
      use_mbridge: true
"""
    result = migrate(old, "verl.yaml")
    assert result.values["actor"] == {
        "backend": "megatron",
        "engine": {
            "recompute": "full",
            "param_offload": True,
            "distributed_optimizer": "never",
            "param_dtype": "bfloat16",
        },
        "parallel": {"tp": 2, "pp": 4, "vpp": 2, "sp": True},
    }
    assert [item.path for item in result.left_out if not item.needless] == []
    fsdp = migrate(old.replace("strategy: megatron", "strategy: fsdp"), "verl.yaml").values["actor"]["engine"]
    assert fsdp["activation_checkpointing"] is True


@pytest.mark.parametrize("name", sorted({*ADVANTAGES, "grpo_vectorized", "rloo_vectorized"} - {"dr_grpo"}))
def test_verl_s_estimators_pass_through(name: str) -> None:
    text = f"algorithm: {{adv_estimator: {name}, gamma: 0.9, norm_adv_by_std_in_grpo: false}}\n"
    result = migrate(text, "verl.yaml")
    chosen = name.removesuffix("_vectorized")
    read = [key for key in ("gamma", "norm_adv_by_std_in_grpo") if key in ADVANTAGES[chosen].settings]
    assert result.values["algorithm"]["adv_estimator"] == chosen
    assert set(result.values["algorithm"]) == {"adv_estimator", *read}
    assert not [item for item in result.left_out if not item.needless]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_verl_s_losses_pass_through_with_the_settings_that_they_read(name: str) -> None:
    """A file of verl has the settings of all losses; those of others would be refused here."""
    text = (
        "actor_rollout_ref: {actor: {clip_ratio: 0.2, clip_ratio_low: 0.1, clip_ratio_high: null, clip_ratio_c: 3.0, "
        "tau_pos: 1.5, tau_neg: 1.1, "
        f"policy_loss: {{loss_mode: {name}, clip_cov_ratio: 0.1, clip_cov_lb: 2.0, clip_cov_ub: 6.0, kl_cov_ratio: 0.1, "
        "ppo_kl_coef: 0.5}}}\n"
    )
    result = migrate(text, "verl.yaml")
    found = result.values["actor"]["policy_loss"]
    assert set(found) == {"loss_mode", *POLICY_LOSSES[name].settings}
    if "clip_ratio_low" in found:
        assert (found["clip_ratio_low"], found["clip_ratio_high"]) == (0.1, 0.2)
    assert not [item for item in result.left_out if not item.needless]
    values = {"model": {"path": "m"}, "data": {"task": {"name": "sum"}}, **result.values}
    assert RunConfig.model_validate(values).actor.policy_loss.loss_mode == name


REWARDS = """
algorithm:
  use_kl_in_reward: true
  kl_penalty: kl
  kl_ctrl: {type: adaptive, kl_coef: 0.01, horizon: 5000, target_kl: 0.05}
reward_model:
  enable: false
  reward_manager: dapo
  overlong_buffer: {enable: true, len: 64, penalty_factor: 0.5, log: true}
"""


def test_verl_s_kl_in_the_reward_and_its_overlong_buffer_pass_through() -> None:
    result = migrate(REWARDS, "verl.yaml")
    assert result.values == {
        "algorithm": {
            "use_kl_in_reward": True,
            "kl_penalty": "kl",
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.01, "horizon": 5000, "target_kl": 0.05},
        },
        "reward": {"overlong_buffer": {"len": 64, "penalty_factor": 0.5}},
    }
    assert not [item for item in result.left_out if not item.needless]
    values = {"model": {"path": "m"}, "data": {"task": {"name": "sum"}}, **result.values}
    assert RunConfig.model_validate(values).needs_reference


def test_verl_s_dynamic_sampling_passes_through() -> None:
    text = """
data: {train_batch_size: 8, gen_batch_size: 24}
actor_rollout_ref: {rollout: {n: 4}}
algorithm: {filter_groups: {enable: true, metric: acc, max_num_gen_batches: 5}}
"""
    result = migrate(text, "verl.yaml")
    assert result.values["algorithm"] == {"filter_groups": {"metric": "score", "max_num_gen_batches": 5}}
    assert result.values["data"] == {"train_batch_size": 8, "gen_batch_size": 24}
    assert not result.left_out
    unbound = migrate(text.replace("max_num_gen_batches: 5", "max_num_gen_batches: 0"), "verl.yaml")
    assert [item.path for item in unbound.left_out] == ["algorithm.filter_groups.max_num_gen_batches"]
    off = migrate(text.replace("enable: true", "enable: false"), "verl.yaml")
    assert "algorithm" not in off.values
    assert "gen_batch_size" not in off.values["data"]
    assert all(item.needless for item in off.left_out)


def test_the_entropy_s_control_passes_through() -> None:
    text = """
actor_rollout_ref:
  actor:
    entropy_coeff: 0.005
    adaptive_entropy: {enabled: true, target_entropy: 0.2, max_ent_coef: 0.5, min_ent_coef: 0, delta_ent_coef: 0.001}
"""
    result = migrate(text, "verl.yaml")
    control = {"type": "additive", "target_entropy": 0.2, "max_coeff": 0.5, "step": 0.001}
    assert result.values["actor"] == {"entropy_coeff": 0.005, "entropy_ctrl": control}
    assert all(item.needless for item in result.left_out)
    assert migrate(text.replace("true", "false"), "verl.yaml").values["actor"] == {"entropy_coeff": 0.005}


CORRECTION = """
algorithm:
  rollout_correction:
    rollout_is: sequence
    rollout_is_threshold: "0.5_5.0"
    rollout_is_batch_normalize: false
    rollout_rs: seq_mean_k1
    rollout_rs_threshold: "0.99_1.01"
    bypass_mode: false
    loss_type: ppo_clip
actor_rollout_ref: {rollout: {calculate_log_probs: true}}
"""


def test_verl_s_rollout_correction_passes_through_of_both_generations() -> None:
    result = migrate(CORRECTION, "verl.yaml")
    here = {
        "rollout_is": "sequence",
        "rollout_is_threshold": 5.0,
        "rollout_is_threshold_lower": 0.5,
        "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.01,
        "rollout_rs_threshold_lower": 0.99,
    }
    assert result.values == {"algorithm": {"rollout_correction": here}}
    assert not [item for item in result.left_out if not item.needless]
    values = {"model": {"path": "m"}, "data": {"task": {"name": "sum"}}, **result.values}
    assert RunConfig.model_validate(values).algorithm.rollout_correction is not None
    older = """
algorithm:
  rollout_correction:
    {rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: token, rollout_rs_threshold: 2.0,
     rollout_rs_threshold_lower: 0.4, rollout_token_veto_threshold: 1e-4}
"""
    rejection = {"rollout_rs": "token", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.4}
    wanted = {**rejection, "rollout_token_veto_threshold": 1e-4}
    assert migrate(older, "verl.yaml").values["algorithm"]["rollout_correction"] == wanted
    capped = migrate("actor_rollout_ref: {actor: {tis_imp_ratio_cap: 2.5}}\n", "verl.yaml").values
    assert capped == {"algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.5}}}
    off = migrate("actor_rollout_ref: {actor: {tis_imp_ratio_cap: -1}}\n", "verl.yaml")
    assert (off.values, [item.needless for item in off.left_out]) == ({}, [True])


def test_what_of_rollout_correction_has_no_place_here_is_said() -> None:
    text = CORRECTION.replace("seq_mean_k1", "seq_max_k2").replace("normalize: false", "normalize: true")
    result = migrate(text, "verl.yaml")
    lost = {item.path.rpartition(".")[2]: item.reason for item in result.left_out if not item.needless}
    assert set(lost) == {"rollout_rs", "rollout_is_batch_normalize"}
    assert "geometric" in lost["rollout_rs"]
    bypass = migrate(CORRECTION.replace("bypass_mode: false", "bypass_mode: true"), "verl.yaml")
    assert bypass.values["algorithm"]["rollout_correction"] == {"bypass_mode": True}
    assert [item.path.rpartition(".")[2] for item in bypass.left_out if not item.needless] == ["rollout_rs"]
    reinforce = CORRECTION.replace("bypass_mode: false", "bypass_mode: true").replace("ppo_clip", "reinforce")
    reasons = [item.reason for item in migrate(reinforce, "verl.yaml").left_out if not item.needless]
    assert any("cispo" in reason for reason in reasons)


def test_trl_s_correction_passes_through_where_its_defaults_play_no_part() -> None:
    text = (
        "use_vllm: true\nvllm_importance_sampling_correction: true\n"
        "vllm_importance_sampling_mode: sequence_mask\nvllm_importance_sampling_cap: 3.0\n"
    )
    masked = migrate(text, "trl.yaml").values["algorithm"]["rollout_correction"]
    assert masked == {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_is_threshold_lower": 0.0}
    cut = migrate(text.replace("sequence_mask", "token_truncate"), "trl.yaml").values["algorithm"]
    assert cut["rollout_correction"] == {"rollout_is": "token", "rollout_is_threshold": 3.0}
    vague = migrate("use_vllm: true\nvllm_importance_sampling_correction: true\n", "trl.yaml")
    assert [item.needless for item in vague.left_out if "correction" in item.path] == [False]


def test_what_is_switched_off_there_sets_nothing_here() -> None:
    """A file of verl has all these keys; those of a KL that is off would be refused here."""
    off = REWARDS.replace("use_kl_in_reward: true", "use_kl_in_reward: false").replace("enable: true", "enable: false")
    result = migrate(off, "verl.yaml")
    assert result.values == {}
    assert not [item for item in result.left_out if not item.needless]
    fixed = migrate(REWARDS.replace("adaptive", "fixed"), "verl.yaml").values["algorithm"]["kl_ctrl"]
    assert fixed == {"type": "fixed", "kl_coef": 0.01}
    model = migrate("reward_model: {enable: true, model: {path: m}}\n", "verl.yaml")
    assert {item.path for item in model.left_out if not item.needless} == {"reward_model", "reward_model.enable"}


def test_trl_s_ppo_takes_the_kl_from_the_reward() -> None:
    result = migrate("kl_coef: 0.05\nkl_estimator: k3\nmask_truncated_completions: true\n", "trl.yaml")
    assert result.values["algorithm"] == {
        "use_kl_in_reward": True,
        "kl_ctrl": {"kl_coef": 0.05},
        "kl_penalty": "k3",
        "mask_truncated_completions": True,
    }


SWITCHES = {
    "algorithm.use_kl_in_reward": ("algorithm: {use_kl_in_reward: SWITCH, kl_penalty: kl, kl_ctrl: {kl_coef: 0.1}}", 3),
    "algorithm.filter_groups.enable": ("algorithm: {filter_groups: {enable: SWITCH, max_num_gen_batches: 3}}", 2),
    "reward_model.overlong_buffer.enable": ("reward_model: {overlong_buffer: {enable: SWITCH, len: 4}}", 2),
    "actor.adaptive_entropy.enabled": ("actor: {adaptive_entropy: {enabled: SWITCH, target_entropy: 0.2}}", 2),
    "algorithm.rollout_correction.bypass_mode": ("algorithm: {rollout_correction: {bypass_mode: SWITCH}}", 1),
    "actor.use_dynamic_bsz": ("actor: {use_dynamic_bsz: SWITCH, ppo_max_token_len_per_gpu: 64}", 1),
    "data.filter_overlong_prompts": ("data: {filter_overlong_prompts: SWITCH, truncation: error}", 1),
    "rollout.val_kwargs.do_sample": ("rollout: {val_kwargs: {do_sample: SWITCH}}", 1),
    "critic.enable": ("critic: {enable: SWITCH}\nalgorithm: {adv_estimator: gae}", 1),
    "use_vllm": ("use_vllm: SWITCH\nvllm_importance_sampling_correction: true", 2),
}
"""A switch: a file with it and with what counts only where it is on; how many keys that is."""


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_is_neither_true_nor_false_is_not_translated(switch: str) -> None:
    """Nor is what counts only with it: taken for off, it would be lost without a word."""
    text, count = SWITCHES[switch]

    def unclear(value: str) -> list[LeftOut]:
        found = migrate(text.replace("SWITCH", value), "old.yaml").left_out
        return [item for item in found if f"{switch} is neither true nor false there" in item.reason]

    for value in ('"True"', "2", "yes", "[true]", "0.0"):
        assert [item.needless for item in unclear(value)] == [False] * count, value
    assert not any(unclear(value) for value in ("true", "false", "null"))


def complete(values: dict[str, Any]) -> RunConfig:
    """With what every run needs, as the schema takes it; it refuses a critic without its estimator, and a half section."""
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"task": {"name": "sum"}}, **values})


def test_trl_s_ppo_gets_its_critic_and_its_estimator() -> None:
    flat = "cliprange: 0.1\ncliprange_value: 0.3\nlam: 0.9\nkl_coef: 0.05\nnum_ppo_epochs: 4\nvf_coef: 0.1\n"
    result = migrate(flat, "trl.yaml")
    assert result.values["algorithm"]["adv_estimator"] == "gae"
    assert result.values["actor"] == {
        "ppo_epochs": 4,
        "policy_loss": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
    }
    assert [item.path for item in result.left_out if not item.needless] == ["vf_coef"]
    critic = complete(result.values).critic
    assert critic is not None
    assert critic.value_clip == 0.3
    for key in ("cliprange_value: 0.3", "lam: 0.9", "gamma: 0.9"):
        assert migrate(key, "trl.yaml").values["algorithm"]["adv_estimator"] == "gae"
    (note,) = migrate("kl_coef: 0.05", "trl.yaml").notes
    assert "algorithm.adv_estimator" in note


def test_a_null_that_is_the_default_makes_no_section() -> None:
    """``model: {path: null}`` below the critic would be a model without a name."""
    text = "critic: {enable: true, model: {path: null}, ppo_epochs: null}\nalgorithm: {adv_estimator: gae}\n"
    result = migrate(text, "verl.yaml")
    assert result.values == {"algorithm": {"adv_estimator": "gae"}, "critic": {}}
    assert all(item.needless for item in result.left_out)
    assert complete(result.values).critic is not None
    (off,) = (i for i in migrate(text.replace("true", "false"), "verl.yaml").left_out if i.path == "critic.enable")
    assert not off.needless


def test_what_is_left_to_their_defaults_and_another_metric_are_noted() -> None:
    text = "actor_rollout_ref: {rollout: {n: 4}}\nalgorithm: {filter_groups: {enable: true, metric: METRIC}}\n"
    defaults, metric = migrate(text.replace("METRIC", "acc"), "verl.yaml").notes
    for key in ("data.train_batch_size", "actor.ppo_mini_batch_size", "trainer.total_epochs"):
        assert key in defaults
    assert "rollout.n" not in defaults
    assert "score" in metric
    assert len(migrate(text.replace("METRIC", "score"), "verl.yaml").notes) == 1
    assert migrate("data: {train_batch_size: 4}", "ours.yaml").notes == ()


@pytest.mark.parametrize(
    ("text", "lora", "needless"),
    [
        ("actor_rollout_ref: {model: {lora_rank: 8, target_modules: all-linear}}",
         {"rank": 8, "alpha": 16, "target_modules": "all-linear"}, []),
        ("actor_rollout_ref: {model: {lora_rank: 8, lora_alpha: 64, target_modules: [q_proj], exclude_modules: null}}",
         {"rank": 8, "alpha": 64, "target_modules": ["q_proj"]}, ["actor_rollout_ref.model.exclude_modules"]),
        ("actor_rollout_ref: {model: {lora_rank: 0, lora_alpha: 64, target_modules: all-linear}}", None,
         ["actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.target_modules"]),
        ("{use_peft: true, lora_target_modules: [all-linear]}",
         {"rank": 16, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear"}, []),
        ("{use_peft: true, lora_r: 4, lora_alpha: 8, lora_dropout: 0.1, use_rslora: true, lora_task_type: CAUSAL_LM}",
         {"rank": 4, "alpha": 8, "dropout": 0.1, "use_rslora": True}, ["lora_task_type"]),
        ("{use_peft: false, lora_r: 4}", None, ["lora_r", "use_peft"]),
        ("{lora_r: 4}", None, ["lora_r"]),
    ],
)  # fmt: skip
def test_adapters_are_translated_where_they_were_on(
    text: str, lora: dict[str, Any] | None, needless: list[str]
) -> None:
    result = migrate(text, "old.yaml")
    assert result.values.get("model", {}).get("lora") == lora
    assert sorted(left.path for left in result.left_out if left.needless) == needless
    assert all(left.needless for left in result.left_out)


def test_what_adapters_cannot_do_here_is_said() -> None:
    result = migrate("{use_peft: true, use_dora: true, lora_modules_to_save: [lm_head]}", "old.yaml")
    assert {left.path: left.needless for left in result.left_out} == {"use_dora": False, "lora_modules_to_save": False}
