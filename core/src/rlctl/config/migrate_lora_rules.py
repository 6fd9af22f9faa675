"""What becomes of adapters in files of verl and TRL; see :mod:`rlctl.config.migrate_rules`. Facts about names.

Both have a switch, a rank or ``use_peft``, without which the other keys count for nothing; their defaults are not ours, so the
switch writes those down too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.config.migrate_kinds import Left, Outcome, Rule, on

_OFF = "no adapters there"
_VERL_ALPHA = 16
_TRL = {"lora_r": ("rank", 16), "lora_alpha": ("alpha", 32), "lora_dropout": ("dropout", 0.05)}
"""TRL's key -> ours, and its default."""


def _has_rank(leaves: Mapping[str, Any], section: str) -> bool:
    rank = leaves.get(f"{section}.lora_rank")
    return isinstance(rank, int) and rank > 0


def _rank(section: str) -> Rule:
    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if not value:
            return Left(_OFF, needless=True)
        alpha = leaves.get(f"{section}.lora_alpha")
        return {f"{section}.lora.rank": value, f"{section}.lora.alpha": _VERL_ALPHA if alpha is None else alpha}

    return rule


def _with_rank(section: str, key: str) -> Rule:
    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if value is None or not _has_rank(leaves, section):
            return Left(_OFF if value is not None else "not set there", needless=True)
        return {f"{section}.lora.{key}": value}

    return rule


def _adapter_path(value: Any, _: Mapping[str, Any]) -> Outcome:
    if value is None:
        return Left("not set there", needless=True)
    return Left(
        "adapters start anew here: merge that one into the model first (peft's merge_and_unload), and set model.path to it"
    )


def _use_peft(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    if not on("use_peft", leaves):
        return Left(_OFF, needless=True)
    return {f"model.lora.{ours}": leaves.get(key, default) for key, (ours, default) in _TRL.items()}


def _of_peft(path: str, reason: str = "") -> Rule:
    """A key that counts with ``use_peft``; where that is on it sets ``path``, or nothing for ``reason``."""

    def rule(value: Any, leaves: Mapping[str, Any]) -> Outcome:
        if not value or not on("use_peft", leaves):
            return Left(_OFF if value else "not set there", needless=True)
        return Left(reason) if reason else {path: value}

    return rule


def _by_the_head(value: Any, _: Mapping[str, Any]) -> Outcome:
    return Left("the head of the model says it", needless=True)


def _targets(value: Any, leaves: Mapping[str, Any]) -> Outcome:
    """TRL reads a list from its command line, where one word is a list of one."""
    one = isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and value[0].lower() == "all-linear"
    return _of_peft("model.lora.target_modules")("all-linear" if one else value, leaves)


RULES: dict[str, Rule] = {
    **{
        f"{section}.{key}": rule
        for section in ("model", "critic.model")
        for key, rule in {
            "lora_rank": _rank(section),
            "lora_alpha": _with_rank(section, "alpha"),
            "target_modules": _with_rank(section, "target_modules"),
            "exclude_modules": _with_rank(section, "exclude_modules"),
            "lora_adapter_path": _adapter_path,
        }.items()
    },
    "use_peft": _use_peft,
    **{key: _of_peft(f"model.lora.{ours}") for key, (ours, _) in _TRL.items()},
    "use_rslora": _of_peft("model.lora.use_rslora"),
    "lora_target_modules": _targets,
    "lora_task_type": _by_the_head,
    "lora_modules_to_save": _of_peft("", "layers are trained by adapters alone, or all of them without model.lora"),
    "lora_target_parameters": _of_peft(
        "", "tensors that are no linear layer, such as fused experts, take no adapter here"
    ),
    "use_dora": _of_peft("", "rlctl has plain and rank-stabilised LoRA (model.lora.use_rslora)"),
}
