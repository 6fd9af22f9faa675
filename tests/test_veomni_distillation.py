"""Distillation on recorded rollouts: a mixture that veomni spreads over two ranks (experts and rows) has the curve that fsdp2 has in one
process, which computes all experts on one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

if importlib.util.find_spec("veomni") is None:  # not imported here: it would log all it does
    pytest.skip("veomni is not installed (it has an environment of its own)", allow_module_level=True)

from fsdp2_beside_veomni import fsdp2_beside
from recorded_distillation import TOLERANCE, References, gaps, run

from rlctl.generation import Completion
from rlctl.records import EvidenceLevel
from rlctl.roles.rollout import RolloutRole
from rlctl.testing.evidence import record_evidence

pytestmark = pytest.mark.slow

AXES = {"usp": 2, "ep": 2}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    with fsdp2_beside(tmp_path_factory.mktemp("site")):
        yield References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk"])
def test_experts_and_rows_on_two_ranks_report_the_curve_of_one_process(
    references: References, tmp_path: Path, mode: str
) -> None:
    reference = references("qwen3_moe", mode)

    def recall(self: RolloutRole, prompts: Sequence[Sequence[int]], seed: int, *rest: Any) -> list[Completion]:
        return reference.recording[seed]

    split = ["actor.backend=veomni", "runtime.nproc=2", *(f"actor.parallel.{k}={v}" for k, v in AXES.items())]
    with patch.object(RolloutRole, "sample", recall):
        many = run(tmp_path / "run", *references.settings("qwen3_moe", mode), *split)
    engines = json.loads((many.path / "manifest.json").read_text())["engines"]
    assert engines["actor"]["backend"] == engines["teacher"]["backend"] == "veomni"
    ran = engines["actor"]["axes"]
    assert ran == engines["teacher"]["axes"]
    assert AXES.items() <= ran.items()
    found = gaps(reference.result, many)
    expected = {"distillation/loss", "distillation/kl", "actor/grad_norm", "actor/loss", "actor/entropy"}
    assert expected <= set(found), sorted(found)
    assert max(found.values()) < TOLERANCE, sorted(found.items(), key=lambda kv: -kv[1])[:8]
    record_evidence(
        "-".join([*(f"{k}{v}" for k, v in ran.items()), "cpu-qwen3_moe-distillation", mode]),
        backend="veomni",
        level=EvidenceLevel.PARITY,
        axes=ran,
        world_size=2,
        device="cpu",
        model_family="qwen3_moe",
        what=f"on-policy distillation ({mode}), five steps on recorded rollouts: the curve of one process of fsdp2",
        deltas={name: found[name] for name in sorted(expected)},
        dists=("torch", "transformers", "veomni"),
    )
