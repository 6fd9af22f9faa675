"""Files and draws as sources of weights, on one process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_weights_models import (
    CONFIGS,
    config_of,
    differences,
    edit_index,
    empty_module,
    read_directory,
    reference,
    write_model,
)
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.errors import EngineError
from rlctl.records import ModelType
from rlctl.topology import Topology
from rlctl_megatron import mapping
from rlctl_megatron.families import Family, family_of
from rlctl_megatron.loading import Chunk, load_weights
from rlctl_megatron.mapping import Shard
from rlctl_megatron.mesh import Place
from rlctl_megatron.source import DrawnSource, FileSource, Request, Source, draw_value_head

HERE = Place(Topology(), torch.device("cpu"))


def _loaded(
    name: str,
    source: Source,
    tensors: dict[str, torch.Tensor],
    head: ModelType = ModelType.LANGUAGE_MODEL,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(parameters of the whole model in one chunk, what they must be by the second mapping)."""
    config = config_of(name)
    wanted = reference(tensors, config, tuple(range(4)), (True, True))
    module = empty_module(wanted, dtype)
    load_weights([Chunk(module, tuple(range(4)), True, True)], family_of(config, head), HERE, source)
    return dict(module.named_parameters()), wanted


def _requests(family: Family, tp: int, rank: int) -> list[Request]:
    """Everything that one tp rank needs of a model."""
    return [
        Request(name, shape, cut)
        for site in family.sites()
        if site.entry.exported
        for name, shape, cut in zip(
            site.names(),
            family.shapes(site.entry),
            mapping.slices(site.entry, family, Shard(rank, tp)),
            strict=True,
        )
    ]


# ---- files --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_directory_fills_every_parameter(name, tmp_path) -> None:
    tensors = write_model(name, tmp_path)
    found, wanted = _loaded(name, FileSource(str(tmp_path)), tensors)
    assert differences(found, wanted) == []


def test_a_sharded_directory_is_read_as_one(tmp_path) -> None:
    tensors = write_model("qwen3", tmp_path, shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found, wanted = _loaded("qwen3", FileSource(str(tmp_path)), tensors)
    assert differences(found, wanted) == []


def test_weights_come_in_the_dtype_of_the_parameter(tmp_path) -> None:
    tensors = write_model("llama", tmp_path)
    found, wanted = _loaded("llama", FileSource(str(tmp_path)), tensors, dtype=torch.bfloat16)
    assert differences(found, {n: t.bfloat16() for n, t in wanted.items()}) == []


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_reads_its_share_and_no_more(tmp_path, tp) -> None:
    tensors = write_model("qwen2", tmp_path)
    family = family_of(config_of("qwen2"))
    whole = sum(t.nbytes for t in tensors.values())
    everyone = sum(t.nbytes for n, t in tensors.items() if "norm" in n)
    read = []
    for rank in range(tp):
        source = FileSource(str(tmp_path))
        parts = dict(source.stream(family, _requests(family, tp, rank)))
        assert source.bytes_read == sum(p.nbytes for p in parts.values())
        read.append(source.bytes_read)
    assert sum(read) == whole - everyone + tp * everyone, "together the file once, and what all ranks have once each"
    assert max(read) < 1.1 * whole / tp


def _mapped_bytes() -> int:
    """Bytes of files that this process has in memory."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssFile")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured through Linux's /proc")
def test_pages_that_a_rank_does_not_need_stay_on_disk(tmp_path) -> None:
    sizes = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 48, "num_hidden_layers": 1}
    family = family_of({**config_of("llama-tied"), **sizes, "head_dim": 128})
    tensors = {n: torch.ones(s) for n, s in family.checkpoint().items()}
    whole = sum(t.nbytes for t in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    touched = {}
    for tp in (1, 4):
        before, most = _mapped_bytes(), 0
        for _, part in FileSource(str(tmp_path)).stream(family, _requests(family, tp, tp - 1)):
            part.sum()
            most = max(most, _mapped_bytes() - before)
        touched[tp] = most / whole
    assert touched[1] > 0.9, "the measure sees a file that is read"
    assert touched[4] < 0.4, touched


def test_a_rank_opens_only_the_files_that_it_needs(tmp_path) -> None:
    write_model("llama", tmp_path, shard_size="40KB")
    family = family_of(config_of("llama"))
    source = FileSource(str(tmp_path))
    wanted = [r for r in _requests(family, 1, 0) if r.name.startswith("model.layers.0.")]
    needed = {source._locate()[r.name] for r in wanted}
    others = [f for f in tmp_path.glob("*.safetensors") if f.name not in needed]
    assert others
    for file in others:
        file.unlink()
    assert len(dict(source.stream(family, wanted))) == len(wanted)


def test_rows_that_only_pad_are_not_read(tmp_path) -> None:
    write_model("llama", tmp_path)
    family = family_of(config_of("llama"))
    # 61 rows are two each for the first 30 of 40 ranks, one for the next, and none for the last nine.
    source = FileSource(str(tmp_path))
    ((_, part),) = source.stream(family, [_embedding_request(family, 40, 35)])
    assert tuple(part.shape) == (0, 32)
    assert source.bytes_read == 0


def _embedding_request(family: Family, tp: int, rank: int) -> Request:
    (entry,) = family.first
    (cut,) = mapping.slices(entry, family, Shard(rank, tp))
    return Request("model.embed_tokens.weight", family.shapes(entry)[0], cut)


def _stream_error(path: Path, name: str = "llama", **change: Any) -> EngineError:
    family = replace(family_of(config_of(name)), **change)
    with pytest.raises(EngineError) as caught:
        dict(FileSource(str(path)).stream(family, _requests(family, 1, 0)))
    return caught.value


def test_missing_weights_are_counted_and_the_first_is_named(tmp_path) -> None:
    write_model("llama", tmp_path, shard_size="40KB")
    edit_index(tmp_path, {"model.layers.2.self_attn.q_proj.weight": None, "model.norm.weight": None})
    assert _stream_error(tmp_path).found == "2 missing, first model.layers.2.self_attn.q_proj.weight"


def test_a_missing_file_is_named(tmp_path) -> None:
    write_model("llama", tmp_path, shard_size="40KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in _stream_error(tmp_path).what


def test_a_directory_without_weights_says_what_it_holds(tmp_path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    error = _stream_error(tmp_path)
    assert error.found == "pytorch_model.bin"
    assert "model.safetensors" in str(error.wanted)


def test_damaged_files_are_refused(tmp_path) -> None:
    write_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert _stream_error(tmp_path).what.startswith("model.safetensors of")
    file.write_bytes(b"not a header")
    assert "damaged" in _stream_error(tmp_path).what
    file.unlink()
    for text in ("{", "[]", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert "index" in _stream_error(tmp_path).what


def test_another_shape_than_the_config_describes_is_refused(tmp_path) -> None:
    tensors = write_model("llama", tmp_path)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, tmp_path / "model.safetensors")
    error = _stream_error(tmp_path)
    assert (error.found, error.wanted) == ("[31]", "[32]")


def test_quantised_weights_are_refused(tmp_path) -> None:
    tensors = write_model("llama", tmp_path)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    error = _stream_error(tmp_path)
    assert error.what.startswith("model.layers.1.mlp.up_proj.weight")
    assert error.found == "F8_E4M3"


def test_fused_experts_are_refused_with_the_way_to_mend_them(tmp_path) -> None:
    tensors = write_model("qwen3-moe", tmp_path)
    kept = {n: t for n, t in tensors.items() if "experts" not in n}
    kept["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(8, 48, 32)
    save_file(kept, tmp_path / "model.safetensors")
    error = _stream_error(tmp_path, "qwen3-moe")
    assert "fused in model.layers.0.mlp.experts.gate_up_proj" in str(error.found)
    assert "save_pretrained" in str(error.next)


def test_weights_of_another_architecture_are_refused(tmp_path) -> None:
    write_model("qwen2", tmp_path)
    assert str(_stream_error(tmp_path, "llama").found).startswith("12, first model.layers.0.self_attn.")


def test_what_transformers_drops_is_dropped_with_a_note(tmp_path) -> None:
    tensors = write_model("llama-tied", tmp_path)
    assert "lm_head.weight" not in tensors
    extra = {
        "lm_head.weight": torch.zeros(61, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.4.eh_proj.weight": torch.ones(2),
    }
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    source = FileSource(str(tmp_path))
    found, wanted = _loaded("llama-tied", source, tensors)
    assert differences(found, wanted) == []
    assert source.notes == {"unused_weights": f"1 in {tmp_path}, first model.layers.4.eh_proj.weight"}


def test_an_untied_model_without_its_head_is_refused(tmp_path) -> None:
    write_model("llama-tied", tmp_path)
    assert _stream_error(tmp_path, "llama").found == "1 missing, first lm_head.weight"


_HUB = """
import sys
from rlctl.errors import EngineError
from rlctl_megatron.families import family_of
from rlctl_megatron.source import FileSource, Request
from rlctl_megatron.mapping import Slice
from transformers import AutoConfig
for revision in ("v1", "v2"):
    source = FileSource("someone/tiny", revision=revision)
    try:
        family = family_of(AutoConfig.from_pretrained("someone/tiny", revision="v1").to_dict())
        (part,) = dict(source.stream(family, [Request("model.norm.weight", (32,), Slice(0, 0, 32))])).values()
        print(float(part.sum()))
    except EngineError as error:
        print(error.what)
"""


def test_a_hub_id_is_resolved_through_the_cache_with_its_revision(tmp_path) -> None:
    """A process without network, whose hub cache holds one revision of the model."""
    commit = "a" * 40
    entry = tmp_path / "hub" / "models--someone--tiny"
    tensors = write_model("llama", entry / "snapshots" / commit)
    (entry / "refs").mkdir()
    (entry / "refs" / "v1").write_text(commit)
    done = subprocess.run(
        [sys.executable, "-c", _HUB],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert float(lines[0]) == pytest.approx(float(tensors["model.norm.weight"].sum()))
    assert lines[1] == "the weights of someone/tiny cannot be fetched"


# ---- value models -------------------------------------------------------------------------------------------------
def test_a_value_model_loads_its_own_head(tmp_path) -> None:
    tensors = write_model("qwen3", tmp_path, value=True)
    source = FileSource(str(tmp_path))
    found, wanted = _loaded("qwen3", source, tensors, ModelType.VALUE_MODEL)
    assert differences(found, wanted) == []
    assert torch.equal(found["value_head.weight"].detach(), tensors["score.weight"])
    assert source.notes == {}


def test_a_value_model_from_a_language_model_draws_its_head_from_the_seed(tmp_path) -> None:
    tensors = write_model("llama", tmp_path)
    heads = []
    for seed in (1, 1, 2):
        source = FileSource(str(tmp_path), seed=seed)
        family = family_of(config_of("llama"), ModelType.VALUE_MODEL)
        drawn = {**tensors, "score.weight": draw_value_head(family, seed)}
        found, wanted = _loaded("llama", source, drawn, ModelType.VALUE_MODEL)
        assert differences(found, wanted) == []
        assert "drawn from the seed" in source.notes["value_head"]
        heads.append(found["value_head.weight"])
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.01 < float(heads[0].detach().std()) < 0.04, "the standard deviation of the model's own weights, 0.02"


def test_a_value_bias_that_would_be_lost_is_refused(tmp_path) -> None:
    tensors = write_model("llama", tmp_path, value=True)
    save_file({**tensors, "score.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    found, wanted = _loaded("llama", FileSource(str(tmp_path)), tensors, ModelType.VALUE_MODEL)
    assert differences(found, wanted) == []
    save_file({**tensors, "score.bias": torch.full((1,), 0.5)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match="has a bias"):
        _loaded("llama", FileSource(str(tmp_path)), tensors, ModelType.VALUE_MODEL)


# ---- draws --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_is_the_model_that_transformers_draws_and_saves(name, dtype, tmp_path) -> None:
    config = AutoConfig.for_model(**CONFIGS[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    source = DrawnSource(AutoConfig.for_model(**CONFIGS[name]), dtype, 11, HERE)
    found, wanted = _loaded(name, source, read_directory(tmp_path), dtype=dtype)
    assert differences(found, wanted) == []
    assert torch.equal(torch.get_rng_state(), before), "the process's own random numbers go on as before"


def test_a_drawn_value_model_has_the_language_models_backbone(tmp_path) -> None:
    config = AutoConfig.for_model(**CONFIGS["llama"])
    found = {}
    for head in ModelType:
        family = family_of(config.to_dict(), head)
        shapes = family.checkpoint()
        tensors = {n: torch.empty(s) for n, s in shapes.items()}
        found[head], _ = _loaded("llama", DrawnSource(config, torch.float32, 5, HERE), tensors, head)
    value, language = found[ModelType.VALUE_MODEL], found[ModelType.LANGUAGE_MODEL]
    assert torch.equal(value.pop("value_head.weight"), draw_value_head(family_of(config.to_dict()), 5))
    language.pop("output_layer.weight")
    assert differences(value, {n: t.detach() for n, t in language.items()}) == []


# ---- our own mistakes ---------------------------------------------------------------------------------------------
def test_a_module_that_does_not_fit_the_table_is_our_mistake(tmp_path) -> None:
    tensors = write_model("llama", tmp_path)
    config = config_of("llama")
    wanted = reference(tensors, config, tuple(range(4)), (True, True))
    for broken in (
        {**wanted, "value_head.bias": torch.zeros(1)},
        {n: t for n, t in wanted.items() if n != "output_layer.weight"},
        {**wanted, "decoder.final_layernorm.weight": torch.zeros(31)},
    ):
        chunk = Chunk(empty_module(broken), tuple(range(4)), True, True)
        with pytest.raises(AssertionError):
            load_weights([chunk], family_of(config), HERE, FileSource(str(tmp_path)))
    with pytest.raises(AssertionError, match="has layers"):
        chunk = Chunk(empty_module(wanted), (0, 1, 3, 2), True, True)
        load_weights([chunk], family_of(config), HERE, FileSource(str(tmp_path)))


class _Careless(FileSource):
    """Gives the first slice twice, or leaves out the last one."""

    twice = True

    def stream(self, family: Family, requests: Any) -> Any:
        parts = list(super().stream(family, requests))
        yield from [parts[0], *parts] if self.twice else parts[:-1]


def test_a_source_that_gives_a_slice_twice_or_not_at_all_is_our_mistake(tmp_path) -> None:
    tensors = write_model("llama", tmp_path)
    source = _Careless(str(tmp_path))
    with pytest.raises(AssertionError, match="filled"):
        _loaded("llama", source, tensors)
    source.twice = False
    with pytest.raises(AssertionError, match="1 parameters were not filled"):
        _loaded("llama", source, tensors)
