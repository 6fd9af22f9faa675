"""Runs of distillation on recorded rollouts, from one trained pair of models, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rlctl_cli
from rlctl.config.load import load_config
from rlctl.generation import Completion
from rlctl.plugins import load_plugins
from rlctl.roles.rollout import RolloutRole
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner, RunResult

STEPS = 5
TOLERANCE = 1e-4
"""Relative to the size of a number, or to :data:`SMALL` where it is less; absolute for single differences of probabilities."""
SMALL = 1e-2
ABSOLUTE = ("training/rollout_probs_diff_", "actor/ppo_kl")
DIFFER_BY_DESIGN = ("timing_s/", "perf/", "sync/", "global_seqlen/", "training/unix_time", "actor/num_micro_batches",
                    "actor/num_padding_micro_batches", "val/")  # fmt: skip
SETTINGS = [
    "trainer.val_before_train=false",
    "trainer.save_best=false",
    "trainer.logger=[jsonl]",
    "data.task.val_size=4",
    "data.task.args.length=3",
    "data.train_batch_size=8",
    "rollout.n=2",
    # Hot enough that both halves of the vocabulary, which tp=2 splits, have tokens that count.
    "rollout.temperature=3.0",
    "distillation.topk=20",
    "actor.ppo_mini_batch_size=4",
    # Several micro-batches a step, of unequal lengths.
    "actor.max_tokens_per_device=48",
]
TAUGHT = [
    "teacher.train={steps: 30, batch_size: 32, stop_at_score: null, optim: {lr: 1.0e-3}}",
    "warm_start={steps: 6, batch_size: 32, stop_at_score: null, optim: {lr: 1.0e-3}}",
    "trainer.total_training_steps=1",
]
TOKENIZER = Path(rlctl_cli.__file__).parent / "recipes" / "quickstart" / "model"


def moe(hidden: int) -> str:
    """The config of a mixture of four experts, each token to two of them."""
    return (
        f"{{model_type: qwen3_moe, vocab_size: 47, hidden_size: {hidden}, intermediate_size: 48, moe_intermediate_size: 24, "
        "head_dim: 8, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, num_experts: 4, "
        "num_experts_per_tok: 2, norm_topk_prob: true, decoder_sparse_step: 1, mlp_only_layers: [], "
        "max_position_embeddings: 128, tie_word_embeddings: false, bos_token_id: null, eos_token_id: 1, pad_token_id: 0}"
    )


FAMILIES = {
    "llama": [],
    # Student and teacher share a split, so both have experts.
    "qwen3_moe": [f"model.config={moe(32)}", f"teacher.model={{config: {moe(64)}, tokenizer: {TOKENIZER}}}"],
}


@dataclass(frozen=True)
class Reference:
    """What fsdp2 computes in one process."""

    result: RunResult
    recording: dict[int, list[Completion]]


def run(folder: Path, *overrides: str) -> RunResult:
    plugins = load_plugins()
    resolved = load_config("opd", [*SETTINGS, *overrides], plugins=plugins)
    return Runner(resolved, plugins, NullReporter(), run_dir=folder).execute()


class References:
    """Models of a family and recorded runs from them, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, list[str]] = {}
        self._runs: dict[tuple[str, str], Reference] = {}

    def settings(self, family: str, mode: str) -> list[str]:
        """From one student and one teacher of the family, both a little trained."""
        if family not in self._models:
            made = run(self._folder / family, *TAUGHT, *FAMILIES[family]).path
            self._models[family] = [
                "model.config=null",
                f"model.path={made / 'warm_start' / 'export'}",
                f"model.tokenizer={made / 'warm_start' / 'export'}",
                f"teacher.model={{path: {made / 'teacher' / 'export'}}}",
                "teacher.train=null",
                "warm_start=null",
                f"trainer.total_training_steps={STEPS}",
            ]
        return [*self._models[family], f"distillation.loss_mode={mode}"]

    def __call__(self, family: str, mode: str) -> Reference:
        if (family, mode) not in self._runs:
            recording: dict[int, list[Completion]] = {}
            sample = RolloutRole.sample

            def remember(
                self: RolloutRole, prompts: Sequence[Sequence[int]], seed: int, *rest: Any
            ) -> list[Completion]:
                recording[seed] = sample(self, prompts, seed, *rest)
                return recording[seed]

            with patch.object(RolloutRole, "sample", remember):
                result = run(self._folder / f"{family}-{mode}", *self.settings(family, mode))
            assert all(m["actor/num_steps"] == 2 and m["actor/num_micro_batches"] > 2 for m in result.history)
            assert abs(result.history[0]["distillation/loss"]) > 1e-2
            self._runs[family, mode] = Reference(result, recording)
        return self._runs[family, mode]


def gaps(one: RunResult, many: RunResult) -> dict[str, float]:
    """Largest gap of each metric over all steps, as :data:`TOLERANCE` measures it."""
    assert len(one.history) == len(many.history) == STEPS
    found: dict[str, float] = {}
    for x, y in zip(one.history, many.history, strict=True):
        names = {n for n in x if not n.startswith(DIFFER_BY_DESIGN)}
        assert names == {n for n in y if not n.startswith(DIFFER_BY_DESIGN)}
        for name in names:
            if not (math.isnan(x[name]) and math.isnan(y[name])):
                scale = 1.0 if name.startswith(ABSOLUTE) else max(abs(x[name]), SMALL)
                found[name] = max(found.get(name, 0.0), abs(x[name] - y[name]) / scale)
    return found


def replay(references: References, folder: Path, mode: str, *overrides: str) -> tuple[RunResult, dict[str, float]]:
    """The recorded run of the dense pair again, and its gaps to the first."""
    reference = references("llama", mode)

    def recall(self: RolloutRole, prompts: Sequence[Sequence[int]], seed: int, *rest: Any) -> list[Completion]:
        return reference.recording[seed]

    with patch.object(RolloutRole, "sample", recall):
        result = run(folder, *references.settings("llama", mode), *overrides)
    return result, gaps(reference.result, result)
