"""Advantage estimators. Each is a pure function of scores and groups."""

from __future__ import annotations

from rlctl.algorithms.advantages.grpo import grpo_advantages

__all__ = ["grpo_advantages"]
