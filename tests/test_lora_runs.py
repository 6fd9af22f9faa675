"""Whole runs that train adapters: SFT and GRPO, the reference by the switch, what is exported, and a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainers_exact import numbers, train, weights
from transformers import AutoModelForCausalLM

from rlctl.config.load import load_config
from rlctl.config.schema_lora import LoraConfig, reference_is_base
from rlctl.errors import RlctlError
from rlctl.plugins import load_plugins
from rlctl.rundir import RunDirectory
from rlctl.runs import describe
from rlctl.trainers import build
from rlctl.trainers.run import Runner
from rlctl_cli.commands.runs import summary_lines
from rlctl_cli.summary import summary

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'rlctl-plugin-fsdp[lora]'")

LORA = [
    "model.lora={rank: 4, target_modules: [q_proj, v_proj, down_proj]}",
    "warm_start.lora=false",
    "actor.optim.lr=5e-3",
]
KL = ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO with a KL to the reference, four steps."""
    path = tmp_path_factory.mktemp("lora") / "run"
    train(path, *LORA, *KL)
    return path


def manifest(run: Path) -> dict[str, Any]:
    return json.loads((run / "manifest.json").read_text())


def test_no_second_model_is_built_and_its_numbers_are_those_of_one(run, tmp_path, monkeypatch):
    assert set(manifest(run)["engines"]) == {"actor", "rollout"}
    monkeypatch.setattr(build, "reference_is_base", lambda config: False)
    train(tmp_path / "two", *LORA, *KL)
    assert set(manifest(tmp_path / "two")["engines"]) == {"actor", "rollout", "ref"}
    assert numbers(tmp_path / "two") == numbers(run)
    kl = [line["actor/kl_loss"] for line in numbers(run)[1:]]
    assert kl[0] == 0 < min(kl[1:])


def test_the_rollout_samples_from_the_adapted_model(run, tmp_path):
    """Shared or as a merged copy: trainer and rollout say the same of each token, after steps that moved the model."""
    train(tmp_path / "copied", *LORA, *KL, "rollout.share_weights=false")
    for path, allowed in ((run, 1e-6), (tmp_path / "copied", 1e-5)):
        assert all(line["training/rollout_probs_diff_max"] < allowed for line in numbers(path)[1:])
    first = [line["critic/score/mean"] for line in numbers(run)[1:]]
    assert first == [line["critic/score/mean"] for line in numbers(tmp_path / "copied")[1:]]


def test_a_run_whose_copies_leave_the_adapters_out_is_stopped(tmp_path, monkeypatch):
    from rlctl_fsdp.lora import merge

    monkeypatch.setattr(merge, "delta", lambda layer: torch.zeros(()))
    with pytest.raises(RlctlError, match="rollout"):
        train(
            tmp_path / "run",
            *LORA,
            "rollout.share_weights=false",
            "actor.optim.lr=5e-2",
            "actor.skip_zero_advantage=false",
        )


def test_both_exports_are_the_model_that_was_trained(run):
    base = AutoModelForCausalLM.from_pretrained(run / "warm_start" / "export")
    merged = AutoModelForCausalLM.from_pretrained(run / "export")
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        before, wanted = base(ids).logits, merged(ids).logits
        adapted: Any = peft.PeftModel.from_pretrained(base, str(run / "export_adapter"))
        found = adapted(ids).logits
    assert float((found - wanted).abs().max()) < 2e-5  # of logits up to 20
    assert float((before - wanted).abs().max()) > 1e-2
    config = json.loads((run / "export_adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run / "warm_start" / "export")
    assert (run / "best_adapter" / "adapter_model.safetensors").is_file()
    # Nothing but the targets was trained.
    start, end = (
        AutoModelForCausalLM.from_pretrained(run / name).state_dict() for name in ("warm_start/export", "export")
    )
    changed = {name.split(".")[-2] for name in end if not torch.equal(start[name], end[name])}
    assert changed == {"q_proj", "v_proj", "down_proj"}


def test_a_pause_changes_no_number(run, tmp_path, monkeypatch):
    class PulledPlugError(Exception):
        pass

    honest = Runner._step

    def unplugged(self: Runner, trainer: Any, step: int) -> Any:
        if step == 4:
            raise PulledPlugError
        return honest(self, trainer, step)

    monkeypatch.setattr(Runner, "_step", unplugged)
    with pytest.raises(PulledPlugError):
        train(tmp_path / "run", *LORA, *KL)
    monkeypatch.setattr(Runner, "_step", honest)
    train(tmp_path / "run", *LORA, *KL, resume=True)  # from step 2: step 3 is done again
    assert numbers(tmp_path / "run") == numbers(run)
    a, b = weights(run), weights(tmp_path / "run")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_sft_trains_adapters(tmp_path):
    steps = ["trainer.type=sft", "warm_start=null", "trainer.total_training_steps=6", "trainer.save_freq=0"]
    result = train(tmp_path / "run", *LORA[:1], "actor.optim.lr=2e-2", *steps)
    assert result.history[-1]["train/loss"] < result.history[0]["train/loss"] - 0.1
    assert (tmp_path / "run" / "export_adapter" / "adapter_config.json").is_file()
    assert summary(result)["export_adapter"] == str(tmp_path / "run" / "export_adapter")
    shown = describe(RunDirectory.open(tmp_path / "run"))
    assert shown["files"]["export_adapter"] == str(tmp_path / "run" / "export_adapter")
    lines = dict(summary_lines(shown))
    assert lines["adapters"] == "LoRA of rank 4, alpha 32.0, on q_proj, v_proj, down_proj"
    assert "export_adapter" in lines["files"]


def test_the_pages_configuration_is_one(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "lora.md").read_text()
    (tmp_path / "my-model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    config = load_config(str(tmp_path / "run.yaml"), plugins=load_plugins()).config
    assert config.model.lora == LoraConfig(), "the page writes the defaults down"
    assert reference_is_base(config)
    table = page.partition("| key | default")[2].partition("\n\n")[0]
    code = page.partition("```python\n")[2].partition("```")[0]
    assert '.from_pretrained("runs/lora/warm_start/export")' in code
    assert 'PeftModel.from_pretrained(base, "runs/lora/export_adapter")' in code
    typed = re.search(r"'(model\.lora\.target_modules=\S+)'", page)
    assert typed
    adapters = load_config("quickstart", [typed[1], "warm_start.lora=false"]).config.model.lora
    assert adapters is not None
    assert adapters.target_modules == r".*\.(q|v)_proj"
    assert set(re.findall(r"`(\w+)`", table)) >= set(LoraConfig.model_fields) - {"use_rslora"}


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        ("q_proj", ["q_proj"]),
        ("self_attn.q_proj", ["self_attn.q_proj"]),
        ("[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("all-linear", "all-linear"),
        (r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        ("'[qv]_proj'", "[qv]_proj"),
    ],
)
def test_targets_on_the_command_line_are_names_or_a_regular_expression(typed: str, taken: object) -> None:
    config = load_config("quickstart", [f"model.lora.target_modules={typed}", "warm_start.lora=false"]).config
    assert config.model.lora is not None
    assert config.model.lora.target_modules == taken


def test_targets_that_do_not_fit_stop_the_run_in_words(tmp_path):
    with pytest.raises(RlctlError, match="does not fit") as caught:
        train(tmp_path / "run", "model.lora.target_modules=[w_proj]", "warm_start=null")
    assert "q_proj" in str(caught.value)
