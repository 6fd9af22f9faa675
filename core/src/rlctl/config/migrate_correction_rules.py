"""What becomes of verl's and TRL's keys about rollout correction; see :mod:`rlctl.config.migrate_rules`. Facts about names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.config.migrate_kinds import Left, Outcome, Rule, needless, on

_HERE = "algorithm.rollout_correction"
_LEVELS = {
    "token": "token",
    "sequence": "sequence",
    "geometric": "geometric",
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
}
"""Older and newer names there to the level here."""

_TRL_MODES = {
    "token_truncate": ("is", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("is", "sequence"),
    "sequence_mask": ("mask", "sequence"),
}


def _interval(value: Any) -> tuple[float | None, float] | None:
    """(lower or None, upper) of ``2.0``, ``"2.0"`` or ``"0.5_2.0"``; None for anything else."""
    words = str(value).split("_")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return None
    if isinstance(value, bool) or len(numbers) > 2:
        return None
    return (None if len(numbers) == 1 else numbers[0]), numbers[-1]


def _bypasses(leaves: Mapping[str, Any]) -> bool:
    return on(f"{_HERE}.bypass_mode", leaves)


def _level(kind: str) -> Rule:
    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if value is None:
            return Left("off there, and so by default here", needless=True)
        if _bypasses(leaves):
            if kind == "is":
                return Left("in bypass mode the policy loss's own ratio is against the rollout", needless=True)
            return Left("rejection needs recomputed log-probs, which bypass_mode saves: take bypass_mode out for it")
        level = _LEVELS.get(value) if isinstance(value, str) else None
        if level is None:
            return Left(f"{_HERE}.rollout_{kind} takes one of token, sequence, geometric, by the ratio")
        return {f"{_HERE}.rollout_{kind}": level}

    return rule


def _bounds(kind: str) -> Rule:
    """An upper bound, or two in one text; they count only where there is a level."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        level = leaves.get(f"{_HERE}.rollout_{kind}")
        if value is None or _bypasses(leaves) or not (isinstance(level, str) and level in _LEVELS):
            return Left(f"counts only with a rollout_{kind} that there is here", needless=True)
        found = _interval(value)
        if found is None:
            return Left("set one number, or two keys: the bounds of the ratio")
        lower, upper = found
        out: dict[str, Any] = {f"{_HERE}.rollout_{kind}_threshold": upper}
        return out if lower is None else out | {f"{_HERE}.rollout_{kind}_threshold_lower": lower}

    return rule


def _lower(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    if value is None or _bypasses(leaves) or leaves.get(f"{_HERE}.rollout_rs") not in _LEVELS:
        return Left("counts only with a rollout_rs that there is here", needless=True)
    return {f"{_HERE}.rollout_rs_threshold_lower": value}


def _bypass(_: Any, leaves: Mapping[str, Any]) -> Outcome:
    return {f"{_HERE}.bypass_mode": True} if _bypasses(leaves) else Left("off by default", needless=True)


def _veto(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    if value is None:
        return Left("off by default", needless=True)
    if _bypasses(leaves):
        return Left("a veto needs recomputed log-probs, which bypass_mode saves: take bypass_mode out for it")
    return {f"{_HERE}.rollout_token_veto_threshold": value}


def _loss_type(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    if value == "ppo_clip" or not _bypasses(leaves):
        return Left("the policy loss with the rollout's log-probs for old ones", needless=True)
    return Left(
        "in bypass mode, truncated weights without a clip are actor.policy_loss.loss_mode cispo with clip_ratio_low 1 and "
        "clip_ratio_high the bound less 1"
    )


def _normalize(value: Any, _: Mapping[str, Any]) -> Outcome:
    return Left("weights are not normalised to a mean of 1") if value else Left("off there", needless=True)


def _cap(value: Any, _: Mapping[str, Any]) -> Outcome:
    """verl's older key: truncated weights of tokens; a number that is not positive is off."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        return Left("off there, and so by default here", needless=True)
    return {f"{_HERE}.rollout_is": "token", f"{_HERE}.rollout_is_threshold": value}


def _trl(_: Any, leaves: Mapping[str, Any]) -> Outcome:
    """TRL: a weight in every mode, which the ``mask`` ones make 0 beyond the cap."""
    if not (on("use_vllm", leaves) and on("vllm_importance_sampling_correction", leaves)):
        return Left("no correction there, and none by default here", needless=True)
    mode, cap = leaves.get("vllm_importance_sampling_mode"), leaves.get("vllm_importance_sampling_cap")
    if not isinstance(mode, str) or mode not in _TRL_MODES or cap is None:
        return Left(f"its defaults differ by version: set {_HERE}.rollout_is and rollout_is_threshold")
    how, level = _TRL_MODES[mode]
    out: dict[str, Any] = {f"{_HERE}.rollout_is": level, f"{_HERE}.rollout_is_threshold": cap}
    return out if how == "is" else out | {f"{_HERE}.rollout_is_threshold_lower": 0.0}


RULES: dict[str, Rule] = {
    # ---- verl
    f"{_HERE}.rollout_is": _level("is"),
    f"{_HERE}.rollout_is_threshold": _bounds("is"),
    f"{_HERE}.rollout_is_batch_normalize": _normalize,
    f"{_HERE}.rollout_rs": _level("rs"),
    f"{_HERE}.rollout_rs_threshold": _bounds("rs"),
    f"{_HERE}.rollout_rs_threshold_lower": _lower,
    f"{_HERE}.rollout_token_veto_threshold": _veto,
    f"{_HERE}.bypass_mode": _bypass,
    f"{_HERE}.loss_type": _loss_type,
    "actor.tis_imp_ratio_cap": _cap,
    "rollout.calculate_log_probs": needless("the rollout always says its log-probs"),
    # ---- TRL
    "vllm_importance_sampling_correction": _trl,
    "vllm_importance_sampling_mode": needless("counts with vllm_importance_sampling_correction"),
    "vllm_importance_sampling_cap": needless("counts with vllm_importance_sampling_correction"),
}
