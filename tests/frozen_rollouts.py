"""The quickstart's GRPO on rollouts that were recorded once: what every launcher must compute alike.

Live rollouts may differ by a token where two probabilities are nearly equal; recorded ones leave only the numerics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlctl.config.load import load_config
from rlctl.generation import Completion
from rlctl.plugins import load_plugins
from rlctl.roles.rollout import RolloutRole
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner, RunResult

STEPS = 5
SETTINGS = [
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.save_best=false",
    "trainer.logger=[jsonl]",
    "trainer.num_threads=1",
    "data.task.val_size=4",
    "data.train_batch_size=16",
]
_OTHER = (
    "timing_s/",
    "perf/",
    "sync/",
    "global_seqlen/",
    "val/",
    "training/unix_time",
    "actor/num_micro_batches",
    "critic/num_micro_batches",
)
"""Metrics of time, memory and layout, which differ by design, and validation, which is sampled live."""

_EXTREME = "training/rollout_probs_diff_max"

Recording = dict[int, list[Completion]]
"""Seed of a step's rollouts -> its completions."""


def warm_model(folder: Path) -> Path:
    """A model whose samples differ in reward: the quickstart's after a short SFT."""
    steps = ["warm_start.steps=110", "warm_start.stop_at_score=null", "trainer.total_training_steps=1"]
    run = _run(folder / "warm", [*SETTINGS, *steps])
    return run.path / "warm_start" / "export"


def record(folder: Path, model: Path, *overrides: str) -> tuple[RunResult, Recording]:
    """An inline run, and its rollouts."""
    recording: Recording = {}
    sample = RolloutRole.sample

    def remember(self: RolloutRole, prompts: Sequence[Sequence[int]], seed: int, *rest: Any) -> list[Completion]:
        recording[seed] = sample(self, prompts, seed, *rest)
        return recording[seed]

    with patch.object(RolloutRole, "sample", remember):
        return _run(folder, [*_from(model), *overrides]), recording


def replay(folder: Path, model: Path, recording: Recording, *overrides: str) -> RunResult:
    """The same run with the recorded rollouts; weights are still handed to the rollout engine after each step."""

    def recall(self: RolloutRole, prompts: Sequence[Sequence[int]], seed: int, *rest: Any) -> list[Completion]:
        return recording[seed]

    with patch.object(RolloutRole, "sample", recall):
        return _run(folder, [*_from(model), *overrides])


def largest_difference(a: RunResult, b: RunResult, *, extremes: bool = False, steps: int = STEPS) -> tuple[float, str]:
    """(largest difference of any metric of any step, absolute or relative to its size where that is over 1; its name).

    Args:
        extremes: look at the largest single token's gap instead of all other metrics. AdamW turns the sign of a gradient
            of 1e-9 into a whole step, so the worst of thousands of tokens moves more than any mean does.
        steps: how many there are.
    """
    assert len(a.history) == len(b.history) == steps
    worst = (0.0, "")
    for step, (x, y) in enumerate(zip(a.history, b.history, strict=True), 1):
        names = {n for n in x if not n.startswith(_OTHER)}
        assert names == {n for n in y if not n.startswith(_OTHER)}
        assert len(names) > 20, sorted(names)
        for name in names:
            if (name == _EXTREME) is not extremes or (math.isnan(x[name]) and math.isnan(y[name])):
                continue
            gap = abs(x[name] - y[name]) / max(1.0, abs(x[name]))
            worst = max(worst, (gap, f"{name} at step {step}"))
    return worst


def _from(model: Path) -> list[str]:
    return [*SETTINGS, "warm_start=null", f"model.path={model}", "model.init=pretrained"]


def _run(folder: Path, overrides: Sequence[str]) -> RunResult:
    plugins = load_plugins()
    resolved = load_config("quickstart", overrides, plugins=plugins)
    return Runner(resolved, plugins, NullReporter(), run_dir=folder).execute()
