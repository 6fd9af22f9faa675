"""The loss of a reward model: Bradley-Terry (Ouyang et al., arXiv 2203.02155, eq. 1, for pairs)."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None = None, *, center: float = 0.0
) -> torch.Tensor:
    """``[P]`` losses ``-log sigmoid(r(w) - r(l) - m) + center (r(w) + r(l))^2``, in nats.

    Args:
        chosen, rejected: ``[P]`` scores.
        margin: ``[P]`` m, by how much better the chosen one is (Touvron et al., arXiv 2307.09288, eq. 2); None: 0.
        center: weight of the term that keeps scores around 0, which differences alone leave open (Eisenstein et al., arXiv
            2312.09244).
    """
    gap = chosen - rejected
    loss = -F.logsigmoid(gap if margin is None else gap - margin)
    return loss + center * (chosen + rejected).square() if center else loss
