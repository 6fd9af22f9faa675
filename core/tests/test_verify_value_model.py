"""`rlctl verify` on value models: a right engine passes with both heads, wrong ones do not, and each fault is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from rlctl.algorithms.value_loss import ValueLoss
from rlctl.device import Device
from rlctl.errors import CapabilityError, ConfigError
from rlctl.plugins import load_plugins
from rlctl.records import ModelType
from rlctl.verify import cases
from rlctl.verify.models import head_of, without_dropout
from rlctl.verify.reference import VALUE_MODEL, Reference
from rlctl.verify.report import Case, Report, summary_line
from rlctl.verify.request import make_request
from rlctl.verify.run import Verifier
from rlctl.verify.tiny import VALUE_FAMILIES, TinyModel, write_tiny

BOTH = "(ModelType.LANGUAGE_MODEL, ModelType.VALUE_MODEL)"
VALUE = ModelType.VALUE_MODEL
ALWAYS = {"export_names", "export", "values", "loss", "grad_norm", "gradients", "weights", "checkpoint"}
ADAMW = {"loss_adamw", "grad_norm_adamw", "weights_adamw"}


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(TinyModel("qwen2", model_type=VALUE), tmp_path_factory.mktemp("critic"))


def verify(site, engine: str, *models: str, heads: str = BOTH, **more) -> Report:
    """One process of an engine of verify_toys."""
    site.add_backend("mine", engine=repr(f"verify_toys:{engine}"), model_types=heads)
    plugins = load_plugins()
    with Verifier(plugins) as verifier:
        return verifier.run(make_request(plugins, "mine", Device("cpu"), models=models, record=False, **more))


def value_case(report: Report) -> Case:
    [case] = [c for c in report.cases if c.model_type == "value_model"]
    return case


def test_verify_runs_every_head_that_a_backend_declares(here) -> None:
    report = verify(here, "Plain", "tiny:qwen2")
    assert report.passed, json.dumps(report.to_json(), indent=1)
    assert [c.model_type for c in report.cases] == ["language_model", "value_model"]
    case = value_case(report)
    assert set(case.deltas) == ALWAYS | ADAMW
    # One micro-batch would prove nothing about accumulation.
    assert set(case.micro_batches) == {"value-sgd", "value-adamw"}
    assert min(case.micro_batches.values()) > 1
    assert case.skipped == {}
    assert report.to_json()["cases"][1]["model_type"] == "value_model"


def test_verify_value_heads_sit_on_mixtures_of_experts_too(here, tmp_path: Path) -> None:
    experts = write_tiny(TinyModel("qwen3_moe", num_experts=4, model_type=VALUE), tmp_path)
    [case] = verify(here, "Plain", str(experts)).cases
    # transformers' fused experts go by names of their own, which this engine does not undo.
    assert set(case.failures) <= {"export_names", "gradients", "weights", "weights_adamw"}
    assert case.error is None
    assert case.deltas["values"].value < 1e-5
    assert case.skipped == {"experts": "compared where the model has the head of a language model"}


@pytest.mark.parametrize(
    ("engine", "must", "must_not"),
    [
        ("Shifted", {"values", "loss", "gradients", "grad_norm", "weights"}, {"export", "export_names", "checkpoint"}),
        ("HeadForgotten", {"gradients", "weights", "grad_norm"}, {"export", "export_names", "checkpoint"}),
        ("HeadMisnamed", {"export_names", "gradients", "weights"}, {"values", "loss", "grad_norm"}),
    ],
)
def test_verify_names_what_a_wrong_value_model_breaks(
    here, critic: Path, engine: str, must: set[str], must_not: set[str]
) -> None:
    report = verify(here, engine, str(critic))
    [case] = report.cases
    assert must <= set(case.failures), case.failures
    assert not must_not & set(case.failures), case.failures
    assert case.error is None
    assert f"one process ({critic} value_model) failed: " in summary_line(report.cases)


def test_verify_notices_a_value_loss_without_its_bound(here, critic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "ValueLoss", lambda clip_range: ValueLoss(None))
    [case] = verify(here, "Plain", str(critic)).cases
    assert {"loss", "gradients", "grad_norm"} <= set(case.failures)
    assert not {"export", "export_names", "checkpoint"} & set(case.failures)


def test_verify_families_without_a_value_head_are_left_out(here) -> None:
    here.add_backend("mine", model_types=BOTH)
    plugins = load_plugins()
    with Verifier(plugins) as verifier:
        jobs, left_out = verifier._jobs(make_request(plugins, "mine", Device("cpu"), models=["tiny:gpt2"]))
    assert [j.model_type for j in jobs] == ["language_model"]
    [entry] = left_out
    assert (entry.model, entry.model_type) == ("tiny:gpt2", "value_model")
    assert "no token classifier" in entry.reason


def test_verify_tiny_value_models_have_one_head_without_bias(critic: Path) -> None:
    names = load_file(critic / "model.safetensors")
    assert {n for n in names if not n.startswith("model.")} == {"score.weight"}
    assert names["score.weight"].shape == (1, 32)
    assert head_of(critic) is VALUE
    assert set(VALUE_FAMILIES) >= {"llama", "qwen2", "qwen3", "qwen3_moe"}


def test_verify_reads_the_head_off_a_directory(critic: Path, tmp_path: Path, here) -> None:
    language = write_tiny(TinyModel("qwen2"), tmp_path)
    assert head_of(language) is ModelType.LANGUAGE_MODEL
    report = verify(here, "Plain", str(critic))
    assert report.passed
    assert [c.model_type for c in report.cases] == ["value_model"]
    request = make_request(load_plugins(), "mine", Device("cpu"), models=[str(language)])
    assert [c.model_type for c in request.choices] == ["language_model"]


def test_verify_refuses_a_value_model_that_a_backend_cannot_hold(critic: Path, here) -> None:
    with pytest.raises(CapabilityError, match="'mine' has no value_model"):
        verify(here, "Plain", str(critic), heads="(ModelType.LANGUAGE_MODEL,)")
    with pytest.raises(CapabilityError, match="none of these models") as caught:
        make_request(load_plugins(), "mine", Device("cpu"), models=[str(critic)], every=True, nproc=2)
    assert caught.value.details == (f"{critic}: mine has no value_model",)


def copied(directory: Path, into: Path, **changes: object) -> Path:
    into.mkdir()
    config = json.loads((directory / "config.json").read_text())
    config = {k: v for k, v in {**config, **changes}.items() if v is not None}
    (into / "config.json").write_text(json.dumps(config))
    (into / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    return into


def test_verify_switches_the_dropout_of_a_classifier_off(critic: Path, tmp_path: Path) -> None:
    assert without_dropout(critic, tmp_path) == (critic, "")
    # transformers drops a tenth where the config says nothing.
    silent = copied(critic, tmp_path / "silent", classifier_dropout=None)
    found, changed = without_dropout(silent, tmp_path / "copies")
    assert changed == "classifier_dropout"
    assert json.loads((found / "config.json").read_text())["classifier_dropout"] == 0.0


def test_verify_refuses_classifiers_of_several_labels(critic: Path, tmp_path: Path) -> None:
    labels = {"0": "good", "1": "bad", "2": "ugly"}
    with pytest.raises(ConfigError, match="no value model") as caught:
        head_of(copied(critic, tmp_path / "three", id2label=labels))
    assert "3 labels" in str(caught.value.found)
    with pytest.raises(ConfigError, match="2 labels"):
        head_of(copied(critic, tmp_path / "two", id2label=None))


def test_verify_reference_takes_heads_with_and_without_a_bias(critic: Path, tmp_path: Path) -> None:
    sample = cases.samples_of(0, 1, 61)
    plain = Reference(critic, "cpu", head=VALUE_MODEL)
    # What a reward model's directory looks like: no bias, and nothing in the config that says so.
    reward = copied(critic, tmp_path / "reward", token_classification_bias=None)
    bare = Reference(reward, "cpu", head=VALUE_MODEL)
    assert [n for n in bare.weights if n.startswith("score")] == ["score.weight"]
    biased = copied(critic, tmp_path / "biased", token_classification_bias=None)
    tensors = load_file(critic / "model.safetensors")
    save_file({**tensors, "score.bias": torch.tensor([0.5])}, biased / "model.safetensors", {"format": "pt"})
    other = Reference(biased, "cpu", head=VALUE_MODEL)
    a, b, c = (r.scores(sample)[0].numbers["values"] for r in (plain, bare, other))
    scored = torch.tensor(sample[0].scored)
    assert torch.equal(a, b)
    assert torch.allclose(c[scored], a[scored] + 0.5, atol=1e-6)
    assert not a[~scored].any()
    with pytest.raises(ValueError, match=r"lacks score\.bias, score\.weight"):
        save_file({n: t for n, t in tensors.items() if n != "score.weight"}, reward / "model.safetensors")
        Reference(reward, "cpu", head=VALUE_MODEL)
