"""Distillation on recorded rollouts: every backend and split reports the curve of one process of fsdp2.

The losses name no backend; what could differ is how each engine's reader finds a teacher's tokens in its shard of the
vocabulary, its part of the sequence, or its stage. Student and teacher run on the same split.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kept_ranks import kept_ranks
from recorded_distillation import TOLERANCE, References, gaps, replay, run

from rlctl.batch import PackedBatch
from rlctl.generation import Completion
from rlctl.records import EvidenceLevel
from rlctl.roles.rollout import RolloutRole
from rlctl.roles.teacher import TeacherRole
from rlctl.testing.evidence import record_evidence

pytestmark = pytest.mark.slow

CASES = {
    "fsdp2 usp2": ("llama", "fsdp2", {"usp": 2}),
    "megatron tp2": ("llama", "megatron", {"tp": 2}),
    "megatron pp2": ("llama", "megatron", {"pp": 2}),
    "megatron cp2": ("llama", "megatron", {"cp": 2}),
    "megatron ep2": ("qwen3_moe", "megatron", {"ep": 2}),
}
MODES = ("k3", "forward_kl_topk", "reverse_kl_topk", "k1")
SHIPPED = ("k3", "forward_kl_topk")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[list[int]]:
    with kept_ranks() as pids:
        yield pids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_every_split_reports_the_curve_of_one_process(
    references: References, two_ranks: list[int], tmp_path: Path, case: str, mode: str
) -> None:
    family, backend, axes = CASES[case]
    if backend == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    reference = references(family, mode)

    def recall(self: RolloutRole, prompts: Sequence[Sequence[int]], seed: int, *rest: Any) -> list[Completion]:
        return reference.recording[seed]

    split = [f"actor.backend={backend}", "runtime.nproc=2", *(f"actor.parallel.{k}={v}" for k, v in axes.items())]
    with patch.object(RolloutRole, "sample", recall):
        many = run(tmp_path / "run", *references.settings(family, mode), *split)
    manifest = json.loads((many.path / "manifest.json").read_text())
    assert [rank["pid"] for rank in manifest["runtime"]["pools"]["main"]["ranks"]] == two_ranks
    engines = manifest["engines"]
    assert engines["actor"]["backend"] == engines["teacher"]["backend"] == backend
    ran = engines["actor"]["axes"]
    assert ran == engines["teacher"]["axes"]
    assert axes.items() <= ran.items()
    found = gaps(reference.result, many)
    expected = {"distillation/loss", "distillation/kl", "actor/grad_norm", "actor/loss", "actor/entropy"}
    assert expected <= set(found), sorted(found)
    worst = max((gap, name) for name, gap in found.items())
    print(case, mode, worst)
    assert worst[0] < TOLERANCE, sorted(found.items(), key=lambda kv: -kv[1])[:8]
    if mode in SHIPPED:
        record_evidence(
            "-".join([*(f"{k}{v}" for k, v in ran.items()), "cpu", family, "distillation", mode]),
            backend=backend,
            level=EvidenceLevel.PARITY,
            axes=ran,
            world_size=2,
            device="cpu",
            model_family=family,
            what=f"on-policy distillation ({mode}), five steps on recorded rollouts: the curve of one process of fsdp2",
            deltas={name: found[name] for name in sorted(expected)},
            dists=("torch", "transformers", *(("megatron-core",) if backend == "megatron" else ())),
        )


def test_a_teacher_in_a_pool_of_its_own_says_the_same(
    references: References, two_ranks: list[int], tmp_path: Path
) -> None:
    pools = ["runtime.nproc=2", "actor.parallel.usp=2", "runtime.pools.judges.nproc=1", "teacher.pool=judges"]
    own = ["teacher.parallel={usp: 1}", "teacher.max_tokens_per_device=32"]
    result, found = replay(references, tmp_path / "run", "forward_kl_topk", *pools, *own)
    manifest = json.loads((result.path / "manifest.json").read_text())
    assert set(manifest["runtime"]["pools"]) == {"main", "judges"}
    assert (manifest["engines"]["teacher"]["pool"], manifest["engines"]["actor"]["pool"]) == ("judges", "main")
    assert (manifest["engines"]["teacher"]["axes"], manifest["engines"]["actor"]["axes"]) == ({}, {"usp": 2})
    assert max(found.values()) < TOLERANCE


FAULTS = {
    "ids of one half of the vocabulary": lambda items: {"teacher_topk_ids": items["teacher_topk_ids"] % 24},
    "the ids of the next token": lambda items: {"teacher_topk_ids": items["teacher_topk_ids"].roll(1, 0)},
    "log-probs in another order than ids": lambda items: {
        "teacher_topk_log_probs": items["teacher_topk_log_probs"].flip(1)
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_a_teachers_fault(references: References, tmp_path: Path, fault: str) -> None:
    honest = TeacherRole.annotate

    def broken(self: TeacherRole, *arguments: Any) -> PackedBatch:
        batch = honest(self, *arguments)
        return batch.with_items(**FAULTS[fault](batch.items))

    with patch.object(TeacherRole, "annotate", broken):
        _, found = replay(references, tmp_path / "run", "forward_kl_topk")
    assert found["distillation/loss"] > 100 * TOLERANCE
