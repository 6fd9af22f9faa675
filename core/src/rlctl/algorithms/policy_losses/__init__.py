"""Policy losses. Each returns a loss per token; weights come from the normaliser, never from here."""

from __future__ import annotations

from rlctl.algorithms.policy_losses.vanilla import vanilla_policy_loss

POLICY_LOSSES = {"vanilla": vanilla_policy_loss}
"""``actor.policy_loss.loss_mode`` -> loss per token."""

__all__ = ["POLICY_LOSSES", "vanilla_policy_loss"]
