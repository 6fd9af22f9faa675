"""SFT and GRPO on recorded rollouts: megatron at every split reports what fsdp2 reports.

Two processes serve all cases, one after the other: a real run takes them over, builds its engines there with its own axes, and
drops them at its end. Starting them costs more than all the training.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from frozen_rollouts import STEPS, Recording, record, replay
from safetensors.torch import load_file

import rlctl_cli
from rlctl.runtime.group import WorkerGroup
from rlctl.runtime.pools import Pools
from rlctl.trainers import setup
from rlctl.trainers.run import RunResult

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
"""Relative; absolute for what is a difference already (a KL, a mean of advantages), where it is under :data:`SMALL`."""
SMALL = 1e-2

MEGATRON = "actor.backend=megatron"
MODEL = Path(rlctl_cli.__file__).parent / "recipes" / "quickstart" / "model"
GRPO = [
    # Drawn from the seed, taught by SFT what digits are, and then by GRPO.
    "model.init=random",
    "warm_start={steps: 8, batch_size: 64, stop_at_score: null, optim: {lr: 1.0e-3}}",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "data.task.args.length=3",
    "data.train_batch_size=8",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=4",
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.1",
    "actor.entropy_coeff=0.01",
    # Several micro-batches a step, of unequal lengths.
    "actor.max_tokens_per_device=96",
]
SFT = [
    "trainer.type=sft",
    "data.task.args.length=3",
    "data.train_batch_size=8",
    "actor.max_tokens_per_device=48",
    "trainer.test_freq=2",
]
SPLITS = {
    "tp2": ["actor.parallel.tp=2"],
    "tp2 sp": ["actor.parallel.tp=2", "actor.parallel.sp=true"],
    "pp2": ["actor.parallel.pp=2"],
    "cp2": ["actor.parallel.cp=2"],
}
DIFFER_BY_DESIGN = (
    "timing_s/",
    "perf/",
    "sync/",
    "global_seqlen/",
    "training/unix_time",
    "actor/num_micro_batches",
    "critic/num_micro_batches",
)
SAMPLED_LIVE = ("val/score", "val/response")
ABSOLUTE = ("training/rollout_probs_diff_", "actor/ppo_kl")
"""Means of signed or single differences of probabilities and log-probs."""
PADDING = 0
"""The quickstart's padding token. A model that has hardly learned samples it, and its embedding is a case of its own."""


@dataclass(frozen=True)
class Reference:
    """What fsdp2 computes in one process."""

    grpo: RunResult
    recording: Recording
    sft: RunResult

    @property
    def model(self) -> Path:
        """A Hugging Face directory."""
        return self.grpo.path / "export"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("same")
    grpo, recording = record(folder / "grpo", MODEL, *GRPO)
    assert any(0 < m["critic/score/mean"] < 1 and m["actor/grad_norm"] > 0 for m in grpo.history)
    assert all(m["actor/num_steps"] == 2 and m["actor/num_micro_batches"] > 2 for m in grpo.history)
    assert grpo.last["actor/kl_loss"] > 1e-4
    assert any(PADDING in c.token_ids for completions in recording.values() for c in completions)
    sft, _ = record(folder / "sft", grpo.path / "export", *SFT)
    return Reference(grpo, recording, sft)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[list[int]]:
    """Every run on two processes uses the same two; their ids, once they run."""
    kept: dict[int, WorkerGroup] = {}
    pids: list[int] = []

    class Kept(Pools):
        def group(self, pool: str) -> WorkerGroup:
            size = self.size(pool)
            if size == 1:
                return super().group(pool)
            if size not in kept:
                kept[size] = super().group(pool)
                pids.extend(hello.pid for hello in kept[size].hellos)
            self._groups[pool] = kept[size]
            return kept[size]

        def close(self) -> None:
            for pool, group in list(self._groups.items()):
                if group in kept.values():
                    for role in ("rollout", "ref", "actor", "warm_start"):
                        group.call("drop", role)
                    del self._groups[pool]
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "Pools", Kept)
        yield pids
    for group in kept.values():
        group.close()


def gaps(one: RunResult, many: RunResult) -> dict[str, float]:
    """Largest gap of each metric over all steps, as :data:`TOLERANCE` measures it."""
    assert len(one.history) == len(many.history) == STEPS
    found: dict[str, float] = {}
    for x, y in zip(one.history, many.history, strict=True):
        names = {n for n in x if not n.startswith(DIFFER_BY_DESIGN)}
        assert names == {n for n in y if not n.startswith(DIFFER_BY_DESIGN)}
        for name in names:
            if name.startswith(SAMPLED_LIVE) or (math.isnan(x[name]) and math.isnan(y[name])):
                continue
            scale = 1.0 if name.startswith(ABSOLUTE) else max(abs(x[name]), SMALL)
            found[name] = max(found.get(name, 0.0), abs(x[name] - y[name]) / scale)
    return found


def warm_start_gap(one: RunResult, many: RunResult) -> float:
    """The same for the SFT steps before the run's own."""
    histories = [
        [json.loads(line) for line in (run.path / "warm_start" / "metrics.jsonl").read_text().splitlines()]
        for run in (one, many)
    ]
    assert len(histories[0]) == len(histories[1]) == 8
    return max(
        abs(x[name] - y[name]) / abs(x[name])
        for x, y in zip(*histories, strict=True)
        for name in ("train/loss", "train/grad_norm")
    )


def assert_same(one: RunResult, many: RunResult, *expected: str) -> None:
    found = gaps(one, many)
    assert set(expected) <= set(found), sorted(found)
    print(max((gap, name) for name, gap in found.items()))
    assert max(found.values()) < TOLERANCE, sorted(found.items(), key=lambda kv: -kv[1])[:8]
    engine = json.loads((many.path / "manifest.json").read_text())["engines"]["actor"]
    assert engine["backend"] == "megatron"


def assert_grpo(reference: Reference, run: RunResult) -> None:
    assert_same(
        reference.grpo, run, "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "actor/ppo_kl",
        "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max",
    )  # fmt: skip
    assert warm_start_gap(reference.grpo, run) < TOLERANCE


def test_one_rank_of_megatron_reports_what_fsdp2_does(reference: Reference, tmp_path: Path) -> None:
    grpo = replay(tmp_path / "grpo", MODEL, reference.recording, MEGATRON, *GRPO)
    assert_grpo(reference, grpo)
    sft = replay(tmp_path / "sft", reference.model, {}, MEGATRON, *SFT)
    assert_same(reference.sft, sft, "train/loss", "train/grad_norm", "val/loss")


@pytest.mark.parametrize("split", SPLITS)
def test_split_ranks_of_megatron_report_what_fsdp2_does(
    reference: Reference, two_ranks: list[int], tmp_path: Path, split: str
) -> None:
    ranks = ["runtime.nproc=2", MEGATRON, *SPLITS[split]]
    grpo = replay(tmp_path / "grpo", MODEL, reference.recording, *ranks, *GRPO)
    assert_grpo(reference, grpo)
    manifest = json.loads((grpo.path / "manifest.json").read_text())
    assert [rank["pid"] for rank in manifest["runtime"]["pools"]["main"]["ranks"]] == two_ranks
    assert len({*two_ranks, os.getpid()}) == 3
    assert manifest["engines"]["actor"]["axes"] == manifest["engines"]["ref"]["axes"] != {}
    sft = replay(tmp_path / "sft", reference.model, {}, *ranks, *SFT)
    assert_same(reference.sft, sft, "train/loss", "train/grad_norm", "val/loss")


def test_a_seed_draws_the_weights_that_fsdp2_draws(tmp_path: Path) -> None:
    drawn: list[dict[str, torch.Tensor]] = []
    for backend in ("fsdp2", "megatron"):
        # Too small a step to move anything in float32.
        still = ["actor.optim={lr: 1.0e-60, weight_decay: 0.0}", "trainer.total_training_steps=1"]
        run = replay(tmp_path / backend, MODEL, {}, "model.init=random", *SFT, *still, f"actor.backend={backend}")
        drawn.append(load_file(run.path / "export" / "model.safetensors"))
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(value, drawn[1][name]) for name, value in drawn[0].items())
