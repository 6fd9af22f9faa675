"""Which prompts teach something: DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2, the constraint of eq. 11).

R rows.
"""

from __future__ import annotations

import torch

from rlctl.algorithms.advantages.groups import group_extreme


def has_signal(values: torch.Tensor, groups: torch.Tensor, trained: torch.Tensor | None = None) -> torch.Tensor:
    """``[R]`` bool: the samples of the row's prompt do not all have one value.

    The paper has rewards of right and wrong, and keeps prompts with some of each; of any rewards, these are the groups in which not
    all are equal: their advantages in the group are not all zero. Equal means equal to the last bit. A group of one has nothing to
    differ from: False.

    Args:
        values: ``[R]`` what is compared, mostly the reward.
        groups: ``[R]`` integers from 0.
        trained: ``[R]`` bool, rows that are trained on; None: all. A group without one teaches nothing either.
    """
    differ = group_extreme(values.double(), groups, "amax") != group_extreme(values.double(), groups, "amin")
    if trained is None:
        return differ
    return differ & (group_extreme(trained.double(), groups, "amax") > 0)
