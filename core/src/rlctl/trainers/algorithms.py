"""The estimator and the loss of a run, found before any process is started; those that are not rlctl's own are tried out."""

from __future__ import annotations

import torch

from rlctl.algorithms.calling import call_advantages, call_policy_loss
from rlctl.algorithms.lookup import BUILTIN, KEYS, Algorithm, find
from rlctl.algorithms.table import COSTLY
from rlctl.config.schema import RunConfig
from rlctl.config.schema_critic import VALUES
from rlctl.errors import AlgorithmError
from rlctl.plugins import PluginSet
from rlctl.records import AlgorithmKind


def find_algorithms(config: RunConfig, plugins: PluginSet | None) -> dict[AlgorithmKind, Algorithm]:
    """The algorithms that the configuration names.

    Raises:
        ConfigError: there is none of that name.
        AlgorithmError: a plugin's or a user's does not load, or fails on a few made-up rows.
    """
    names = {
        AlgorithmKind.ADVANTAGE: config.algorithm.adv_estimator,
        AlgorithmKind.POLICY_LOSS: config.actor.policy_loss.loss_mode,
    }
    found = {kind: find(kind, name, plugins) for kind, name in names.items()}
    for kind, algorithm in found.items():
        if algorithm.spec.name not in BUILTIN[kind]:
            _try_out(algorithm, config)
    return found


def _try_out(algorithm: Algorithm, config: RunConfig) -> None:
    """Call it once on four rows of two prompts, so that its faults show before a model is loaded.

    Raises:
        AlgorithmError: it fails, or returns something else.
    """
    lengths = torch.tensor([4, 3, 5, 4])
    row_ids = torch.arange(4).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    mask, num = positions > 0, int(lengths.sum())
    scores = torch.tensor([0.0, 1.0, 0.5, 0.5], dtype=torch.float64)
    log_probs = -torch.linspace(0.1, 2.0, num, dtype=torch.float64)
    items = dict.fromkeys(("old_log_probs", "rollout_log_probs", "ref_log_probs"), log_probs)
    if algorithm.spec.kind is AlgorithmKind.ADVANTAGE:
        components = [component.weight for component in config.reward.components]
        offered = {
            **items,
            "scores": scores,
            "groups": torch.tensor([0, 0, 1, 1]),
            "mask": mask,
            "row_ids": row_ids,
            "positions": positions,
            "token_rewards": torch.where(positions == lengths[row_ids] - 1, scores[row_ids], 0.0),
            "components": scores.expand(len(components), 4),
            "component_weights": torch.tensor(components, dtype=torch.float64),
            **dict.fromkeys(COSTLY, log_probs.exp() ** 2),
            "greedy_scores": scores,
        }
        made = call_advantages(algorithm, config.algorithm, offered, row_ids, mask)
        if VALUES in algorithm.spec.needs and "returns" not in made:
            raise AlgorithmError(
                f"the {algorithm.label} says nothing that a critic could learn",
                found="advantages alone",
                wanted="(advantages, returns)",
                next=f"return both from {algorithm.spec.target}",
            )
        return
    current = log_probs.float().requires_grad_()
    offered = {
        **{name: value.float() for name, value in items.items()},
        "log_probs": current,
        "advantages": torch.linspace(-1.0, 1.0, num),
        "mask": mask,
        "row_ids": row_ids,
        "num_rows": 4,
        "entropy": -current,
        "item_weight": torch.full((num,), 1.0 / num),
        "loss_mask": mask,
        "input_ids": torch.zeros(num, dtype=torch.long),
    }
    loss = call_policy_loss(algorithm, config.actor.policy_loss, offered, num).loss
    if not loss.requires_grad:
        raise AlgorithmError(
            f"the {algorithm.label} has no gradient",
            found="a result that does not depend on log_probs",
            wanted="a loss that is computed from log_probs, which is not detached",
            next=f"correct {algorithm.spec.target}, or set {KEYS[algorithm.spec.kind]}",
        )
