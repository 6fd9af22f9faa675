"""A model with another head is no language model, wherever one is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.config.load import load_config as load_run
from rlctl.errors import ConfigError
from rlctl.models import require_language_model
from rlctl.plugins import load_plugins
from rlctl.records import ModelType
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner

transformers = pytest.importorskip("transformers")

VALUES = {
    "model_type": "llama",
    "architectures": ["LlamaForTokenClassification"],
    "vocab_size": 47,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_labels": 1,
}


@pytest.fixture
def value_model(tmp_path: Path) -> Path:
    folder = tmp_path / "values"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(VALUES))
    return folder


@pytest.mark.parametrize("names", [None, [], "x", [3], ["LlamaForCausalLM"], ["A", "LlamaForSequenceClassification"]])
def test_what_may_be_a_language_model_passes(names: object) -> None:
    assert require_language_model(names, "somewhere") is None


def test_an_engine_refuses_it_as_a_language_model_and_takes_it_as_a_value_model(value_model: Path) -> None:
    from rlctl.hf_config import load_config

    assert load_config({"path": str(value_model), "model_type": ModelType.VALUE_MODEL}).hidden_size == 16
    for section in ({"path": str(value_model)}, {"path": str(value_model), "model_type": "language_model"}):
        with pytest.raises(ConfigError, match="one with another head") as refused:
            load_config(section)
        assert "LlamaForTokenClassification" in str(refused.value)


@pytest.mark.parametrize("role", ["actor", "teacher"])
def test_a_run_refuses_it_before_anything_is_trained(value_model: Path, tmp_path: Path, role: str) -> None:
    plugins = load_plugins()
    names = {spec.name for entry in plugins.entries for spec in entry.backends}
    if not {"fsdp2", "hf"} <= names:
        pytest.skip("rlctl-plugin-fsdp is not installed")
    overrides = {
        "actor": ["model.config=null", f"model.path={value_model}"],
        "teacher": [f"teacher.model={{path: {value_model}, tokenizer: TOKENS}}", "teacher.train=null"],
    }[role]
    recipe = pytest.importorskip("rlctl_cli", reason="the recipes are the command's")
    tokens = Path(recipe.__file__).parent / "recipes" / "quickstart" / "model"
    settings = [text.replace("TOKENS", str(tokens)) for text in overrides]
    if role == "actor":
        settings.append(f"model.tokenizer={tokens}")
    resolved = load_run(
        "quickstart" if role == "actor" else "opd", [*settings, "trainer.num_threads=1"], plugins=plugins
    )
    with pytest.raises(ConfigError, match="one with another head"):
        Runner(resolved, plugins, NullReporter(), run_dir=tmp_path / "run").execute()
    assert not any((tmp_path / "run" / made).exists() for made in ("warm_start", "teacher", "checkpoints"))
