"""Four gloo ranks load a directory and export it again, bit for bit, whatever the axes; failures reach every rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_weights_models import CONFIGS, write_model
from megatron_weights_ranks import CASES, WORLD
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl_megatron.families import family_of

pytestmark = pytest.mark.slow


def _write_models(models: Path) -> None:
    for name in sorted({c["model"] for c in CASES.values()}):
        write_model(name, models / name)
    for name in sorted({c["model"] for c in CASES.values() if c.get("value")}):
        write_model(name, models / f"{name}-value", value=True)
    for name in ("llama-tied", "qwen3-moe"):
        torch.manual_seed(3)
        config = AutoConfig.for_model(**CONFIGS[name])
        AutoModelForCausalLM.from_config(config).save_pretrained(models / f"{name}-drawn")
    write_model("llama", models / "damaged", shard_size="40KB")
    # The last file holds the output layer or the last layer: the second stage's alone.
    (*_, last) = sorted((models / "damaged").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-100])


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """Every case on four ranks, in one process group."""
    scratch = tmp_path_factory.mktemp("weights")
    _write_models(scratch / "models")
    here = Path(__file__).parent
    env = {
        **os.environ,
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    children = [
        subprocess.Popen(
            [sys.executable, str(here / "megatron_weights_ranks.py"), str(scratch)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [child.communicate(timeout=400)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [c.returncode for c in children] == [0] * WORLD, "\n".join(o[-3000:] for o in outputs)
    return [torch.load(scratch / f"rank{r}.pt", weights_only=True) for r in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_loads_its_part_and_exports_the_whole(ranks, name) -> None:
    for rank in range(WORLD):
        seen = ranks[rank][name]
        assert seen["loading"] == []
        assert seen["exporting"] == []
        assert seen["bfloat16"] == []
        assert seen["order"]


@pytest.mark.parametrize("name", CASES)
def test_an_export_holds_one_parameter_at_a_time(ranks, name) -> None:
    for rank in range(WORLD):
        seen = ranks[rank][name]
        # Pieces as they come, the same joined, and their parts; and gloo lets go of a gather's pieces at the next one.
        assert seen["most_live"] <= 4 * seen["largest"], (seen["most_live"], seen["largest"], seen["whole"])
        assert seen["most_live"] < seen["whole"] / 2


@pytest.mark.parametrize("name", ["tp4", "pp4-tied", "tp2-pp2", "ep2-etp2"])
def test_no_rank_reads_the_whole_file(ranks, name) -> None:
    read = [ranks[r][name]["read"] for r in range(WORLD)]
    whole = ranks[0][name]["whole"]
    assert max(read) < 0.5 * whole, (read, whole)


def test_tables_with_a_mistake_are_seen(ranks) -> None:
    for rank in range(WORLD):
        seen = ranks[rank]["mistakes"]
        assert seen["gate_up", "loading"]
        assert all(n.endswith("linear_fc1.weight") for n in seen["gate_up", "loading"])
        assert seen["qkv", "loading"]
        assert all("linear_qkv" in n for n in seen["qkv", "loading"])
        for name in ("gate_up", "qkv"):
            assert seen[name, "exporting"], "the right table shows that the parameters are wrong"
            assert seen[name, "round trip"] == [], "a wrong table undoes itself: the round trip alone is no proof"


def test_when_one_stage_cannot_read_the_others_do_not_wait(ranks) -> None:
    words = [ranks[r]["failures"]["damaged"] for r in range(WORLD)]
    assert words[:2] == ["another rank could not load its weights"] * 2
    assert all("is damaged" in w for w in words[2:])


def test_a_model_that_rank_0_cannot_draw_is_refused_everywhere(ranks) -> None:
    words = [ranks[r]["failures"]["unbuildable"] for r in range(WORLD)]
    assert words[0] == "transformers builds no causal language model of type 'vit'"
    assert words[1:] == ["rank 0 could not build the model"] * (WORLD - 1)


def test_drawn_weights_are_shared_by_one_rank(ranks) -> None:
    assert [ranks[r]["draws"]["built"] for r in range(WORLD)] == [2, 0, 0, 0]
    for rank in range(WORLD):
        for name in ("llama-tied", "qwen3-moe"):
            seen = ranks[rank]["draws"][name]
            assert seen["loading"] == []
            if rank:
                assert seen["most_live"] < seen["whole"] / 4, "one whole tensor and this rank's own slices"


def test_padding_takes_part_in_these_cases() -> None:
    sizes = family_of({**AutoConfig.for_model(**CONFIGS["llama"]).to_dict()}).sizes
    assert sizes["vocab"] % 2
