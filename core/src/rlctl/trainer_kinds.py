"""What is known of a trainer by its name alone (``trainer.type``). Imports nothing."""

from __future__ import annotations

PAIR_TRAINERS = ("dpo", "rm")
"""Trainers whose rows are pairs of a chosen and a rejected response; each is the name of its section."""


def watched(kind: object) -> tuple[str, str]:
    """The metrics, of training and held out, by which a run of this kind is judged."""
    if kind == "sft":
        return "train/loss", "val/loss"
    if kind in PAIR_TRAINERS:
        return "rewards/accuracies", "val/rewards/accuracies"
    return "critic/score/mean", "val/score/mean"
