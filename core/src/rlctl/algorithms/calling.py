"""Calls of estimators and losses that may be anybody's: by the names in their signature, with what they return looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlctl.algorithms.lookup import Algorithm
from rlctl.algorithms.policy_losses.base import TokenPolicyLoss
from rlctl.batch import PackedBatch
from rlctl.config.schema_algorithm import AlgorithmConfig, PolicyLossConfig
from rlctl.errors import AlgorithmError

_PARAMETERS = {"norm_adv_by_std_in_grpo": "norm_by_std"}
"""Keys of the configuration whose parameter goes by a shorter name."""

_NOT_SETTINGS = ("loss_mode", "adv_estimator", "args", "adv_args", "rollout_correction")


def settings_of(algorithm: Algorithm, section: PolicyLossConfig | AlgorithmConfig) -> dict[str, Any]:
    """The keyword arguments that a section of the configuration gives: keys that are set and that the signature names, and
    the function's own."""
    out: dict[str, Any] = {}
    for key in type(section).model_fields:
        name, value = _PARAMETERS.get(key, key), getattr(section, key)
        if key not in _NOT_SETTINGS and value is not None and algorithm.takes(name):
            out[name] = value
    return out | dict(section.args if isinstance(section, PolicyLossConfig) else section.adv_args)


def call_policy_loss(
    algorithm: Algorithm, section: PolicyLossConfig, offered: Mapping[str, Any], num_items: int
) -> TokenPolicyLoss:
    """The loss of each token.

    Args:
        offered: see :mod:`rlctl.algorithms.policy_losses`.
        num_items: N.

    Raises:
        AlgorithmError: the function fails, or returns something else.
    """
    found = algorithm.call(offered, settings_of(algorithm, section))
    found = TokenPolicyLoss(found) if isinstance(found, torch.Tensor) else found
    if not isinstance(found, TokenPolicyLoss) or found.loss.shape != (num_items,):
        raise AlgorithmError(
            f"the {algorithm.label} returned no loss of each token",
            found=_shown(found.loss if isinstance(found, TokenPolicyLoss) else found),
            wanted=f"a tensor of shape ({num_items},), before any mean over tokens, or a TokenPolicyLoss",
            next=f"correct {algorithm.spec.target}",
        )
    return found


def choose_tokens(
    chooser: Algorithm, section: PolicyLossConfig, batch: PackedBatch, generator: torch.Generator
) -> PackedBatch:
    """A whole mini-batch with the item fields of its loss's choice.

    Args:
        chooser: see :attr:`rlctl.algorithms.lookup.Algorithm.chooser`; of the section it gets the settings that it names.
        batch: every row of one optimizer step, with ``advantages`` and ``old_log_probs``.

    Raises:
        AlgorithmError: the function fails, or returns something else.
    """
    settings = {name: value for name, value in settings_of(chooser, section).items() if chooser.takes(name)}
    mask = batch.items["loss_mask"].bool()
    found = chooser.call({**batch.items, "mask": mask, "row_ids": batch.row_ids(), "generator": generator}, settings)
    for name, value in found.items() if isinstance(found, dict) else [("", found)]:
        if not name or not isinstance(value, torch.Tensor) or value.shape[:1] != mask.shape:
            raise AlgorithmError(
                f"the choice of tokens of the {chooser.label} returned no fields",
                found=f"{name}: {_shown(value)}" if name else _shown(value),
                wanted=f"a dict of tensors of shape ({len(mask)}, ...)",
                next=f"correct {chooser.spec.target}",
            )
    return batch.with_items(**found)


def call_advantages(
    algorithm: Algorithm,
    section: AlgorithmConfig,
    offered: Mapping[str, Any],
    row_ids: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """``advantages``, and ``returns`` where the estimator has them: ``[N]`` float32, zero at tokens that are not trained.

    Args:
        offered: see :mod:`rlctl.algorithms.advantages`.
        row_ids, mask: ``[N]``.

    Raises:
        AlgorithmError: the function fails, or returns something else.
    """
    found = algorithm.call(offered, settings_of(algorithm, section))
    parts = found if isinstance(found, tuple) else (found,)
    num_items, num_rows = len(mask), len(offered["scores"])
    wanted = (
        f"a tensor of shape ({num_rows},), one number a row, or ({num_items},), one a token; or (advantages, returns)"
    )
    if not 1 <= len(parts) <= 2:
        raise _no_advantages(algorithm, f"a tuple of {len(parts)}", wanted)
    out: dict[str, torch.Tensor] = {}
    for name, value in zip(("advantages", "returns"), parts, strict=False):
        if not isinstance(value, torch.Tensor) or value.shape not in ((num_rows,), (num_items,)):
            raise _no_advantages(algorithm, f"{name}: {_shown(value)}", wanted)
        tokens = value[row_ids] if len(value) == num_rows else value
        tokens = torch.where(mask, tokens.detach().float(), 0.0)
        if not bool(tokens.isfinite().all()):
            raise _no_advantages(
                algorithm, f"{name} with {int((~tokens.isfinite()).sum())} that are not finite", wanted
            )
        out[name] = tokens
    return out


def _no_advantages(algorithm: Algorithm, found: str, wanted: str) -> AlgorithmError:
    return AlgorithmError(
        f"the {algorithm.label} returned no advantages",
        found=found,
        wanted=wanted,
        next=f"correct {algorithm.spec.target}",
    )


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
