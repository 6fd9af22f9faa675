"""Functions that a configuration names and nobody has run yet: loaded and tried before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.algorithms.table import ADVANTAGES, POLICY_LOSSES
from rlctl.data.rewards import build_reward
from rlctl.plan.targets import require_targets
from rlctl.trainer_kinds import PAIR_TRAINERS

if TYPE_CHECKING:
    from rlctl.config.load import ResolvedConfig
    from rlctl.config.schema import RunConfig
    from rlctl.plugins import PluginSet


def try_functions(resolved: ResolvedConfig, plugins: PluginSet | None) -> None:
    """For RL the estimator and the policy loss where they are not rlctl's own, the rewards, and the environment on a few rows: as a
    run does at its start. Of pairs the rows are read. First the targets of adapters, by the model's config.

    Imports torch only for an estimator or a loss that is not rlctl's own, and with the tokenizer that an environment needs.

    Raises:
        ConfigError: there is none of that name; or adapters would be on no layer.
        AlgorithmError, DataError: one does not load, or fails on a few made-up rows; rows are no pairs, or fewer than a batch.
    """
    config = resolved.config
    require_targets(config.model)
    if config.trainer.type in PAIR_TRAINERS:
        _try_pairs(config)
    if config.trainer.type != "rl":
        return
    if config.algorithm.adv_estimator not in ADVANTAGES or config.actor.policy_loss.loss_mode not in POLICY_LOSSES:
        from rlctl.trainers.algorithms import find_algorithms

        find_algorithms(config, plugins)
    build_reward(config.reward, plugins, resolved.base_dir).close()
    if config.rollout.environment is not None:
        from rlctl.data.lengths import model_positions
        from rlctl.data.prompts import PromptEncoder
        from rlctl.data.rows import load_rows
        from rlctl.data.tokenizer import load_tokenizer
        from rlctl.environments.dry_run import try_environment
        from rlctl.models import resolve_model_source

        model = resolve_model_source(config.model)
        encoder = PromptEncoder(load_tokenizer(model), config.data)
        try_environment(resolved, plugins, encoder, load_rows(config.data, "train"), model_positions(model))


def _try_pairs(config: RunConfig) -> None:
    """Read the rows of both splits, without a tokenizer: which columns hold the pairs, only they can say."""
    from rlctl.data.rows import load_rows
    from rlctl.data.sampler import BatchSampler

    rows, _ = (load_rows(config.data, split, pairs=True) for split in ("train", "val"))
    BatchSampler(
        len(rows),
        config.data.train_batch_size,
        config.data.shuffle,
        config.trainer.seed,
        setting="data.train_batch_size",
    )
