"""Names that other projects give to what rlctl calls by another name. Facts only; used by hints and by ``config migrate``.

Keys of :data:`FOREIGN` are bare names as they stand in configurations of verl, TRL and Megatron-LM; values are our dotted
paths, with ``ROLE`` for the section the name stood in (actor, ref or rollout; the actor where it stood nowhere near one).
"""

from __future__ import annotations

FOREIGN: dict[str, tuple[str, str]] = {
    # name -> (our path, remark or "")
    "tensor_model_parallel_size": ("ROLE.parallel.tp", ""),
    "tensor_parallel_size": ("ROLE.parallel.tp", ""),
    "tp_size": ("ROLE.parallel.tp", ""),
    "pipeline_model_parallel_size": ("ROLE.parallel.pp", ""),
    "pipeline_parallel_size": ("ROLE.parallel.pp", ""),
    "virtual_pipeline_model_parallel_size": ("ROLE.parallel.vpp", ""),
    "context_parallel_size": ("ROLE.parallel.cp", ""),
    "expert_model_parallel_size": ("ROLE.parallel.ep", ""),
    "expert_parallel_size": ("ROLE.parallel.ep", ""),
    "expert_tensor_parallel_size": ("ROLE.parallel.etp", ""),
    "ulysses_sequence_parallel_size": ("ROLE.parallel.usp", ""),
    "ulysses_parallel_size": ("ROLE.parallel.usp", ""),
    "sequence_parallel": ("ROLE.parallel.sp", "sp is Megatron's activation sharding; Ulysses is parallel.usp"),
    "data_parallel_size": ("ROLE.parallel.dp_replicate", ""),
    "fsdp_size": ("ROLE.parallel.dp_shard", ""),
    "strategy": ("ROLE.backend", ""),
    "ppo_micro_batch_size_per_gpu": ("ROLE.micro_batch_size_per_device", ""),
    "log_prob_micro_batch_size_per_gpu": ("ROLE.micro_batch_size_per_device", ""),
    "micro_batch_size_per_gpu": ("ROLE.micro_batch_size_per_device", ""),
    "micro_batch_size": ("ROLE.micro_batch_size_per_device", ""),
    "ppo_micro_batch_size": ("ROLE.micro_batch_size_per_device", "rows on one device, not on all of them"),
    "per_device_train_batch_size": (
        "actor.micro_batch_size_per_device",
        "the rows of a step are data.train_batch_size",
    ),
    "ppo_max_token_len_per_gpu": ("ROLE.max_tokens_per_device", ""),
    "log_prob_max_token_len_per_gpu": ("ROLE.max_tokens_per_device", ""),
    "max_token_len_per_gpu": ("ROLE.max_tokens_per_device", ""),
    "use_dynamic_bsz": ("ROLE.max_tokens_per_device", "a token budget is what switches dynamic batches on"),
    "log_prob_use_dynamic_bsz": ("ROLE.max_tokens_per_device", "a token budget is what switches dynamic batches on"),
    "gradient_accumulation_steps": (
        "data.train_batch_size",
        "accumulation is worked out from data.train_batch_size and the micro-batch bound",
    ),
    "kl_coef": ("actor.kl_loss_coef", "with actor.use_kl_loss: true"),
    "kl_penalty": ("actor.kl_loss_type", ""),
    "beta": ("actor.kl_loss_coef", "with actor.use_kl_loss: true; in DPO it is dpo.beta"),
    "rpo_alpha": ("dpo.nll_coef", ""),
    "simpo_gamma": ("dpo.simpo_gamma", ""),
    "learning_rate": ("actor.optim.lr", ""),
    "max_grad_norm": ("actor.optim.clip_grad", ""),
    "grad_clip": ("actor.optim.clip_grad", ""),
    "warmup_steps": ("actor.optim.lr_warmup_steps", ""),
    "num_warmup_steps": ("actor.optim.lr_warmup_steps", ""),
    "lr_warmup_steps_ratio": ("actor.optim.lr_warmup_steps", "a number of steps, not a share"),
    "warmup_ratio": ("actor.optim.lr_warmup_steps", "a number of steps, not a share"),
    "warmup_style": ("actor.optim.lr_scheduler_type", ""),
    "lr_decay_style": ("actor.optim.lr_scheduler_type", ""),
    "adam_beta1": ("actor.optim.betas", "[beta1, beta2]"),
    "adam_beta2": ("actor.optim.betas", "[beta1, beta2]"),
    "adam_epsilon": ("actor.optim.eps", ""),
    "clip_ratio": ("actor.policy_loss.clip_ratio_low", "and actor.policy_loss.clip_ratio_high"),
    "epsilon": ("actor.policy_loss.clip_ratio_low", "and actor.policy_loss.clip_ratio_high"),
    "epsilon_high": ("actor.policy_loss.clip_ratio_high", ""),
    "clip_ratio_low": ("actor.policy_loss.clip_ratio_low", ""),
    "clip_ratio_high": ("actor.policy_loss.clip_ratio_high", ""),
    "clip_ratio_c": ("actor.policy_loss.clip_ratio_c", ""),
    "loss_type": ("actor.loss_agg_mode", ""),
    "scale_rewards": ("algorithm.norm_adv_by_std_in_grpo", ""),
    "num_iterations": ("actor.ppo_epochs", ""),
    "num_generations": ("rollout.n", ""),
    "num_return_sequences": ("rollout.n", ""),
    "n_samples_per_prompt": ("rollout.n", ""),
    "max_completion_length": ("data.max_response_length", ""),
    "max_new_tokens": ("data.max_response_length", ""),
    "response_length": ("data.max_response_length", ""),
    "prompt_length": ("data.max_prompt_length", ""),
    "truncation": ("data.overlong_prompts", "rlctl never cuts a prompt: error or filter"),
    "filter_overlong_prompts": ("data.overlong_prompts", "filter"),
    "prompt_key": ("data.columns.prompt", ""),
    "train_batch_size_per_gpu": ("data.train_batch_size", "prompts of a step over all devices"),
    "rollout_batch_size": ("data.train_batch_size", ""),
    "n_gpus_per_node": ("runtime.nproc", "all processes, nodes times devices"),
    "nnodes": ("runtime.nproc", "all processes, nodes times devices"),
    "nproc": ("runtime.nproc", "processes of the main pool"),
    "num_train_epochs": ("trainer.total_epochs", ""),
    "max_steps": ("trainer.total_training_steps", ""),
    "train_steps": ("trainer.total_training_steps", ""),
    "save_steps": ("trainer.save_freq", ""),
    "eval_steps": ("trainer.test_freq", ""),
    "report_to": ("trainer.logger", ""),
    "run_name": ("trainer.experiment_name", ""),
    "save_total_limit": ("trainer.max_ckpt_to_keep", ""),
    "max_actor_ckpt_to_keep": ("trainer.max_ckpt_to_keep", ""),
    "val_kwargs": ("rollout.val_kwargs", ""),
    "model_name_or_path": ("model.path", ""),
    "model_path": ("model.path", ""),
    "tokenizer_path": ("model.tokenizer", ""),
    "torch_dtype": ("model.dtype", ""),
    "attn_implementation": ("ROLE.engine", "attention belongs to the backend's own section"),
    "reward_fn": ("reward.components", "a registered name or path/to/file.py:function"),
    "reward_funcs": ("reward.components", "a registered name or path/to/file.py:function"),
    "custom_reward_function": ("reward.components", "a registered name or path/to/file.py:function"),
    "actor_rollout_ref": (
        "actor",
        "the sections are actor, ref, rollout and model; rlctl config migrate FILE rewrites a verl file",
    ),
    "cliprange_value": ("critic.value_clip", ""),
    "critic_warmup": ("critic.warmup_steps", ""),
    "tis_imp_ratio_cap": ("algorithm.rollout_correction.rollout_is_threshold", "with rollout_is: token"),
    "rollout_is": ("algorithm.rollout_correction.rollout_is", ""),
    "rollout_rs": ("algorithm.rollout_correction.rollout_rs", ""),
    "bypass_mode": ("algorithm.rollout_correction.bypass_mode", ""),
    "lora_rank": ("model.lora.rank", ""),
    "lora_r": ("model.lora.rank", ""),
    "lora_alpha": ("model.lora.alpha", ""),
    "lora_dropout": ("model.lora.dropout", ""),
    "lora_target_modules": ("model.lora.target_modules", ""),
    "target_modules": ("model.lora.target_modules", ""),
    "use_peft": ("model.lora", "the section is what switches adapters on"),
    "gae_lambda": ("algorithm.lam", ""),
    "gpu_memory_utilization": ("rollout.engine", "the key of the rollout backend's own section"),
}

ROLES = ("actor", "ref", "critic", "rollout", "teacher")


def our_path(name: str, loc: tuple[str | int, ...]) -> tuple[str, str] | None:
    """Our path for a foreign ``name`` that stood in the section ``loc``, with a remark; None when it is not known."""
    known = FOREIGN.get(name)
    if known is None:
        return None
    path, remark = known
    role = next((part for part in loc if part in ROLES), "actor")
    if (
        role == "rollout"
        and not path.startswith("ROLE.parallel")
        and path.startswith("ROLE.")
        and path != "ROLE.engine"
    ):
        role = "actor"
    return path.replace("ROLE", str(role)), remark
