"""The advantage estimators and policy losses that rlctl brings: names, targets, and what each asks for. Imports no torch.

A target is imported where it is called; nothing is registered by an import. Plugins add records of the same kind through
``rlctl_algorithms``, and a user names a function (see :mod:`rlctl.algorithms.lookup`).
"""

from __future__ import annotations

from collections.abc import Mapping

from rlctl.records import AlgorithmKind, AlgorithmSpec

COSTLY: Mapping[str, str] = {
    "greedy_scores": "a greedy completion of each prompt, and its reward",
    "old_log_probs": "the log-probs of the policy before the update, where one optimizer step would do without",
    "sum_p2": "the sum of the squared probabilities of the vocabulary at each token, under that policy",
    "values": "what a critic says of the state before each token",
}
"""Inputs of an advantage estimator that cost a pass of their own, so that they are made only where a signature names them."""

TOKEN_REWARDS = ("gae", "optimal_token_baseline", "reinforce_plus_plus", "remax")
"""The estimators that read the reward of each token, not of whole rows alone."""

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
        _advantage(
            "grpo_passk",
            "grpo_passk:grpo_passk_advantages",
            "the lead of a prompt's best sample over its second best / std; else 0",
            "arXiv 2503.19595",
            settings=("norm_adv_by_std_in_grpo",),
        ),
        _advantage("rloo", "rloo:rloo_advantages", "r - mean of the prompt's other samples", "arXiv 2402.14740"),
        _advantage(
            "reinforce_plus_plus",
            "reinforce_plus_plus:reinforce_plus_plus_advantages",
            "(G_t - mean) / std over the tokens of the batch, G_t = r_t + gamma G_(t+1)",
            "arXiv 2501.03262",
            groups=False,
            per_token=True,
            settings=("gamma",),
        ),
        _advantage(
            "reinforce_plus_plus_baseline",
            "reinforce_plus_plus_baseline:reinforce_plus_plus_baseline_advantages",
            "r - mean over the samples of a prompt, / std over the tokens of the batch",
            "arXiv 2501.03262",
        ),
        _advantage(
            "remax",
            "remax:remax_advantages",
            "r - r of a greedy completion of the prompt",
            "arXiv 2310.10505",
            groups=False,
            needs=("greedy_scores",),
        ),
        _advantage("opo", "opo:opo_advantages", "r - mean over a prompt's samples by length", "arXiv 2505.23585"),
        _advantage(
            "gpg", "gpg:gpg_advantages", "N / (rows with a gradient) (r - mean over the prompt)", "arXiv 2504.02546"
        ),
        _advantage(
            "gdpo",
            "gdpo:gdpo_advantages",
            "sum of w (r - mean) / std for each component of the reward, / std over the batch",
            "arXiv 2601.05242",
        ),
        _advantage(
            "optimal_token_baseline",
            "optimal_token_baseline:optimal_token_baseline_advantages",
            "G_t - mean over the prompt's samples, weighted by the squared score norm up to t",
            "arXiv 2602.07078",
            per_token=True,
            needs=("old_log_probs", "sum_p2"),
        ),
        _advantage(
            "gae",
            "gae:gae_advantages",
            "sums of (r + gamma V' - V), discounted by gamma lam, whitened; with a critic",
            "arXiv 1506.02438",
            groups=False,
            per_token=True,
            needs=("values",),
            settings=("gamma", "lam"),
        ),
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
        _loss("gspo", "gspo:gspo_policy_loss", "vanilla's with the ratio of the row", "arXiv 2507.18071", CLIP),
        _loss("cispo", "cispo:cispo_policy_loss", "-sg(clip(r)) A log p", "arXiv 2506.13585", CLIP),
        _loss(
            "sapo",
            "sapo:sapo_policy_loss",
            "-A sigmoid(tau (r - 1)) 4 / tau",
            "arXiv 2511.20347",
            ("tau_pos", "tau_neg"),
        ),
        _loss("gpg", "gpg:gpg_policy_loss", "-A log p", "arXiv 2504.02546", ()),
        _loss(
            "clip_cov",
            "clip_cov:clip_cov_policy_loss",
            "vanilla's; 0 at some tokens of high covariance",
            "arXiv 2505.22617",
            (*CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
            prepare="clip_cov:choose_clip_cov",
        ),
        _loss(
            "kl_cov",
            "kl_cov:kl_cov_policy_loss",
            "-r A, + coef abs(log r) at the tokens of highest covariance",
            "arXiv 2505.22617",
            ("kl_cov_ratio", "ppo_kl_coef"),
            vanishes=False,
            prepare="kl_cov:choose_kl_cov",
        ),
        _loss(
            "geo_mean",
            "geo_mean:geo_mean_policy_loss",
            "-A times the geometric mean of the row's clipped ratios",
            "arXiv 2507.20673",
            CLIP,
        ),
        _loss(
            "dppo_tv",
            "dppo_tv:dppo_tv_policy_loss",
            "-sg(r) A log p; 0 where TV(p_old, p) is over a bound",
            "arXiv 2602.04879",
            (*CLIP, "clip_ratio_c"),
        ),
        _loss(
            "dppo_kl",
            "dppo_kl:dppo_kl_policy_loss",
            "-sg(r) A log p; 0 where KL(p_old, p) is over a bound",
            "arXiv 2602.04879",
            (*CLIP, "clip_ratio_c"),
        ),
    )
}
"""``actor.policy_loss.loss_mode`` -> record."""
