"""The advantage estimators and policy losses that rlctl brings: names, targets, and what each asks for. Imports no torch.

A target is imported where it is called; nothing is registered by an import. Plugins add records of the same kind through
``rlctl_algorithms``, and a user names a function (see :mod:`rlctl.algorithms.lookup`).
"""

from __future__ import annotations

from collections.abc import Mapping

from rlctl.records import AlgorithmKind, AlgorithmSpec

COSTLY: Mapping[str, str] = {
    "values": "a critic's values of every token",
    "greedy_scores": "a greedy completion of each prompt, and its reward",
    "old_log_probs": "the log-probs of the policy before the update, where one optimizer step would do without",
    "sum_p2": "the sum of the squared probabilities of the vocabulary at each token, under that policy",
}
"""Inputs of an advantage estimator that cost a pass of their own, so that they are made only where a signature names them."""

CLIP = ("clip_ratio_low", "clip_ratio_high")


def _advantage(
    name: str,
    target: str,
    summary: str,
    paper: str,
    *,
    groups: bool = True,
    per_token: bool = False,
    needs: tuple[str, ...] = (),
    settings: tuple[str, ...] = (),
) -> AlgorithmSpec:
    return AlgorithmSpec(
        name,
        AlgorithmKind.ADVANTAGE,
        f"rlctl.algorithms.advantages.{target}",
        summary,
        paper,
        groups=groups,
        per_token=per_token,
        needs=needs,
        settings=settings,
    )


def _loss(
    name: str,
    target: str,
    summary: str,
    paper: str,
    settings: tuple[str, ...],
    *,
    vanishes: bool = True,
    prepare: str = "",
) -> AlgorithmSpec:
    module = "rlctl.algorithms.policy_losses."
    return AlgorithmSpec(
        name,
        AlgorithmKind.POLICY_LOSS,
        module + target,
        summary,
        paper,
        settings=settings,
        vanishes=vanishes,
        prepare=module + prepare if prepare else "",
    )


ADVANTAGES: Mapping[str, AlgorithmSpec] = {
    spec.name: spec
    for spec in (
        _advantage(
            "grpo",
            "grpo:grpo_advantages",
            "(r - mean) / std over the samples of a prompt",
            "arXiv 2402.03300",
            settings=("norm_adv_by_std_in_grpo",),
        ),
        _advantage("dr_grpo", "grpo:dr_grpo_advantages", "r - mean over the samples of a prompt", "arXiv 2503.20783"),
    )
}
"""``algorithm.adv_estimator`` -> record."""

POLICY_LOSSES: Mapping[str, AlgorithmSpec] = {
    spec.name: spec
    for spec in (
        _loss(
            "vanilla",
            "vanilla:vanilla_policy_loss",
            "-min(r A, clip(r) A), for A < 0 at most -c A",
            "arXiv 1707.06347",
            (*CLIP, "clip_ratio_c"),
        ),
    )
}
"""``actor.policy_loss.loss_mode`` -> record."""
