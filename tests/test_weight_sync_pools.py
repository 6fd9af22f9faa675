"""Real engines in two pools: what a rollout serves after a sync over a link is what was trained, and a run does not see
which way its weights went."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_fault_cases import batch, boots, build_actor, build_rollout

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.config.load import load_config
from rlctl.generation import GenerateRequest, SamplingParams
from rlctl.microbatch import MicroBatchPlan
from rlctl.plugins import load_plugins
from rlctl.runtime.carriage import Transfer
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.transports.process import ProcessTransport
from rlctl.runtime.worker import Worker
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner, RunResult

pytestmark = pytest.mark.slow


def started(name: str, count: int, folder: Path) -> WorkerGroup:
    places = [replace(boot, pool=name, collective_timeout_s=60.0) for boot in boots(count)]
    transport = ProcessTransport(folder / name, {"HF_HUB_OFFLINE": "1"})
    group = WorkerGroup(name, transport, places, Worker, Limits(120.0, 120.0, 3.0, 10.0))
    group.start()
    return group


@pytest.mark.parametrize(("train", "serve"), [(2, 1), (1, 2)])
def test_a_sharded_policy_is_served_as_it_was_trained(train: int, serve: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(started, name, n, tmp_path) for name, n in (("main", train), ("gen", serve))]
        main, gen = (one.result() for one in waiting)
    try:
        actor, rollout = build_actor(main), build_rollout(gen)
        told: list[Any] = []
        for version in (1, 2):
            actor.train_batch(batch(), CrossEntropyLoss(), MicroBatchPlan(max_rows=1))
            # Fingerprints of the live weights of every rollout rank are compared in here.
            report = actor.sync_to(
                rollout, version, share=False, verify=True, dtype=None, transfer=Transfer("collective", 1)
            )
            assert (report.how, report.num_tensors > 10) == ("gloo", True)
            prints = gen.call("fingerprint", "rollout", ("lm_head.weight", "model.embed_tokens.weight"))
            assert all(p == prints[0] for p in prints)
            request = GenerateRequest([[3, 4, 5], [6, 7]], SamplingParams(max_tokens=8, temperature=0.0))
            told.append((prints[0], [c.token_ids for c in rollout.generate(request)]))
            # The other way brings the same: the same fingerprints, the same greedy tokens.
            other = actor.sync_to(
                rollout, version, share=False, verify=True, dtype=None, transfer=Transfer("controller", 1)
            )
            assert (other.how, other.num_tensors, other.num_bytes) == (
                "controller",
                report.num_tensors,
                report.num_bytes,
            )
            assert gen.call("fingerprint", "rollout", ("lm_head.weight", "model.embed_tokens.weight")) == prints
            assert [c.token_ids for c in rollout.generate(request)] == told[-1][1]
        assert told[0][0] != told[1][0], "a step changes the weights"
    finally:
        main.close()
        gen.close()


CLOCK = ("timing_s/", "perf/", "sync/seconds", "sync/peak_bytes", "training/unix_time")


def grpo(folder: Path, *overrides: str) -> RunResult:
    """Three steps on a model with random weights; the entropy term alone moves it, so that nothing has to be learnt."""
    plugins = load_plugins()
    settings = [
        "warm_start=null",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        "trainer.save_best=false",
        "trainer.logger=[jsonl]",
        "trainer.num_threads=1",
        "data.task.val_size=4",
        "data.train_batch_size=4",
        "rollout.n=4",
        "actor.entropy_coeff=0.5",
        "actor.optim.lr=0.01",
        "runtime.pools.gen.nproc=1",
        "rollout.pool=gen",
    ]
    resolved = load_config("quickstart", [*settings, *overrides], plugins=plugins)
    return Runner(resolved, plugins, NullReporter(), run_dir=folder).execute()


def test_a_run_does_not_see_which_way_its_weights_go(tmp_path: Path) -> None:
    runs = {
        name: grpo(tmp_path / name, f"runtime.weight_transport={wish}", "runtime.weight_bucket_mib=1")
        for name, wish in (("shared_memory", "auto"), ("gloo", "collective"), ("controller", "controller"))
    }
    for name, run in runs.items():
        assert json.loads((run.path / "manifest.json").read_text())["runtime"]["weight_sync"] == name
        assert all(
            m["sync/bytes"] > 0 and m["perf/sync_gb_per_s"] > 0 and m["actor/grad_norm"] > 0 for m in run.history
        )
    plain = [[{k: v for k, v in m.items() if not k.startswith(CLOCK)} for m in run.history] for run in runs.values()]
    assert all(len(m) > 20 for m in plain[0])
    assert str(plain[0]) == str(plain[1]) == str(plain[2])  # as text: a metric may rightly be nan
    assert plain[0][0]["training/rollout_probs_diff_mean"] != plain[0][2]["training/rollout_probs_diff_mean"]
    # The exports are one file, bit for bit.
    weights = [(run.path / "export" / "model.safetensors").read_bytes() for run in runs.values()]
    assert weights[0] == weights[1] == weights[2]
