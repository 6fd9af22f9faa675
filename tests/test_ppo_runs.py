"""PPO with a critic end to end: a pause changes nothing, the critic warms up alone, learns, and is the same on every split."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_rollouts import Recording, largest_difference, record, replay
from kept_ranks import kept_ranks
from safetensors.torch import load_file

from rlctl.checkpoint import find_damage, latest_checkpoint, list_checkpoints
from rlctl.config.load import load_config
from rlctl.errors import AlgorithmError, CheckpointError, ConfigError, DataError
from rlctl.plugins import load_plugins
from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import record_evidence
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner, RunResult

ROOT = Path(__file__).parents[1]
TINY = [
    "algorithm.adv_estimator=gae",
    "data.train_batch_size=4",
    "rollout.n=2",
    "data.val_batch_size=16",
    "data.task.val_size=8",
    "data.task.train_size=10",
    "data.task.args={length: 3}",
    "trainer.num_threads=1",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.logger=[jsonl]",
    "warm_start={steps: 8, batch_size: 10, optim: {lr: 1.0e-3}}",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "actor.optim.lr=1e-3",
    "critic.optim.lr=1e-3",
]
WITHOUT_CRITIC = [o for o in TINY if not o.startswith(("critic.", "algorithm."))]
OFF_POLICY = ["actor.ppo_epochs=2", "actor.ppo_mini_batch_size=2", "algorithm.lam=0.9"]


def train(run: Path, *overrides: str, resume: bool = False, ppo: bool = True) -> RunResult:
    plugins = load_plugins()
    base = TINY if ppo else WITHOUT_CRITIC
    resolved = load_config("quickstart", [*base, *overrides], plugins=plugins)
    where = {"resume": run} if resume else {"run_dir": run}
    return Runner(resolved, plugins, NullReporter(), **where).execute()


def numbers(run: Path) -> list[dict[str, float]]:
    """Every metric that is no time or memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = ("timing_s/", "perf/", "sync/seconds", "training/unix_time")
    return [{k: v for k, v in line.items() if not k.startswith(clock)} for line in lines]


def weights(run: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(run / name / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stop_before(monkeypatch: pytest.MonkeyPatch, run: Path, step: int, *overrides: str, ppo: bool = True) -> None:
    class PulledPlugError(Exception):
        pass

    honest = Runner._step

    def unplugged(self: Runner, trainer: Any, number: int) -> dict[str, float]:
        if number == step:
            raise PulledPlugError
        return honest(self, trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_step", unplugged)
        with pytest.raises(PulledPlugError):
            train(run, *overrides, ppo=ppo)


def test_a_pause_changes_no_number_and_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = [*OFF_POLICY, "critic.optim.lr_scheduler_type=cosine"]
    train(whole, *settings)
    stop_before(monkeypatch, broken, 4, *settings)
    train(broken, *settings, resume=True)
    assert numbers(broken) == numbers(whole)
    for name in ("export", "critic"):
        assert same(weights(whole, name), weights(broken, name)), name
    last = numbers(whole)[-1]
    assert last["critic/num_steps"] == 4
    assert last["critic/grad_norm"] > 0
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert {"timing_s/values", "timing_s/update_critic"} <= lines[-1].keys()


def test_a_run_is_the_end_to_end_evidence_of_one_process(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *OFF_POLICY)
    written = {key for line in (run.path / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    known = set(re.findall(r"`([a-z_]+/[\w/<>]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert {"critic/vf_explained_var", "critic/advantages/mean", "timing_s/values"} <= written
    assert not {k for k in written - known if not k.startswith(("val/score/", "reward/"))}
    from transformers import AutoModelForTokenClassification

    model: Any = AutoModelForTokenClassification.from_pretrained(run.path / "critic", dtype=torch.float32)
    saved, own = weights(run.path, "critic"), model.state_dict()
    assert same(saved, dict(own))
    assert model.score.weight.shape == (1, 128)
    before = weights(run.path / "warm_start", "export")
    moved = max((before[k] - v).abs().max().item() for k, v in saved.items() if k in before)
    assert moved > 0
    record_evidence(
        "one-process-cpu-ppo-value_model",
        backend="fsdp2",
        level=EvidenceLevel.END_TO_END,
        axes={},
        world_size=1,
        device="cpu",
        model_family="llama",
        model_type="value_model",
        what="PPO in small: SFT warm start, four steps with a critic, checkpoint, export that transformers reloads",
        deltas={"weights_moved_max": moved},
    )


def test_a_damaged_or_missing_critic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    stop_before(monkeypatch, run, 4)
    [(_, checkpoint)] = list_checkpoints(run)
    [file, *_] = sorted(p for p in (checkpoint / "critic").rglob("*") if p.is_file())
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(bytes(body))
    damage = find_damage(checkpoint)
    assert damage is not None
    assert damage.startswith(f"critic/{file.name} has changed")
    with pytest.raises(CheckpointError, match="every checkpoint of this run is damaged"):
        train(run, resume=True)


def test_a_run_without_a_critic_keeps_its_checkpoints_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    stop_before(monkeypatch, run, 4, ppo=False)
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert sorted(p.name for p in checkpoint.path.iterdir()) == ["engine", "manifest.json", "trainer.json"]
    assert "parts" not in checkpoint.manifest
    assert not [key for key in checkpoint.state()["trainer"] if "critic" in key]
    with pytest.raises(CheckpointError, match="has no critic"):
        train(run, resume=True)


def test_the_critic_warms_up_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    alone = ["critic.warmup_steps=6", "trainer.total_training_steps=7", "critic.ppo_epochs=2", "trainer.save_freq=0"]
    said: list[str] = []
    monkeypatch.setattr(NullReporter, "message", lambda self, text: said.append(text))
    real = Runner._step

    def look(self: Runner, trainer: Any, step: int) -> Any:
        if step == 7:
            self._export(run / "six")
        return real(self, trainer, step)

    monkeypatch.setattr(Runner, "_step", look)
    result = train(run, *alone, "critic.value_clip=null")
    loss = [m["critic/vf_loss"] for m in result.history]
    assert min(loss[3:]) < 0.5 * loss[0], "it learns what rewards there are"
    assert same(weights(run, "six"), weights(run / "warm_start", "export")), "the actor stayed as it was"
    assert not same(weights(run, "export"), weights(run, "six")), "and then it learnt"
    assert all("critic/grad_norm" in m for m in result.history)
    assert ["actor/grad_norm" in m for m in result.history] == [False] * 6 + [True]
    assert said.count("the first 6 steps train the critic alone (critic.warmup_steps)") == 1
    before, after = weights(run / "warm_start", "export"), weights(run, "critic")
    assert after.keys() - before.keys() == {"score.weight"}
    assert all(not torch.equal(after[name], before[name]) for name in after.keys() & before.keys())


def test_a_warm_up_as_long_as_the_epochs_is_refused_before_a_launch(tmp_path: Path) -> None:
    epochs = ["trainer.total_training_steps=null", "trainer.total_epochs=1", "data.task.train_size=16"]
    with pytest.raises(ConfigError, match=r"the run has 4 steps .trainer.total_epochs 1.: the actor would never"):
        train(tmp_path / "run", *epochs, "data.train_batch_size=4", "critic.warmup_steps=4")


def test_a_critic_starts_from_one_and_reads_what_the_actor_writes(tmp_path: Path) -> None:
    short = ["trainer.total_training_steps=2", "critic.warmup_steps=1"]
    first = train(tmp_path / "first", *short, "critic.optim.lr=1e-2")
    judge = tmp_path / "first" / "critic"
    again = train(tmp_path / "again", *short, f"critic.model.path={judge}", "critic.optim.lr=1e-30")
    assert same(weights(tmp_path / "again", "critic"), weights(tmp_path / "first", "critic")), (
        "read whole, its head too"
    )
    # The same rollouts (the actor has not moved): what it says of them now differs from what the fresh head said.
    assert again.history[0]["critic/score/mean"] == first.history[0]["critic/score/mean"]
    assert abs(again.history[0]["critic/values/mean"] - first.history[0]["critic/values/mean"]) > 0.01
    other = tmp_path / "other"
    shutil.copytree(judge, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["4"], ids["7"] = ids["7"], ids["4"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="actor and critic have different tokens"):
        train(tmp_path / "refused", *short, f"critic.model.path={other}")


OWN = """
def judged(scores, values, mask, row_ids):
    returns = scores[row_ids]
    return returns - values, returns


def dumb(scores, values, row_ids):
    return scores[row_ids] - values


def plain(scores):
    return scores
"""


def test_an_estimator_of_ones_own_reads_a_critic(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def one_step(name: str, *more: str) -> RunResult:
        own = ["algorithm.adv_estimator=" + str(tmp_path / "own.py") + ":" + name, "trainer.total_training_steps=1"]
        return train(tmp_path / f"{name}-{len(more)}", *own, *more, ppo=False)

    [m] = one_step("judged", "critic={}").history
    assert m["critic/returns/mean"] == pytest.approx(m["critic/score/mean"], abs=0.2)
    assert m["critic/advantages/mean"] == pytest.approx(m["critic/returns/mean"] - m["critic/values/mean"], abs=1e-5)
    with pytest.raises(AlgorithmError, match="says nothing that a critic could learn"):
        one_step("dumb", "critic={}")
    with pytest.raises(ConfigError, match="reads a critic's values"):
        one_step("judged")
    with pytest.raises(ConfigError, match="reads no critic's values, and there is a critic"):
        one_step("plain", "critic={}")


def test_the_bound_on_values_bites(tmp_path: Path) -> None:
    tight = [*OFF_POLICY, "critic.ppo_epochs=4", "critic.optim.lr=1e-2", "trainer.total_training_steps=1"]
    bounded = train(tmp_path / "bounded", *tight, "critic.value_clip=1e-4")
    free = train(tmp_path / "free", *tight, "critic.value_clip=null")
    assert all(m["critic/num_steps"] == 8 for m in bounded.history)
    assert bounded.history[0]["critic/vf_clipfrac"] > 0.01
    assert all(m["critic/vf_clipfrac"] == 0 for m in free.history)
    assert not same(weights(tmp_path / "bounded", "critic"), weights(tmp_path / "free", "critic"))


# ---- one process and many -----------------------------------------------------------------------------------------
STEPS = 2
PPO = [
    *(o for o in TINY if o.startswith(("data.", "reward.", "algorithm."))),
    f"trainer.total_training_steps={STEPS}",
    "data.train_batch_size=8",
    "rollout.n=2",
    "algorithm.lam=0.95",
    "critic.ppo_mini_batch_size=4",
    "critic.optim.lr=1e-4",
    "actor.max_tokens_per_device=50",
]
MANY_STEPS = ["actor.ppo_mini_batch_size=4", "critic.ppo_epochs=2", "trainer.total_training_steps=1"]
"""Two steps of the actor and four of the critic a batch. Each one multiplies what rounding left of the one before, so what the
first batch makes is compared."""
SPLITS = {
    "dp2": ["runtime.nproc=2"],
    "actor dp2, critic usp2": ["runtime.nproc=2", "critic.parallel.usp=2"],
    "actor usp2, critic dp2": ["runtime.nproc=2", "actor.parallel.usp=2", "critic.parallel={usp: 1}"],
    "usp2": ["runtime.nproc=2", "actor.parallel.usp=2"],
    "actor dp2, critic a process of its own": [
        "runtime.nproc=2",
        "runtime.pools={judge: {nproc: 1}}",
        "critic.pool=judge",
    ],
}
AXES = {"dp2": {"dp_shard": 2}, "usp2": {"usp": 2}, "a process of its own": {}}
DIFFER_BY_DESIGN = ("actor/num_micro_batches", "critic/num_micro_batches")
TOLERANCE = 1e-5
Recorded = tuple[RunResult, Recording, Path]


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("ppo")
    # After some steps of SFT samples differ in their reward.
    train(folder / "warm", "trainer.total_training_steps=1", ppo=False)
    model = folder / "warm" / "warm_start" / "export"
    result, recording = record(folder / "inline", model, *PPO)
    assert all(m["critic/num_steps"] == 2 and m["critic/grad_norm"] > 0 for m in result.history)
    assert all(math.isfinite(m["critic/vf_explained_var"]) for m in result.history), "rewards differ"
    assert all(m["critic/num_micro_batches"] > 1 and m["actor/grad_norm"] > 0 for m in result.history)
    return result, recording, model


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[int]]:
    with kept_ranks() as pids:
        yield pids


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_ranks_compute_what_one_process_does(inline: Recorded, ranks: list[int], tmp_path: Path, name: str) -> None:
    one, recording, model = inline
    many = replay(tmp_path / "run", model, recording, *PPO, *SPLITS[name])
    engines = json.loads((many.path / "manifest.json").read_text())["engines"]
    assert engines["critic"]["model_type"] == "value_model"
    said = (
        dict(part.split(" ", 1) for part in name.split(", "))
        if "," in name
        else dict.fromkeys(("actor", "critic"), name)
    )
    assert {role: engines[role]["axes"] for role in said} == {role: AXES[words] for role, words in said.items()}
    assert engines["critic"]["pool"] == ("judge" if "own" in name else engines["actor"]["pool"])
    assert len(ranks) == 2
    assert {"critic/vf_loss", "critic/vf_explained_var", "critic/values/mean"} <= many.history[0].keys()
    found = largest_difference(one, many, steps=STEPS)
    assert found < (TOLERANCE, "")
    axes = engines["critic"]["axes"]
    if engines["actor"]["axes"] != axes:
        return  # a record is of one topology
    record_evidence(
        "-".join(f"{k}{v}" for k, v in axes.items()) + "-cpu-ppo-value_model",
        backend="fsdp2",
        level=EvidenceLevel.END_TO_END,
        axes=axes,
        world_size=2,
        device="cpu",
        model_family="llama",
        model_type="value_model",
        what="PPO on recorded rollouts: two batches report what one process reports, actor and critic on these ranks",
        deltas={"metrics_relative": found[0]},
    )


def test_a_critic_of_another_backend_says_the_same(inline: Recorded, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    one, recording, model = inline
    many = replay(tmp_path / "run", model, recording, *PPO, "critic.backend=megatron")
    engines = json.loads((many.path / "manifest.json").read_text())["engines"]
    assert [engines[role]["backend"] for role in ("actor", "critic")] == ["fsdp2", "megatron"]
    found = largest_difference(one, many, steps=STEPS)
    assert found < (TOLERANCE, "")
    here, there = weights(one.path, "critic"), weights(many.path, "critic")
    assert here.keys() == there.keys()
    assert max(float((here[name] - there[name]).abs().max()) for name in here) < TOLERANCE


@pytest.mark.slow
def test_many_steps_a_batch_are_the_same_ones(inline: Recorded, ranks: list[int], tmp_path: Path) -> None:
    model = inline[2]
    one, recording = record(tmp_path / "one", model, *PPO, *MANY_STEPS)
    many = replay(tmp_path / "many", model, recording, *PPO, *MANY_STEPS, *SPLITS["actor dp2, critic usp2"])
    [x], [y] = one.history, many.history
    assert (x["actor/num_steps"], x["critic/num_steps"]) == (2, 4)
    names = [n for n in x if n.startswith(("actor/", "critic/")) and not n.startswith(DIFFER_BY_DESIGN)]
    assert {"actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "critic/vf_explained_var"} <= set(names)
    gaps = {n: abs(x[n] - y[n]) / max(1.0, abs(x[n])) for n in names}
    assert max(gaps.values()) < TOLERANCE, gaps
