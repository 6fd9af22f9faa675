"""Weights as a Hugging Face directory: what is written reloads exactly, and what is wrong is refused."""

from __future__ import annotations

import gc
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rlctl.config.schema import ModelConfig  # noqa: E402
from rlctl.errors import CheckpointError, GuardError  # noqa: E402
from rlctl.export import write_hf_directory  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "decoder_sparse_step": 1}


def config(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **more}


def build(values: dict[str, Any], seed: int = 0) -> Any:
    values = dict(values)
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    return transformers.AutoModelForCausalLM.from_config(made)


def section(values: dict[str, Any]) -> ModelConfig:
    return ModelConfig(config=values, tokenizer="none")


def weights_of(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()


def assert_reloads(model: Any, dest: Path, dtype: Any = torch.float32) -> None:
    again, info = transformers.AutoModelForCausalLM.from_pretrained(dest, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    state = again.state_dict()
    assert set(state) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value.to(dtype)), name
    if dtype != torch.float32:
        return  # .to() also rounds the rotary buffers, which from_pretrained keeps: the weights above are the claim
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    "values",
    [
        config("llama", tie_word_embeddings=True),
        config("llama", tie_word_embeddings=False),
        config("qwen2", tie_word_embeddings=True),
        config("gpt_neox"),
        config("qwen3_moe", **MOE),
    ],
    ids=["llama-tied", "llama-untied", "qwen2", "gpt_neox", "qwen3_moe"],
)
def test_from_pretrained_reloads_exactly(tmp_path: Path, values: dict[str, Any]) -> None:
    model = build(values)
    dest = write_hf_directory(weights_of(model), model=section(values), tokenizer=None, dest=tmp_path / "export")
    assert_reloads(model, dest)
    assert json.loads((dest / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert (dest / "generation_config.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_experts_are_written_one_by_one_as_published_checkpoints_have_them(tmp_path: Path) -> None:
    from safetensors import safe_open

    values = config("qwen3_moe", **MOE)
    model = build(values)
    assert any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())
    ours = write_hf_directory(weights_of(model), model=section(values), tokenizer=None, dest=tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    with safe_open(ours / "model.safetensors", "pt") as a, safe_open(tmp_path / "theirs/model.safetensors", "pt") as b:
        assert set(a.keys()) == set(b.keys())
        assert all(torch.equal(a.get_tensor(k), b.get_tensor(k)) for k in a.keys())  # noqa: SIM118
        published = {k: a.get_tensor(k) for k in a.keys()}  # noqa: SIM118
    again = write_hf_directory(iter(published.items()), model=section(values), tokenizer=None, dest=tmp_path / "again")
    assert_reloads(model, again)


@pytest.mark.parametrize("tied", [True, False])
def test_shards_and_index(tmp_path: Path, tied: bool) -> None:
    values = config("llama", tie_word_embeddings=tied)
    model = build(values)
    dest = write_hf_directory(
        weights_of(model), model=section(values), tokenizer=None, dest=tmp_path / "e", max_shard_bytes=20_000
    )
    index = json.loads((dest / "model.safetensors.index.json").read_text())
    shards = sorted(p.name for p in dest.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(shards)
    names = {name for name, _ in model.named_parameters()}
    assert set(index["weight_map"]) == names
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    assert all((dest / name).stat().st_size < 22_000 for name in shards)
    assert_reloads(model, dest)


def test_never_more_than_a_shard_is_alive(tmp_path: Path) -> None:
    values = config("llama", num_hidden_layers=8, tie_word_embeddings=True)
    shapes = {name: tuple(p.shape) for name, p in build(values).named_parameters()}
    alive: list[int] = []

    def bytes_alive() -> int:
        mine = (t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu")
        return sum(t.numel() * t.element_size() for t in mine)

    def stream() -> Iterator[tuple[str, Any]]:
        for i, (name, shape) in enumerate(shapes.items()):
            if i % 5 == 0:
                alive.append(bytes_alive())
            yield name, torch.randn(shape)

    gc.collect()
    before = bytes_alive()
    write_hf_directory(stream(), model=section(values), tokenizer=None, dest=tmp_path / "e", max_shard_bytes=20_000)
    total = sum(torch.Size(s).numel() * 4 for s in shapes.values())
    assert total > 200_000
    assert max(alive) - before < 60_000  # a shard, the tensor that comes, and little else


def test_dtype_and_a_reused_buffer(tmp_path: Path) -> None:
    values = config("llama", tie_word_embeddings=False)
    model = build(values)

    def reuse() -> Iterator[tuple[str, Any]]:
        bucket = torch.empty(max(p.numel() for p in model.parameters()))
        for name, p in model.named_parameters():
            view = bucket[: p.numel()].view(p.shape)
            view.copy_(p.detach())
            yield name, view

    dest = write_hf_directory(reuse(), model=section(values), tokenizer=None, dest=tmp_path / "e", dtype="bfloat16")
    assert json.loads((dest / "config.json").read_text())["dtype"] == "bfloat16"
    assert_reloads(model, dest, torch.bfloat16)


def test_source_directory_keeps_its_generation_config_and_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    model = build(config("llama"))
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": false}')
    for source in (str(tmp_path / "source"), ModelConfig(path=str(tmp_path / "source")), model.config):
        dest = write_hf_directory(weights_of(model), model=source, tokenizer=tokenizer, dest=tmp_path / "e")
        assert_reloads(model, dest)
        again = transformers.AutoTokenizer.from_pretrained(dest)
        assert again("a b a").input_ids == [2, 3, 2]
        assert again.chat_template == tokenizer.chat_template
        if source is not model.config:
            assert json.loads((dest / "generation_config.json").read_text())["temperature"] == 0.7


def broken(model: Any, fault: str) -> Iterator[tuple[str, Any]]:
    for i, (name, p) in enumerate(model.named_parameters()):
        if fault == "missing" and i in (3, 5):
            continue
        if fault == "unknown" and i == 3:
            yield "model.layers.9.wrong", p
        if fault == "shape" and i == 3:
            yield name, p.detach()[:-1]
            continue
        yield name, p
        if fault == "twice" and i == 3:
            yield name, p


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "does not cover"), ("unknown", "has not"), ("shape", "another shape"), ("twice", "repeats"),
    ],
)  # fmt: skip
def test_coverage_faults_are_refused_and_an_older_export_stays(tmp_path: Path, fault: str, words: str) -> None:
    values = config("llama")
    old = build(values, seed=1)
    dest = write_hf_directory(weights_of(old), model=section(values), tokenizer=None, dest=tmp_path / "e")
    stream = broken(build(values), fault)
    with pytest.raises(GuardError, match=words) as caught:
        write_hf_directory(stream, model=section(values), tokenizer=None, dest=dest)
    assert caught.value.found is not None
    assert next(stream, None) is None  # consumed to its end: no rank is left waiting in a collective
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    assert_reloads(old, dest)


def test_a_full_disk_leaves_the_older_export(tmp_path: Path) -> None:
    values = config("llama")
    old = build(values, seed=1)
    dest = write_hf_directory(weights_of(old), model=section(values), tokenizer=None, dest=tmp_path / "e")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    stream = weights_of(build(values))
    try:
        with pytest.raises(CheckpointError, match="not written") as caught:
            write_hf_directory(stream, model=section(values), tokenizer=None, dest=dest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert "disk space" in (caught.value.next or "")
    assert next(stream, None) is None
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    assert_reloads(old, dest)


def test_an_error_of_the_weights_is_not_disguised(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Any]]:
        yield from ()
        raise RuntimeError("collective failed")

    with pytest.raises(RuntimeError, match="collective failed"):
        write_hf_directory(failing(), model=section(config("llama")), tokenizer=None, dest=tmp_path / "e")
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_only_take_part(tmp_path: Path) -> None:
    values = config("llama")
    stream = weights_of(build(values))
    write_hf_directory(stream, model=section(values), tokenizer=None, dest=tmp_path / "e", is_writer=False)
    assert next(stream, None) is None
    assert list(tmp_path.iterdir()) == []
