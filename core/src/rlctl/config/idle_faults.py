"""Settings given on the command line that a trainer of pairs does not read. Imports no torch.

A file may serve several trainers, and the file of a run has every key written down; what is typed is meant for this run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlctl.config.document import Document, Loc, dotted
from rlctl.config.problems import Problem
from rlctl.config.sft_faults import TRAINER_WORDS
from rlctl.trainer_kinds import PAIR_TRAINERS

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig

_SECTIONS = ("rollout", "reward", "algorithm", "warm_start", "distillation", "teacher")
_ACTOR = (
    "policy_loss",
    "loss_agg_mode",
    "ppo_mini_batch_size",
    "ppo_epochs",
    "kl_loss_coef",
    "kl_loss_type",
    "skip_zero_advantage",
)
_UNREAD = (
    *((name,) for name in _SECTIONS),
    *(("actor", key) for key in _ACTOR),
    ("guards", "rollout_logprob_check"),
    ("guards", "rollout_probs_diff_mean_max"),
    ("guards", "weight_fingerprint"),
    ("trainer", "rollout_samples"),
)


def idle_problems(document: Document, config: RunConfig) -> list[Problem]:
    """One of each override that nothing of the run reads."""
    kind = config.trainer.type
    if kind not in PAIR_TRAINERS:
        return []
    words = TRAINER_WORDS[kind]
    found = [
        Problem(
            dotted(loc), origin, f"{dotted(loc)} has nothing to do in {words}: take it out, or set trainer.type to rl"
        )
        for loc, origin in _typed(document)
        if any(loc[: len(place)] == place for place in _UNREAD)
    ]
    if not config.needs_reference:
        why = words if kind == "rm" else "a loss without a reference (dpo.loss_type simpo, dpo.reference_free)"
        found += [
            Problem(dotted(loc), origin, f"{dotted(loc)} has nothing to do in {why}: take it out")
            for loc, origin in _typed(document)
            if loc[0] == "ref"
        ]
    return found


def _typed(document: Document) -> Iterator[tuple[Loc, str]]:
    """(place, origin) of each override, and of the one flag that is for RL alone; of a list, the list as a whole. What sets null
    takes something out."""
    seen: set[Loc] = set()
    for given, origin in document.origins.items():
        if origin.kind != "override" and origin.text != "flag --rollout":
            continue
        loc = given[: next((i for i, part in enumerate(given) if isinstance(part, int)), len(given))]
        value = document.get(loc)
        # A section on the way to what was typed has its origin too.
        if loc in seen or value is None or (isinstance(value, dict) and value):
            continue
        seen.add(loc)
        yield loc, str(origin)
