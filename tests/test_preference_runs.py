"""DPO and reward models end to end: they learn, a pause changes nothing, and every split computes what one process does."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import kept_ranks
from safetensors.torch import load_file

from rlctl.algorithms.preference.base import PairLosses
from rlctl.config import axes, engines
from rlctl.config.load import load_config
from rlctl.config.problems import InvalidConfigError
from rlctl.config.schema_reward import RewardConfig
from rlctl.data.rewards import build_reward
from rlctl.data.rewards.base import RewardInput
from rlctl.data.rows import load_rows
from rlctl.errors import ConfigError, GuardError
from rlctl.plugins import load_plugins
from rlctl.records import ModelType
from rlctl.tracking.headline import headline_text
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers import preference
from rlctl.trainers.build import prepare
from rlctl.trainers.run import Runner, RunResult
from rlctl.trainers.setup import make_context

ROOT = Path(__file__).parents[1]
TINY = [
    "model.path=null",
    f"model.tokenizer={ROOT / 'cli/src/rlctl_cli/recipes/quickstart/model'}",
    "model.init=pretrained",
    "model.config={model_type: llama, vocab_size: 47, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true, "
    "bos_token_id: null, eos_token_id: 1, pad_token_id: 0, initializer_range: 0.3}",
    "data.train_batch_size=6",
    "data.val_batch_size=5",
    "data.task.val_size=8",
    "data.task.train_size=14",
    "trainer.num_threads=1",
    "trainer.total_training_steps=3",
    "trainer.test_freq=0",
    "trainer.logger=[jsonl]",
    "actor.optim.lr=3e-3",
    "actor.max_tokens_per_device=90",
]
LOSSES = {
    "sigmoid": ("dpo", ["dpo.label_smoothing=0.1"]),
    "ipo": ("dpo", ["dpo.loss_type=ipo", "dpo.beta=0.5", "dpo.nll_coef=0.2"]),
    "hinge": ("dpo", ["dpo.loss_type=hinge", "dpo.beta=0.3"]),
    "simpo": ("dpo", ["dpo.loss_type=simpo", "dpo.beta=2.0"]),
    "rm": ("rm", ["rm.center_rewards_coefficient=0.01"]),
}


def train(run: Path, kind: str, *overrides: str, resume: bool = False) -> RunResult:
    plugins = load_plugins()
    recipe, own = LOSSES[kind]
    resolved = load_config(recipe, [*TINY, *own, *overrides], plugins=plugins)
    where = {"resume": run} if resume else {"run_dir": run}
    return Runner(resolved, plugins, NullReporter(), **where).execute()


def numbers(run: Path) -> list[dict[str, float]]:
    """Every metric that is no time or memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = ("timing_s/", "perf/", "training/unix_time")
    return [{k: v for k, v in line.items() if not k.startswith(clock)} for line in lines]


def weights(run: Path, name: str = "export") -> dict[str, torch.Tensor]:
    return load_file(run / name / "model.safetensors")


def difference(a: RunResult, b: RunResult) -> float:
    """Largest relative difference of loss, gradient norm and metrics of any step, and of the weights at the end."""
    worst = 0.0
    for x, y in zip(a.history, b.history, strict=True):
        names = {n for n in x if not n.startswith(("timing_s/", "perf/", "global_seqlen/", "train/rescored"))}
        assert {"train/loss", "train/grad_norm", "rewards/margins", "rewards/accuracies"} <= names
        worst = max(worst, *(abs(x[n] - y[n]) / max(1.0, abs(x[n])) for n in names))
    one, other = weights(a.path), weights(b.path)
    assert one.keys() == other.keys()
    return max(worst, *((one[n] - other[n]).abs().max().item() / max(1.0, one[n].abs().max().item()) for n in one))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    folder = tmp_path_factory.mktemp("pairs")
    # Plain gradient descent: AdamW turns what rounding left of a gradient of 1e-9 into a whole step.
    runs = {kind: train(folder / kind, kind, "actor.optim.name=sgd", "actor.optim.lr=1e-2") for kind in LOSSES}
    assert all(m["train/grad_norm"] > 0 for run in runs.values() for m in run.history)
    return runs


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[int]]:
    with kept_ranks() as pids:
        yield pids


@pytest.mark.parametrize(
    ("kind", "rows"), [("sigmoid", 1), ("sigmoid", 3), ("ipo", 3), ("hinge", 1), ("simpo", 3), ("rm", 1)]
)
def test_micro_batches_change_nothing(one_process: dict[str, RunResult], tmp_path: Path, kind: str, rows: int) -> None:
    """One row a micro-batch, so that no pair lies in one; or three, so that every second pair is cut."""
    sgd = ["actor.optim.name=sgd", "actor.optim.lr=1e-2", f"actor.micro_batch_size_per_device={rows}"]
    other = train(tmp_path / "run", kind, *sgd, "actor.max_tokens_per_device=null")
    assert difference(one_process[kind], other) < 1e-5


SPLITS = {
    "dp2": ["runtime.nproc=2"],
    "usp2": ["runtime.nproc=2", "actor.parallel.usp=2"],
    "megatron tp2": ["runtime.nproc=2", "actor.backend=megatron", "actor.parallel.tp=2"],
    "megatron pp2": ["runtime.nproc=2", "actor.backend=megatron", "actor.parallel.pp=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "rm"])
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_compute_what_one_process_does(
    one_process: dict[str, RunResult], ranks: list[int], tmp_path: Path, kind: str, split: str
) -> None:
    if split.startswith("megatron"):
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    other = train(tmp_path / "run", kind, "actor.optim.name=sgd", "actor.optim.lr=1e-2", *SPLITS[split])
    engines = json.loads((other.path / "manifest.json").read_text())["engines"]
    assert engines["actor"]["model_type"] == ("value_model" if kind == "rm" else "language_model")
    assert ("ref" in engines) == (kind == "sigmoid")
    assert len(ranks) == 2
    assert difference(one_process[kind], other) < 1e-5


@pytest.mark.parametrize("kind", ["sigmoid", "rm"])
def test_a_pause_changes_no_number_and_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    class PulledPlugError(Exception):
        pass

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = ["trainer.save_freq=2", "trainer.test_freq=1", "actor.optim.lr_scheduler_type=cosine"]
    run = train(whole, kind, *settings)
    honest = Runner._step

    def unplugged(self: Runner, trainer: Any, number: int) -> dict[str, float]:
        if number == 3:
            raise PulledPlugError
        return honest(self, trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_step", unplugged)
        with pytest.raises(PulledPlugError):
            train(broken, kind, *settings)
    train(broken, kind, *settings, resume=True)
    assert numbers(broken) == numbers(whole)
    saved, again = weights(whole), weights(broken)
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    # The best weights are those of the highest accuracy on held-out pairs.
    scores = {step: m["val/rewards/accuracies"] for step, m in run.validation if step}
    assert run.best_step == max(scores, key=lambda step: (scores[step], -step))
    written = {key for line in numbers(whole) for key in line} | run.last.keys()
    known = set(re.findall(r"`([a-z_]+/[\w/<>]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert not {n for n in written - known if not n.startswith("val/") and "/" in n}
    assert "accuracy" in headline_text(run.last)
    assert all(m["train/rescored_diff_max"] < 1e-5 for m in run.history)


@pytest.mark.parametrize(("recipe", "least"), [("dpo", 0.9), ("rm", 0.9)])
def test_the_recipe_learns(tmp_path: Path, recipe: str, least: float) -> None:
    plugins = load_plugins()
    short = [
        "trainer.total_training_steps=16",
        "data.task.train_size=600",
        "trainer.test_freq=0",
        "data.task.val_size=64",
        "trainer.logger=[jsonl]",
    ]
    resolved = load_config(recipe, short, plugins=plugins)
    run = Runner(resolved, plugins, NullReporter(), run_dir=tmp_path / "run").execute()
    (_, before), (_, after) = run.validation
    assert 0.25 <= before["val/rewards/accuracies"] <= 0.75
    assert after["val/rewards/accuracies"] > least
    assert after["val/loss"] < before["val/loss"]
    assert after["val/rewards/margins"] > before["val/rewards/margins"]
    if recipe == "dpo":
        assert before["val/loss"] == pytest.approx(0.6931, abs=1e-3), "the model is its own reference"


def test_adapters_learn_from_pairs_beside_their_own_base(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'rlctl-plugin-fsdp[lora]'")
    adapted = ["model.lora={rank: 4}", "trainer.total_training_steps=2", "actor.optim.lr=3e-2"]
    run = train(tmp_path / "run", "hinge", *adapted)
    engines = json.loads((run.path / "manifest.json").read_text())["engines"]
    assert set(engines) == {"actor"}, "the reference is the actor without its adapters"
    (_, before), (_, after) = run.validation
    assert before["val/rewards/margins"] == 0.0
    assert after["val/rewards/chosen"] != 0.0
    assert all(m["train/grad_norm"] > 0 for m in run.history)
    scored = train(tmp_path / "rm", "rm", *adapted)
    assert scored.validation[0][1]["val/loss"] != scored.validation[1][1]["val/loss"]


def test_a_reward_model_is_a_sequence_classifier(tmp_path: Path) -> None:
    """transformers reads the export and says of each row what the engine said in training."""
    run = train(tmp_path / "run", "rm", "trainer.val_before_train=false")
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(run.path / "export", num_labels=1)
    same: Any = AutoModelForTokenClassification.from_pretrained(run.path / "export")
    assert torch.equal(model.score.weight, same.score.weight)
    plugins = load_plugins()
    resolved = load_config("rm", [*TINY, *LOSSES["rm"][1]], plugins=plugins)
    rows = load_rows(resolved.config.data, "val", pairs=True)
    prepared = prepare(make_context(resolved, plugins, NullReporter()))
    right, losses, pairs = [], [], []
    for row in rows:
        scores = []
        for text in (row.pair.chosen, row.pair.rejected) if row.pair else ():
            ids, _ = prepared.encoder.sft(type(row)(0, row.source, row.prompt, None, text, ""))
            with torch.no_grad():
                scores.append(model(torch.tensor([ids])).logits.item())
        right.append(scores[0] > scores[1])
        pairs.append(scores)
        gap = torch.tensor(scores[0] - scores[1])
        losses.append((-torch.nn.functional.logsigmoid(gap)).item() + 0.01 * sum(scores) ** 2)
    said = run.validation[-1][1]
    assert said["val/rewards/accuracies"] == pytest.approx(sum(right) / len(right))
    assert said["val/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    # And as a reward it says the same, of a batch and of one, whatever is padded.
    judge = RewardConfig.model_validate(
        {"components": [{"name": "model", "args": {"path": "export", "batch_size": 3}}]}
    )
    with build_reward(judge, plugins, run.path) as scorer:
        texts = [row.pair.chosen if row.pair else "" for row in rows]
        found = scorer.score(rows, [*texts[:-1], "1"], ["stop"] * len(rows), [4] * len(rows))
        alone = [scorer.score_one(RewardInput(row, text, "stop", 4)) for row, text in zip(rows, texts, strict=True)]
    own = [of_chosen for of_chosen, _ in pairs]
    assert [r.score for r in alone] == pytest.approx(own, abs=1e-5)
    assert [r.score for r in found[:-1]] == pytest.approx(own[:-1], abs=1e-5)
    assert abs(found[-1].score - own[-1]) > 1e-4
    component = f"reward.components=[{{name: model, args: {{path: {run.path / 'export'}}}}}]"
    rl = [*(o for o in TINY if not o.startswith("actor.optim")), "rollout.n=2", "warm_start=null", component]
    resolved = load_config("quickstart", [*rl, "trainer.total_training_steps=1"], plugins=plugins)
    rollouts = Runner(resolved, plugins, NullReporter(), run_dir=tmp_path / "rl").execute()
    assert rollouts.first["critic/score/max"] > rollouts.first["critic/score/min"]


def test_a_directory_without_a_reward_model_is_no_reward(tmp_path: Path) -> None:
    policy = ROOT / "cli/src/rlctl_cli/recipes/quickstart/model"
    for path, what in ((policy, "is no reward model"), (tmp_path, "cannot be read")):
        config = RewardConfig.model_validate({"components": [{"name": "model", "args": {"path": str(path)}}]})
        with pytest.raises(ConfigError, match=what):
            build_reward(config, None, tmp_path)


def test_margins_of_the_rows_reach_the_loss(tmp_path: Path) -> None:
    rows = [{"prompt": f"s:{i}21=", "chosen": f"12{i}", "rejected": f"2{i}1", "margin": i % 3} for i in range(3, 9)]
    for name, margins in (("with", True), ("without", False)):
        text = [{k: v for k, v in row.items() if margins or k != "margin"} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    loss = {}
    for name in ("with", "without"):
        files = ["data.task=null", f"data.train_files=[{tmp_path / name}.jsonl]", "trainer.total_training_steps=1"]
        own = [o for o in TINY if not o.startswith("data.task")]
        plugins = load_plugins()
        resolved = load_config("rm", [*own, *files], plugins=plugins)
        run = Runner(resolved, plugins, NullReporter(), run_dir=tmp_path / f"run-{name}").execute()
        loss[name] = run.first["train/loss"]
    assert loss["with"] > loss["without"] + 0.1


@pytest.mark.parametrize("kind", ["hinge", "rm"])
def test_a_run_without_a_finite_step_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two steps are within the budget. Of hinge the gradient is too large for float32, of rm the loss alone is infinite."""
    honest = preference.reward_losses

    def endless(scores: torch.Tensor, config: Any, margin: Any) -> PairLosses:
        found = honest(scores, config, margin)
        return dataclasses.replace(found, loss=found.loss + torch.inf)

    monkeypatch.setattr(preference, "reward_losses", endless)
    beta = ["dpo.beta=1e300"] if kind == "hinge" else []
    with pytest.raises(GuardError, match="every one of 2 optimizer steps had a loss or a gradient that is not finite"):
        train(tmp_path / "run", kind, *beta, "trainer.total_training_steps=2", "trainer.val_before_train=false")
    run = tmp_path / "run"
    assert json.loads((run / "manifest.json").read_text())["status"] == "failed"
    assert not (run / "export").exists()
    assert [p.name for p in run.glob("nonfinite_step_*")] == ["nonfinite_step_2.safetensors"]
    [line] = numbers(run)
    assert line["train/skipped_steps"] == 1.0, "nothing was learned of it"


@pytest.mark.parametrize(
    ("kind", "override", "what"),
    [
        ("ipo", "dpo.beta=1e-30", "dpo.beta"),
        ("simpo", "dpo.average_log_probs=true", "dpo.average_log_probs does nothing with dpo.loss_type simpo"),
        ("simpo", "dpo.reference_free=true", "dpo.reference_free does nothing with dpo.loss_type simpo"),
        ("sigmoid", "rm.center_rewards_coefficient=0.1", "rm has nothing to do with trainer.type dpo"),
        ("rm", "dpo.beta=0.3", "dpo has nothing to do with trainer.type rm"),
        ("hinge", "dpo.label_smoothing=0.1", "dpo.label_smoothing is for sigmoid and simpo"),
        ("hinge", "dpo.simpo_gamma=0.1", "dpo.simpo_gamma is for simpo"),
        ("sigmoid", "actor.entropy_coeff=0.1", "actor.entropy_coeff has nothing to do in DPO"),
        ("rm", "actor.use_kl_loss=true", "actor.use_kl_loss has nothing to do in the training of a reward model"),
        ("sigmoid", "rollout.n=8", "rollout.n has nothing to do in DPO: take it out, or set trainer.type to rl"),
        (
            "rm",
            "rollout.val_kwargs.temperature=0.5",
            "rollout.val_kwargs.temperature has nothing to do in the training of a",
        ),
        ("rm", "actor.ppo_epochs=3", "actor.ppo_epochs has nothing to do in the training of a reward model"),
        ("hinge", "actor.loss_agg_mode=seq-mean-token-mean", "actor.loss_agg_mode has nothing to do in DPO"),
        ("ipo", "actor.policy_loss.clip_ratio_low=0.1", "actor.policy_loss.clip_ratio_low has nothing to do in DPO"),
        ("sigmoid", "algorithm.adv_estimator=rloo", "algorithm.adv_estimator has nothing to do in DPO"),
        (
            "sigmoid",
            "reward.components=[{name: length, args: {limit: 3}}]",
            "reward.components has nothing to do in DPO",
        ),
        ("sigmoid", "guards.weight_fingerprint=false", "guards.weight_fingerprint has nothing to do in DPO"),
        ("simpo", "ref.max_tokens_per_device=300", "ref.max_tokens_per_device has nothing to do in a loss without a"),
        (
            "rm",
            "ref.max_tokens_per_device=300",
            "ref.max_tokens_per_device has nothing to do in the training of a reward",
        ),
        ("sigmoid", "critic={}", "critic has nothing to do in trainer.type dpo"),
    ],
)
def test_what_has_no_meaning_is_refused(kind: str, override: str, what: str) -> None:
    recipe, own = LOSSES[kind]
    with pytest.raises(InvalidConfigError) as caught:
        load_config(recipe, [*TINY, *own, override], plugins=load_plugins())
    assert what in str(caught.value)


def test_what_a_file_says_of_other_trainers_is_no_fault(tmp_path: Path) -> None:
    """One file serves several trainers, and a run's own configuration has every key; null takes something out."""
    plugins = load_plugins()
    for kind in ("dpo", "rm"):
        resolved = load_config("quickstart", ["warm_start=null"], {"algorithm": kind}, plugins)
        assert resolved.config.reward.components
        assert load_config("quickstart", [], {"algorithm": kind}, plugins).config.rollout.n == 16
        written = tmp_path / f"{kind}.yaml"
        written.write_text(load_config("quickstart", [], {"algorithm": kind}, plugins).to_yaml())
        assert load_config(str(written), plugins=plugins).config.rollout.n == 16
    load_config("dpo", [*TINY, "ref.max_tokens_per_device=300"], plugins=plugins)
    load_config("quickstart", ["rollout.n=8"], plugins=plugins)
    with pytest.raises(InvalidConfigError, match=r"reward\.components has nothing to do in DPO"):
        load_config("quickstart", ["reward.components[0].weight=2.0"], {"algorithm": "dpo"}, plugins)
    with pytest.raises(InvalidConfigError, match=r"rollout\.backend has nothing to do in DPO"):
        load_config("dpo", [], {"rollout": "vllm"}, plugins)


def test_a_backend_without_a_value_model_cannot_train_a_reward_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = load_plugins()
    real = engines.find_of_role

    def without(*args: Any) -> Any:
        record = real(*args)
        if record is None:
            return None
        spec = dataclasses.replace(record.spec, model_types=(ModelType.LANGUAGE_MODEL,))
        return dataclasses.replace(record, spec=spec)

    monkeypatch.setattr(engines, "find_of_role", without)
    assert axes.head_of is engines.head_of
    with pytest.raises(ConfigError) as caught:
        load_config("rm", TINY, plugins=plugins)
    assert "fsdp2 has no value_model, which a reward model is" in str(caught.value)
    load_config("dpo", TINY, plugins=plugins)


def test_the_reference_takes_part_only_where_a_loss_reads_it() -> None:
    plugins = load_plugins()

    def roles(recipe: str, *overrides: str) -> set[str]:
        return set(load_config(recipe, [*TINY, *overrides], plugins=plugins).config.roles_used())

    assert roles("dpo") == {"actor", "ref"}
    assert roles("dpo", "dpo.loss_type=simpo") == {"actor"}
    assert roles("dpo", "dpo.reference_free=true") == {"actor"}
    assert roles("rm") == {"actor"}
