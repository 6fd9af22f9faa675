"""Value models: what transformers' token classifier says, on the layers of the language model they start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import batch_of, build_engine, model_section, rows
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from rlctl.algorithms.value_loss import ValueLoss
from rlctl.engine import Engine
from rlctl.errors import CapabilityError, ConfigError, EngineError
from rlctl.microbatch import MicroBatchPlan
from rlctl.parts.values import draw_value_head

PLAN = MicroBatchPlan(max_rows=2)
LENGTHS = (9, 5, 9, 12)


def value_section(name: str = "llama", **more: Any) -> dict[str, Any]:
    return {**model_section(name), "model_type": "value_model", **more}


def at(path: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(path), "dtype": "float32", "model_type": "value_model", **more}


def exported(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights(None)}


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm")
    torch.manual_seed(3)
    config = AutoConfig.for_model(**model_section("llama-tied")["config"])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A value model with a bias on its head, as transformers writes it."""
    folder = tmp_path_factory.mktemp("critic")
    torch.manual_seed(4)
    config = AutoConfig.for_model(**model_section("qwen3")["config"], num_labels=1)
    model: Any = AutoModelForTokenClassification.from_config(config)
    with torch.no_grad():
        model.score.bias.fill_(0.75)
    model.save_pretrained(folder)
    return folder


def transformers_values(folder: Path, batch: Any) -> torch.Tensor:
    """``[N]`` one row after the other, each token's from the position before it."""
    model: Any = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    with torch.no_grad():
        for ids, mask in zip(
            batch.split_items(batch.items["input_ids"]), batch.split_items(batch.items["loss_mask"]), strict=True
        ):
            said = model(input_ids=ids[None]).logits[0, :, 0]
            out.append(torch.where(mask, torch.cat([torch.zeros(1), said[:-1]]), 0.0))
    return torch.cat(out)


@pytest.mark.parametrize(
    "settings", [{}, {"attention": "per_row"}, {"wrap": "always", "activation_checkpointing": True}]
)
def test_values_are_what_transformers_says_of_each_row_alone(critic: Path, settings: dict[str, Any]) -> None:
    engine = build_engine(at(critic), **settings)
    batch = batch_of(rows(LENGTHS))
    got = engine.infer_batch(batch, PLAN, ("values",))["values"]
    assert (got - transformers_values(critic, batch)).abs().max() < 1e-5
    assert engine.info is not None
    assert engine.info.notes["logits"] == "none: a value head"
    assert engine.info.vocab_size == 61
    engine.shutdown()


def test_a_fresh_head_sits_on_the_layers_of_the_language_model(language_model: Path) -> None:
    engine = build_engine(at(language_model, seed=5))
    got, files = exported(engine), load_file(language_model / "model.safetensors")
    head = got.pop("score.weight")
    assert torch.equal(head, draw_value_head(32, 0.02, 5))
    assert head.std() > 0.01
    assert got.keys() == files.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, files[name]) for name, tensor in got.items())
    engine.shutdown()


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe"])
def test_a_seed_draws_the_layers_that_it_draws_for_the_actor(name: str) -> None:
    drawn = []
    for section in (value_section(name, seed=6), model_section(name, seed=6)):
        engine = build_engine(section, forward_only=True)
        drawn.append(exported(engine))
        engine.shutdown()
    value, language = drawn
    assert value.keys() - language.keys() == {"score.weight"}
    assert language.keys() - value.keys() <= {"lm_head.weight"}
    assert all(torch.equal(value[n], language[n]) for n in value.keys() & language.keys())


def test_a_step_moves_the_head_its_bias_and_the_layers(critic: Path) -> None:
    engine = build_engine(at(critic), {"lr": 1e-2, "name": "sgd", "weight_decay": 0.0, "clip_grad": 0.0})
    before = exported(engine)
    batch = batch_of(rows(LENGTHS))
    returns = torch.sin(torch.arange(batch.num_items).float())
    out = engine.train_batch(batch.with_items(returns=returns), ValueLoss(None), PLAN)
    after = exported(engine)
    assert out.step.grad_norm > 0
    still = [n for n, t in after.items() if torch.equal(t, before[n])]
    assert not still
    # The gradient of a mean of squares by the bias is the mean error.
    mask = batch.items["loss_mask"]
    error = (transformers_values(critic, batch) - returns)[mask].mean()
    assert (before["score.bias"] - after["score.bias"]).item() == pytest.approx(1e-2 * error.item(), rel=1e-4)
    engine.shutdown()


def test_what_is_no_value_model_is_refused_in_words(critic: Path, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="no value model of gpt2") as caught:
        build_engine(value_section("gpt2"))
    assert "no linear head called score" in (caught.value.found or "")
    with pytest.raises((CapabilityError, EngineError), match="gpt_neox"):
        build_engine(value_section("gpt-neox"))

    def copy(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = json.loads((critic / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        save_file(load_file(critic / "model.safetensors"), folder / "model.safetensors")
        return folder

    with pytest.raises(EngineError, match="bias that its config denies"):
        build_engine(at(copy("denied", token_classification_bias=False)))
    labels = {"0": "a", "1": "b", "2": "c"}
    with pytest.raises(ConfigError, match="no value model"):
        build_engine(at(copy("labels", id2label=labels, label2id={v: int(k) for k, v in labels.items()})))


def test_a_critic_learns_a_value_that_the_tokens_tell() -> None:
    """Its returns are +-1, by the token before: from a seed six steps of AdamW bring the loss under a tenth of the first."""
    engine = build_engine(value_section("llama", seed=1), {"lr": 3e-3, "weight_decay": 0.0})
    batch = batch_of(rows(LENGTHS, seed=2))
    returns = torch.where(batch.items["input_ids"].roll(1) % 2 == 0, 1.0, -1.0)
    losses = [engine.train_batch(batch.with_items(returns=returns), ValueLoss(None), PLAN).loss for _ in range(6)]
    assert losses[0] == pytest.approx(0.5, abs=0.05), "a fresh head says next to nothing"
    assert losses[-1] < 0.1 * losses[0], losses
    engine.shutdown()
