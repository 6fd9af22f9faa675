"""The engine around generation: stopping by text, weights by name, sharded modules."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp_helpers import CONFIGS
from rollout_helpers import PROMPTS, attached, check_sharded, generate, make_model, plain_log_probs, sharded_rank
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from rlctl.engine import Engine
from rlctl.errors import EngineError
from rlctl.generation import FinishReason
from rlctl.records import BackendKind
from rlctl.sync import fingerprint_tensor
from rlctl.topology import Topology
from rlctl_fsdp.rollout import HFRollout

CHARACTERS = "\0$é" + "0123456789abcdefghijklmnopqrstuvwxyz+-*=:, ?.!<>/\\[](){}"


def save_model(directory: Path, name: str = "llama", **generation: Any) -> PreTrainedModel:
    """A directory as a user has it: weights, a character tokenizer, a generation config."""
    module = make_model(name)
    module.generation_config = GenerationConfig(**generation)
    module.save_pretrained(directory)
    vocab = {c: i for i, c in enumerate(CHARACTERS[: CONFIGS[name]["vocab_size"]])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="\0", eos_token="$", unk_token="?").save_pretrained(
        directory
    )
    return module


def from_directory(directory: Path, **settings: Any) -> tuple[Engine, HFRollout]:
    provider = HFRollout()
    engine = Engine(provider, BackendKind.ROLLOUT, "hf")
    engine.build(Topology(), {"device": "cpu", **settings}, {"path": str(directory), "dtype": "float32"})
    return engine, provider


def test_own_copy_of_a_directory_and_its_end_ids(tmp_path: Path) -> None:
    module = save_model(tmp_path, eos_token_id=[7, 9])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 11}))
    engine, provider = from_directory(tmp_path)
    # Two of the generation config, one of the model config, one ("$") of the tokenizer.
    assert provider.notes["end_token_ids"] == "1, 7, 9, 11"
    free = generate(engine, PROMPTS, n=8)
    ended = generate(engine, PROMPTS, n=8, ignore_eos=False)
    assert {c.token_ids[-1] for c in ended if c.finish_reason is FinishReason.STOP} <= {1, 7, 9, 11}
    for whole, c in zip(free, ended, strict=True):
        at = next((i + 1 for i, t in enumerate(whole.token_ids) if t in (1, 7, 9, 11)), None)
        assert c.token_ids == whole.token_ids[:at]
        assert c.log_probs == pytest.approx(
            plain_log_probs(module, PROMPTS[c.prompt_index], c.token_ids, 1.0), abs=2e-5
        )
    assert any(len(c.token_ids) < 8 for c in ended)


def test_stop_strings(tmp_path: Path) -> None:
    save_model(tmp_path)
    engine, provider = from_directory(tmp_path)
    decode = provider.tokenizer.decode
    free = generate(engine, PROMPTS, n=6, max_tokens=16)
    text = decode(free[3].token_ids)
    stop = (text[4:7], text[1:2])
    cut = generate(engine, PROMPTS, n=6, max_tokens=16, stop=stop)
    for whole, c in zip(free, cut, strict=True):
        at = next(
            (
                i + 1
                for i in range(16)
                if any(s in decode(whole.token_ids[: i + 1], skip_special_tokens=True) for s in stop)
            ),
            None,
        )
        assert c.token_ids == whole.token_ids[:at]
        assert c.finish_reason is (FinishReason.LENGTH if at is None else FinishReason.STOP)
    assert {c.finish_reason for c in cut} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-moe"])
def test_weights_by_name(name: str) -> None:
    from rlctl_fsdp.export import export_weights

    source = make_model(name, seed=5)
    sent = {n: t.clone() for n, t in export_weights(source, None)}
    provider = HFRollout()
    engine = Engine(provider, BackendKind.ROLLOUT, "hf")
    engine.build(Topology(), {"device": "cpu"}, {"config": dict(CONFIGS[name])})
    with pytest.raises(EngineError, match="no weights yet"):
        generate(engine, PROMPTS)
    report = engine.load_weights(iter(sent.items()), 1)
    assert sorted(report["loaded"]) == sorted(sent)
    assert report["missing"] == []
    for c in generate(engine, PROMPTS, n=2):
        assert c.log_probs == pytest.approx(
            plain_log_probs(source, PROMPTS[c.prompt_index], c.token_ids, 1.0), abs=2e-5
        )
    assert engine.weight_fingerprint(list(sent)) == {n: fingerprint_tensor(t) for n, t in sent.items()}
    with pytest.raises(EngineError, match=r"no\.such"):
        engine.weight_fingerprint(["no.such"])

    dropped = next(n for n in sent if "mlp" in n)
    rest = {n: t for n, t in sent.items() if n != dropped}
    # Experts are one weight in memory: without one expert's part, the whole of it is missing.
    fused = dropped.replace("0.down_proj.weight", "down_proj")
    assert engine.load_weights(iter(rest.items()), 2)["missing"] == [fused if name == "qwen3-moe" else dropped]

    def wrong() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.zeros(3)

    with pytest.raises(EngineError, match="another shape"):
        engine.load_weights(wrong(), 3)


def test_attaching_after_a_copy_and_back() -> None:
    first, second = make_model("llama", seed=1), make_model("llama", seed=2)
    engine, provider = attached(first, "llama")
    live = generate(engine, PROMPTS)
    engine.load_weights(iter(second.state_dict().items()), 1)
    assert provider.module is not first
    copied = generate(engine, PROMPTS)
    assert [c.token_ids for c in live] != [c.token_ids for c in copied]
    assert engine.attach_module(first, 2)
    assert [c.token_ids for c in generate(engine, PROMPTS)] == [c.token_ids for c in live]
    assert not engine.attach_module(object(), 3)


# ---- sharded modules -------------------------------------------------------------------------------------------------


def test_sharded_on_one_rank() -> None:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        rank=0,
        world_size=1,
    )
    try:
        check_sharded(0, 1)
    finally:
        dist.destroy_process_group()


def test_sharded_on_two_ranks(tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(sharded_rank, args=(2, str(tmp_path)), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
