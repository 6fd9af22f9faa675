"""One GRPO run on recorded rollouts gives one set of metrics, whatever processes compute it."""

from __future__ import annotations

import json
from dataclasses import replace as changed_copy
from pathlib import Path

import pytest
from frozen_rollouts import Recording, largest_difference, record, replay, warm_model
from safetensors.torch import load_file

from rlctl.trainers.run import RunResult

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
Recorded = tuple[RunResult, Recording, Path]


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("frozen")
    model = warm_model(folder)
    result, recording = record(folder / "inline", model)
    assert any(0 < m["critic/score/mean"] < 1 and m["actor/grad_norm"] > 0 for m in result.history)
    return result, recording, model


CASES = {
    "two processes": ["runtime.nproc=2"],
    "two processes, rows in order": [
        "runtime.nproc=2",
        "trainer.balance_batch=false",
        "actor.max_tokens_per_device=400",
    ],
    "two replicas": ["runtime.nproc=2", "actor.parallel.dp_shard=1", "actor.parallel.dp_replicate=2"],
    "two halves of each sequence": ["runtime.nproc=2", "actor.parallel.usp=2"],
    "rollout in a pool of its own": ["runtime.pools.gen.nproc=1", "rollout.pool=gen"],
}


@pytest.mark.parametrize("name", CASES)
def test_processes_compute_what_one_process_does(inline: Recorded, tmp_path: Path, name: str) -> None:
    one, recording, model = inline
    many = replay(tmp_path / "run", model, recording, *CASES[name])
    runtime = json.loads((many.path / "manifest.json").read_text())["runtime"]
    assert runtime["launcher"] == "process"
    pids = {rank["pid"] for pool in runtime["pools"].values() for rank in pool["ranks"]}
    assert len(pids) == 2
    assert largest_difference(one, many) < (TOLERANCE, "")
    assert largest_difference(one, many, extremes=True) < (10 * TOLERANCE, "")


ADAPTERS = ["model.lora={rank: 4}", "actor.optim.lr=2e-3", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1"]


def test_adapters_on_two_processes_are_those_of_one(inline: Recorded, tmp_path: Path) -> None:
    """With the base as reference, and a merged copy in the rollout: shards are no module that it could share."""
    pytest.importorskip("peft", reason="peft is not installed: pip install 'rlctl-plugin-fsdp[lora]'")
    one, recording = record(tmp_path / "inline", inline[2], *ADAPTERS)
    kl = [m["actor/kl_loss"] for m in one.history]
    assert kl[0] == 0 < min(kl[1:])
    many = replay(tmp_path / "halves", inline[2], recording, *ADAPTERS, "runtime.nproc=2", "actor.parallel.usp=2")
    assert set(json.loads((many.path / "manifest.json").read_text())["engines"]) == {"actor", "rollout"}
    assert largest_difference(one, many) < (TOLERANCE, "")
    assert largest_difference(one, many, extremes=True) < (10 * TOLERANCE, "")
    for file in ("export/model.safetensors", "export_adapter/adapter_model.safetensors"):
        a, b = load_file(one.path / file), load_file(many.path / file)
        assert a.keys() == b.keys()
        assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-4


def _on_ray(inline: Recorded, folder: Path, *overrides: str) -> RunResult:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlctl-core[ray]'")
    one, recording, model = inline
    many = replay(folder / "run", model, recording, "runtime.launcher=ray", "runtime.nproc=2", *overrides)
    runtime = json.loads((many.path / "manifest.json").read_text())["runtime"]
    assert runtime["launcher"] == "ray"
    assert len({rank["pid"] for rank in runtime["pools"]["main"]["ranks"]}) == 2
    assert largest_difference(one, many) < (TOLERANCE, "")
    assert largest_difference(one, many, extremes=True) < (10 * TOLERANCE, "")
    return many


def test_two_ray_workers_compute_what_one_process_does(inline: Recorded, tmp_path: Path) -> None:
    _on_ray(inline, tmp_path)


def test_two_ray_nodes_compute_what_one_process_does(inline: Recorded, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlctl-core[ray]'")
    from rlctl.testing.ray_nodes import simulated_nodes

    with simulated_nodes(2, cpus=2) as nodes:
        # One rank fits each node: the actor's replicas meet over the nodes' network.
        where = [f"runtime.ray.address={nodes.address}", "runtime.ray.strategy=STRICT_SPREAD"]
        run = _on_ray(inline, tmp_path, *where)
        logs = sorted(p.name for p in (run.path / "workers" / "main").iterdir())
        assert logs == ["rank_0.log", "rank_1.log"]


def test_the_comparison_sees_one_changed_token(inline: Recorded, tmp_path: Path) -> None:
    one, recording, model = inline
    seed, completions = next(iter(recording.items()))
    first = completions[0]
    changed = changed_copy(first, token_ids=[*first.token_ids[:-1], first.token_ids[-1] ^ 1])
    other = replay(
        tmp_path / "run", model, {**recording, seed: [changed, *completions[1:]]}, "guards.rollout_logprob_check=false"
    )
    assert largest_difference(one, _only_common(other, one)) > (TOLERANCE, "")


def _only_common(run: RunResult, other: RunResult) -> RunResult:
    """``run`` with the metrics that ``other`` has, for what the switched-off check no longer reports."""
    pairs = zip(run.history, other.history, strict=True)
    return changed_copy(run, history=[{k: mine.get(k, theirs[k]) for k in theirs} for mine, theirs in pairs])
