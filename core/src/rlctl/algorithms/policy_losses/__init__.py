"""Policy losses. Each returns a loss per token; weights come from the normaliser, never from here."""

from __future__ import annotations

from rlctl.algorithms.policy_losses.vanilla import vanilla_policy_loss

__all__ = ["vanilla_policy_loss"]
