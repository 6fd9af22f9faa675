"""Advantage estimators. Each is a pure function of scores and groups."""

from __future__ import annotations

from rlctl.algorithms.advantages.grpo import grpo_advantages

ADVANTAGES = {"grpo": grpo_advantages}
"""``algorithm.adv_estimator`` -> estimator."""

__all__ = ["ADVANTAGES", "grpo_advantages"]
