"""What becomes of a key of verl: a table of rules for ``rlctl config migrate``. Facts about names, no one's code.

Paths are dotted, without verl's ``actor_rollout_ref.`` in front. A rule gives what to set in rlctl's configuration, or says
why nothing is set. Names that only differ in spelling are in :mod:`rlctl.config.foreign`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.algorithms.table import ADVANTAGES, POLICY_LOSSES
from rlctl.catalogue_memory import train_policy
from rlctl.config.migrate_kinds import (
    Left,
    Outcome,
    Rule,
    as_list,
    left,
    needless,
    off_is_needless,
    on,
    to,
    unless,
    words,
)
from rlctl.config.schema_critic import needs_critic
from rlctl.records import AlgorithmSpec


def _processes(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    per_node, nodes = leaves.get("trainer.n_gpus_per_node", 1), leaves.get("trainer.nnodes", 1)
    if isinstance(per_node, int) and isinstance(nodes, int):
        return {"runtime.nproc": per_node * nodes}
    return Left("the number of processes is no number; set runtime.nproc")


def _truncation(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    if on("data.filter_overlong_prompts", leaves):
        return Left("prompts over the limit are left out before it counts", needless=True)
    if value == "error":
        return {"data.overlong_prompts": "error"}
    return Left("rlctl never cuts a prompt: set data.overlong_prompts to error or filter")


def _chosen(leaves: Mapping[str, Any]) -> tuple[AlgorithmSpec | None, AlgorithmSpec | None]:
    """(advantage estimator, policy loss) that the file names or leaves at the default; None for others."""
    estimator, loss = (
        leaves.get("algorithm.adv_estimator", "grpo"),
        leaves.get("actor.policy_loss.loss_mode", "vanilla"),
    )
    estimator = ALIASES.get(estimator, estimator) if isinstance(estimator, str) else ""
    return ADVANTAGES.get(estimator), POLICY_LOSSES.get(loss if isinstance(loss, str) else "")


def _of_loss(key: str) -> Rule:
    """A setting of the policy losses, which counts only for those that read it."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if value is None:
            return Left("not set there", needless=True)
        loss = _chosen(leaves)[1]
        if loss is not None and key not in loss.settings:
            return Left(f"{loss.name} does not read it", needless=True)
        return {f"actor.policy_loss.{key}": value}

    return rule


def _of_estimator(key: str) -> Rule:
    """A setting of the estimators, which counts only for those that read it."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        estimator = _chosen(leaves)[0]
        if value is None or estimator is None or key not in estimator.settings:
            name = "the estimator here" if estimator is None else estimator.name
            return Left(f"{name} does not read it", needless=True)
        return {f"algorithm.{key}": value}

    return rule


def _clip(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    """Both bounds from the one, where they have none of their own."""
    loss = _chosen(leaves)[1]
    if loss is not None and "clip_ratio_low" not in loss.settings:
        return Left(f"{loss.name} does not read it", needless=True)
    low, high = leaves.get("actor.clip_ratio_low"), leaves.get("actor.clip_ratio_high")
    return {
        "actor.policy_loss.clip_ratio_low": value if low is None else low,
        "actor.policy_loss.clip_ratio_high": value if high is None else high,
    }


def _micro_rows(role: str, switch: str) -> Rule:
    """Rows a micro-batch, which count only where dynamic batches are off."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if on(switch, leaves):
            return Left(f"{switch} is on there, so the token budget counts", needless=True)
        return (
            {f"{role}.micro_batch_size_per_device": value}
            if value is not None
            else Left("not set there", needless=True)
        )

    return rule


def _tokens(role: str, switch: str) -> Rule:
    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if on(switch, leaves):
            return {f"{role}.max_tokens_per_device": value}
        return Left(f"{switch} is off there, so rows count", needless=True)

    return rule


def _reward_function(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    path, name = leaves.get("custom_reward_function.path"), leaves.get("custom_reward_function.name", "compute_score")
    if not path:
        return Left("no function is named there", needless=True)
    return {"reward.components": [{"name": f"{path}:{name}"}]}


_BACKENDS = {"fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan"}
_NO_BACKEND = "no backend of rlctl goes by this name; rlctl capabilities lists them"


def _recompute(role: str) -> Rule:
    """Backends have names of their own for it."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        strategy = leaves.get(f"{role}.strategy")
        backend = _BACKENDS.get(strategy, "") if isinstance(strategy, str) else ""
        key, without, with_ = train_policy(backend).checkpointing
        return {f"{role}.engine.{key}": {True: with_, False: without}[value] if isinstance(value, bool) else value}

    return rule


def _with_critic(path: str) -> Rule:
    """What counts only beside a critic."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        estimator = leaves.get("algorithm.adv_estimator")
        return {path: value} if needs_critic(estimator) else Left(_CRITIC, needless=True)

    return rule


def _critic_switch(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    needed = needs_critic(leaves.get("algorithm.adv_estimator"))
    if value is None or on("critic.enable", leaves) == needed:
        return Left("algorithm.adv_estimator is what adds a critic or leaves it out", needless=True)
    return Left("algorithm.adv_estimator is what adds a critic or leaves it out, and it says otherwise: gae has one")


ALIASES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Estimators there that are the same formula here."""


def _formula(path: str, known: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> Rule:
    """An algorithm by its name, which is mostly the same here."""

    def rule(value: Any, _: Mapping[str, Any]) -> Outcome:
        name = (aliases or {}).get(value, value) if isinstance(value, str) else value
        if isinstance(name, str) and name in known:
            return {path: name}
        return Left(f"{path} takes one of {', '.join(known)}, or path/to/file.py:function")

    return rule


_ROLLOUT_OWN = "a setting of the rollout backend; its section is rollout.engine (rlctl config schema --backend NAME)"
_CRITIC = "counts only with algorithm.adv_estimator gae"

_DO_SAMPLE = "rollout.val_kwargs.do_sample"

RULES: dict[str, Rule] = {
    # ---- verl: data
    "data.train_files": as_list("data.train_files"),
    "data.val_files": as_list("data.val_files"),
    "data.prompt_key": to("data.columns.prompt"),
    "data.tokenizer": unless(None, "model.tokenizer"),
    "data.seed": unless(None, "trainer.seed"),
    "data.train_max_samples": unless(-1, "data.train_max_samples"),
    "data.val_max_samples": unless(-1, "data.val_max_samples"),
    "data.truncation": _truncation,
    "hybrid_engine": needless("actor and rollout share a process where both can"),
    "data.filter_overlong_prompts": words(
        "data.overlong_prompts", {True: "filter", False: "error"}, "set data.overlong_prompts to error or filter"
    ),
    "data.return_raw_chat": needless("rows are always chat messages where they have them"),
    "data.reward_fn_key": to("data.columns.data_source"),
    # ---- verl: model
    "model.enable_gradient_checkpointing": _recompute("actor"),
    "model.use_remove_padding": needless("batches are always packed"),
    "model.custom_chat_template": unless(None, "model.chat_template"),
    "model.tokenizer_path": unless(None, "model.tokenizer"),
    # ---- verl: actor
    "actor.strategy": words("actor.backend", _BACKENDS, _NO_BACKEND),
    "actor.megatron.sequence_parallel": to("actor.parallel.sp"),
    "actor.megatron.param_offload": to("actor.engine.param_offload"),
    "actor.megatron.grad_offload": needless("gradients go where the weights go (actor.engine.param_offload)"),
    "actor.megatron.optimizer_offload": to("actor.engine.optimizer_offload"),
    "actor.megatron.dtype": words(
        "actor.engine.param_dtype",
        {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"},
        "actor.engine.param_dtype is auto, bfloat16 or float32",
    ),
    "actor.megatron.use_distributed_optimizer": words(
        "actor.engine.distributed_optimizer",
        {True: "auto", False: "never"},
        "set actor.engine.distributed_optimizer to auto, always or never",
    ),
    "actor.megatron.override_transformer_config.recompute_granularity": words(
        "actor.engine.recompute", {"full": "full", None: "none"}, "layers are recomputed whole or not at all"
    ),
    "actor.megatron.override_transformer_config.recompute_method": needless("every layer is recomputed"),
    "actor.megatron.override_transformer_config.recompute_num_layers": needless("every layer is recomputed"),
    "actor.megatron.use_mbridge": needless("Hugging Face directories are always read and written"),
    "actor.megatron.use_dist_checkpointing": needless("checkpoints are always sharded"),
    "actor.clip_ratio": _clip,
    "actor.clip_ratio_low": _of_loss("clip_ratio_low"),
    "actor.clip_ratio_high": _of_loss("clip_ratio_high"),
    "actor.clip_ratio_c": _of_loss("clip_ratio_c"),
    "actor.tau_pos": _of_loss("tau_pos"),
    "actor.tau_neg": _of_loss("tau_neg"),
    **{
        f"actor.policy_loss.{key}": _of_loss(key)
        for key in ("tau_pos", "tau_neg", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    },
    "actor.grad_clip": to("actor.optim.clip_grad"),
    "actor.use_dynamic_bsz": needless("a token budget (max_tokens_per_device) is what switches it on"),
    "actor.ppo_micro_batch_size": left("rows over all devices; set actor.micro_batch_size_per_device"),
    "actor.ppo_micro_batch_size_per_gpu": _micro_rows("actor", "actor.use_dynamic_bsz"),
    "actor.ppo_max_token_len_per_gpu": _tokens("actor", "actor.use_dynamic_bsz"),
    "actor.shuffle": needless("mini-batches are cut in the order of the batch"),
    "actor.optim.lr_warmup_steps": unless(-1, "actor.optim.lr_warmup_steps"),
    "actor.optim.lr_warmup_steps_ratio": off_is_needless(
        "no warm-up", "rlctl counts warm-up in steps: set actor.optim.lr_warmup_steps"
    ),
    "actor.optim.total_training_steps": unless(-1, "actor.optim.total_training_steps"),
    "actor.fsdp_config.param_offload": to("actor.engine.param_offload"),
    "actor.fsdp_config.optimizer_offload": to("actor.engine.optimizer_offload"),
    "actor.fsdp_config.reshard_after_forward": to("actor.engine.reshard_after_forward"),
    "actor.fsdp_config.fsdp_size": unless(-1, "actor.parallel.dp_shard"),
    "actor.fsdp_config.model_dtype": words(
        "model.dtype",
        {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float32": "float32", "bfloat16": "bfloat16"},
        "set model.dtype",
    ),
    # ---- verl: reference
    "ref.strategy": words("ref.backend", _BACKENDS, _NO_BACKEND),
    "ref.log_prob_use_dynamic_bsz": needless("a token budget (max_tokens_per_device) is what switches it on"),
    "ref.log_prob_micro_batch_size_per_gpu": _micro_rows("ref", "ref.log_prob_use_dynamic_bsz"),
    "ref.log_prob_max_token_len_per_gpu": _tokens("ref", "ref.log_prob_use_dynamic_bsz"),
    "ref.fsdp_config.param_offload": to("ref.engine.param_offload"),
    "ref.fsdp_config.reshard_after_forward": to("ref.engine.reshard_after_forward"),
    # ---- verl: critic
    "critic.enable": _critic_switch,
    "critic.strategy": words("critic.backend", _BACKENDS, _NO_BACKEND),
    "critic.model.tokenizer_path": unless(None, "critic.model.tokenizer"),
    "critic.model.use_remove_padding": needless("batches are always packed"),
    "critic.model.enable_gradient_checkpointing": _recompute("critic"),
    "critic.model.fsdp_config.param_offload": to("critic.engine.param_offload"),
    "critic.model.fsdp_config.optimizer_offload": to("critic.engine.optimizer_offload"),
    "critic.model.fsdp_config.reshard_after_forward": to("critic.engine.reshard_after_forward"),
    "critic.model.fsdp_config.fsdp_size": unless(-1, "critic.parallel.dp_shard"),
    "critic.cliprange_value": to("critic.value_clip"),
    "critic.grad_clip": to("critic.optim.clip_grad"),
    "critic.use_dynamic_bsz": needless("a token budget (max_tokens_per_device) is what switches it on"),
    "critic.ppo_micro_batch_size": left("rows over all devices; set critic.micro_batch_size_per_device"),
    "critic.ppo_micro_batch_size_per_gpu": _micro_rows("critic", "critic.use_dynamic_bsz"),
    "critic.ppo_max_token_len_per_gpu": _tokens("critic", "critic.use_dynamic_bsz"),
    "critic.forward_micro_batch_size_per_gpu": needless("values are computed under the critic's own bounds"),
    "critic.forward_max_token_len_per_gpu": needless("values are computed under the critic's own bounds"),
    "critic.rollout_n": needless("rollout.n counts"),
    "critic.shuffle": needless("mini-batches are cut in the order of the batch"),
    "critic.optim.lr_warmup_steps": unless(-1, "critic.optim.lr_warmup_steps"),
    "critic.optim.lr_warmup_steps_ratio": off_is_needless(
        "no warm-up", "rlctl counts warm-up in steps: set critic.optim.lr_warmup_steps"
    ),
    "critic.optim.total_training_steps": unless(-1, "critic.optim.total_training_steps"),
    # ---- verl: rollout
    "rollout.name": words("rollout.backend", {"vllm": "vllm", "hf": "hf", "sglang": "sglang"}, _NO_BACKEND),
    "rollout.top_k": unless(-1, "rollout.top_k", 0),
    "rollout.val_kwargs.top_k": unless(-1, "rollout.val_kwargs.top_k", 0),
    "rollout.val_kwargs.do_sample": lambda value, leaves: (
        Left("sampling is on where the temperature is above 0", needless=True)
        if value is not None and on(_DO_SAMPLE, leaves)
        else {"rollout.val_kwargs.temperature": 0.0}
    ),
    "rollout.do_sample": needless("rollouts are always sampled"),
    "rollout.mode": needless("the backend decides"),
    "rollout.prompt_length": to("data.max_prompt_length"),
    "rollout.response_length": to("data.max_response_length"),
    "rollout.gpu_memory_utilization": left(_ROLLOUT_OWN),
    "rollout.enforce_eager": left(_ROLLOUT_OWN),
    "rollout.max_num_batched_tokens": left(_ROLLOUT_OWN),
    "rollout.max_num_seqs": left(_ROLLOUT_OWN),
    "rollout.max_model_len": left(_ROLLOUT_OWN),
    "rollout.load_format": needless("weights come from the trainer"),
    "rollout.log_prob_micro_batch_size_per_gpu": needless("old log-probs are computed under the actor's own bounds"),
    "rollout.log_prob_max_token_len_per_gpu": needless("old log-probs are computed under the actor's own bounds"),
    "rollout.log_prob_use_dynamic_bsz": needless("old log-probs are computed under the actor's own bounds"),
    # ---- verl: algorithm, reward, trainer
    "algorithm.adv_estimator": _formula("algorithm.adv_estimator", ADVANTAGES, ALIASES),
    "actor.policy_loss.loss_mode": _formula("actor.policy_loss.loss_mode", POLICY_LOSSES),
    "algorithm.gamma": _of_estimator("gamma"),
    "algorithm.lam": _of_estimator("lam"),
    "algorithm.norm_adv_by_std_in_grpo": _of_estimator("norm_adv_by_std_in_grpo"),
    "custom_reward_function.path": _reward_function,
    "custom_reward_function.name": _reward_function,
    "trainer.logger": as_list("trainer.logger"),
    "trainer.n_gpus_per_node": _processes,
    "trainer.nnodes": _processes,
    "trainer.save_freq": unless(-1, "trainer.save_freq", 0),
    "trainer.test_freq": unless(-1, "trainer.test_freq", 0),
    "trainer.max_actor_ckpt_to_keep": unless(None, "trainer.max_ckpt_to_keep"),
    "trainer.default_local_dir": left("give the directory on the command line: --run-dir"),
    "trainer.critic_warmup": _with_critic("critic.warmup_steps"),
}

SECTIONS: dict[str, Left] = {
    "critic": Left(_CRITIC, needless=True),
    "reward_model": Left("reward models are not built yet; functions are: reward.components"),
    "ray_init": Left("this version runs without Ray", needless=True),
    "ray_kwargs": Left("this version runs without Ray", needless=True),
    "transfer_queue": Left("rlctl has no such part", needless=True),
    "global_profiler": Left("rlctl has no such part"),
    "hydra": Left("rlctl has no such part", needless=True),
    "defaults": Left("one file is one run: write the values of those files into this one"),
}
"""Whole sections that set nothing."""
