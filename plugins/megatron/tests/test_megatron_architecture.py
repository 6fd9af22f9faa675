"""Every setting of a Hugging Face config is followed as transformers follows it, or refused by name."""

from __future__ import annotations

import importlib.util
import inspect
import re
from typing import Any

import pytest
import torch
from megatron_tiny import CONFIGS, by_transformers, compare, engine_on, one_step, rows, save_model, squares
from transformers import AutoConfig

from rlctl.errors import CapabilityError, ConfigError
from rlctl_megatron import build
from rlctl_megatron.architecture import SUPPORTED, read_architecture
from rlctl_megatron.config import MegatronConfig

TOLERANCE = 2e-5


def _small(family: str, **change: Any) -> dict[str, Any]:
    return {**CONFIGS[family], "num_hidden_layers": 2, **change}


def _rope(**change: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 100.0, **change}}


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Rows have up to 13 tokens and windows 3 to 5, so that a window not kept, or kept where there is none, is seen.
FOLLOWED: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in CONFIGS},
    "rope-theta": ("qwen2", {"rope_theta": 7.0}),
    "rope-linear": ("llama", _rope(rope_type="linear", factor=3.0)),
    "rope-linear-as-of-old": ("llama", {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "rope-llama3": ("llama", _rope(**_LLAMA3)),
    "rope-yarn": ("qwen3-moe", _rope(**_YARN)),
    "rope-yarn-factors": ("llama", _rope(**_YARN, mscale=0.7, mscale_all_dim=0.3)),
    "rope-yarn-attention": ("llama", _rope(**_YARN, attention_factor=1.5)),
    "no-window": ("mistral", {"sliding_window": None}),
    "window-of-two": ("mistral", {"sliding_window": 2}),
    # Read by no code of transformers' Mistral.
    "window-not-turned-off": ("mistral", {"use_sliding_window": False}),
    "window-not-asked-for": ("qwen2", {"sliding_window": 5}),
    "window-of-every-layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "window-of-no-layer": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "window-of-a-llama": ("llama", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2}),
    "window-of-experts": ("mixtral", {"sliding_window": 5}),
    "window-beside-layer-types": (
        "qwen3-moe",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"] * 2},
    ),
    "head-size": ("qwen2", {"head_dim": 16}),
    "heads-without-groups": ("llama", {"num_key_value_heads": None}),
    "one-key-head": ("llama", {"num_key_value_heads": 1}),
    "eps": ("qwen3", {"rms_norm_eps": 1e-2}),
    "tied-experts": ("mixtral", {"tie_word_embeddings": True}),
    "shares-of-all-experts": ("qwen3-moe", {"norm_topk_prob": False}),
    "one-expert-of-all": ("qwen3-moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "odd-experts": ("qwen3-moe", {"num_experts": 5, "num_experts_per_tok": 3}),
    "longer-rows-than-it-was-made-for": ("llama", {"max_position_embeddings": 8}),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_megatron_computes_what_transformers_computes(name, tmp_path) -> None:
    family, change = FOLLOWED[name]
    directory = save_model(tmp_path, _small(family, **change))
    batch = rows()
    with engine_on(directory) as engine:
        apart = compare(one_step(engine, batch), by_transformers(directory, batch))
    assert apart.largest() < TOLERANCE, apart


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3-moe"])
def test_values_of_megatron_are_those_of_transformers(family, tmp_path) -> None:
    directory = save_model(tmp_path, _small(family), value=True)
    batch = rows()
    with engine_on(directory, value=True) as engine:
        apart = compare(one_step(engine, batch, loss=squares), by_transformers(directory, batch, value=True))
    assert apart.largest() < TOLERANCE, apart


def test_settings_that_are_followed_change_the_model(tmp_path) -> None:
    """Else the comparisons above would prove nothing of them."""
    batch = rows()
    plain = {f: by_transformers(save_model(tmp_path / f, _small(f)), batch) for f in CONFIGS}
    inert = {
        "window-not-turned-off", "window-not-asked-for", "window-of-no-layer", "window-of-a-llama",
        "longer-rows-than-it-was-made-for",
    }  # fmt: skip
    other_shapes = {"head-size", "heads-without-groups", "one-key-head", "odd-experts", "tied-experts"}
    for name, (family, change) in FOLLOWED.items():
        if not change or name in other_shapes:
            continue
        seen = by_transformers(save_model(tmp_path / name, _small(family, **change)), batch)
        moved = float((seen.numbers - plain[family].numbers).abs().max())
        assert (moved == 0.0) == (name in inert), (name, moved)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gelu": ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    "biases": ("llama", {"attention_bias": True}, "attention_bias"),
    "mlp-biases": ("llama", {"mlp_bias": True}, "mlp_bias"),
    "dropout": ("qwen3", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    "auxiliary-loss": ("mixtral", {"output_router_logits": True}, "output_router_logits=True"),
    "both-ways": ("llama", {"is_causal": False}, "is_causal=False"),
    "dense-layer": ("qwen3-moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    "every-second-layer": ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    "single-expert": ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "rope-dynamic": ("llama", _rope(rope_type="dynamic", factor=2.0), "rope_type dynamic"),
    "rope-longrope": (
        "llama",
        _rope(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=16),
        "rope_type longrope",
    ),
    "rope-unknown": ("llama", _rope(rope_type="proportional"), "rope_type proportional"),
    "rope-partial": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "rope-by-layer-type": (
        "qwen2",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 50.0}}},
        "rope_parameters of full_attention",
    ),
    "some-layers-with-a-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "layer_types full_attention, sliding_attention",
    ),
    "unknown-layers": ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "layer_types chunked_attention"),
    "window-without-length": ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "sliding_window=None"),
    "window-of-nothing": ("mistral", {"sliding_window": 0}, "sliding_window=0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_megatron_does_not_follow_are_refused(name) -> None:
    family, change, found = REFUSED[name]
    read_architecture(AutoConfig.for_model(**_small(family)))
    with pytest.raises(CapabilityError) as error:
        read_architecture(AutoConfig.for_model(**_small(family, **change)))
    assert found in str(error.value)
    assert error.value.wanted
    assert error.value.next


def test_other_families_are_refused_with_the_known_ones() -> None:
    with pytest.raises(CapabilityError, match="no model of type 'gemma2'") as error:
        read_architecture(AutoConfig.for_model("gemma2"))
    for family in SUPPORTED:
        assert family in str(error.value)


KNOWN = {
    # followed
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "sliding_window", "layer_types",
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "initializer_range", "pad_token_id",
    # refused where they change the model
    "hidden_act", "attention_bias", "mlp_bias", "attention_dropout", "router_jitter_noise", "output_router_logits",
    "mlp_only_layers", "decoder_sparse_step",
    # without effect: the weight of a loss that is refused, how transformers itself computes
    "router_aux_loss_coef", "_attn_implementation", "_experts_implementation",
}  # fmt: skip


@pytest.mark.parametrize("family", SUPPORTED)
def test_transformers_reads_no_setting_that_is_not_known_here(family) -> None:
    source = inspect.getsource(importlib.import_module(f"transformers.models.{family}.modeling_{family}"))
    read = set(re.findall(r"\bconfig\.(\w+)", source)) | set(
        re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", source)
    )
    assert "hidden_size" in read, "the source is looked at in the right way"
    assert read <= KNOWN, read - KNOWN


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ({"dtype": "bfloat16"}, {}, "keeps main weights in float32"),
        ({"dtype": "float16"}, {}, "keeps main weights in float32"),
        ({}, {"param_dtype": "bfloat16"}, "computes in float32 on a CPU"),
    ],
)
def test_lower_precision_on_a_cpu_is_refused(model, settings, words) -> None:
    from megatron_tiny import MegatronEngine

    from rlctl.engine import Engine
    from rlctl.records import BackendKind
    from rlctl.topology import Topology

    engine = Engine(MegatronEngine(), BackendKind.TRAIN, "megatron")
    try:
        with pytest.raises(ConfigError, match=words) as error:
            engine.build(Topology(), {"device": "cpu", **settings}, {"config": CONFIGS["llama"], **model}, None, True)
    finally:
        engine.shutdown()
    assert "set " in (error.value.next or "")


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_layers_computed_again_have_the_same_gradients(family, tmp_path) -> None:
    directory, batch = save_model(tmp_path, _small(family)), rows()
    steps = []
    for recompute in ("none", "full"):
        with engine_on(directory, recompute=recompute) as engine:
            assert engine.info is not None
            assert ("recompute" in engine.info.notes) == (recompute == "full")
            steps.append(one_step(engine, batch))
    assert compare(steps[1], steps[0]).largest() == 0.0


def test_sp_at_tp_1_is_announced_by_the_engine() -> None:
    with engine_on(_small("llama"), {"sp": 1}) as engine:
        assert engine.info is not None
        assert engine.info.notes["sp"].startswith("off")
        quiet = one_step(engine, rows())
    with engine_on(_small("llama")) as engine:
        assert engine.info is not None
        assert "sp" not in engine.info.notes
        assert compare(quiet, one_step(engine, rows())).largest() == 0.0


def test_transformer_engine_is_taken_in_lower_precision_only(tmp_path, monkeypatch) -> None:
    """It multiplies float32 matrices in TF32: no error tells, and weights are off by a tenth after three steps."""
    cuda, half, single = torch.device("cuda"), torch.bfloat16, torch.float32
    asked = MegatronConfig(layers="transformer_engine")
    if importlib.util.find_spec("transformer_engine") is None:
        with pytest.raises(ConfigError) as absent:
            build.uses_transformer_engine(asked, cuda, half)
        assert "transformer_engine not installed" in str(absent.value.found)
        assert not build.uses_transformer_engine(MegatronConfig(), cuda, half)
        (tmp_path / "transformer_engine.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
    assert build.uses_transformer_engine(MegatronConfig(), cuda, half)
    assert not build.uses_transformer_engine(MegatronConfig(), cuda, single)
    assert not build.uses_transformer_engine(MegatronConfig(), torch.device("cpu"), half)
    assert not build.uses_transformer_engine(MegatronConfig(layers="local"), cuda, half)
    with pytest.raises(ConfigError, match="TF32"):
        build.uses_transformer_engine(asked, cuda, single)
    with pytest.raises(ConfigError) as elsewhere:
        build.uses_transformer_engine(asked, torch.device("cpu"), half)
    assert "device cpu" in str(elsewhere.value.found)
