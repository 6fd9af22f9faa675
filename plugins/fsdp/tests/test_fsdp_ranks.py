"""Two gloo ranks compute what one process computes: loss, grad norm, metrics, scores, weights, export."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_compare import assert_equal_runs, record_runs
from fsdp_helpers import CONFIGS
from fsdp_two_ranks import CASES, run_case
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.slow


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices answer here")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=two_gpus)])
def device(request) -> str:
    """gloo on the CPU, and NCCL where there are two GPUs."""
    return request.param


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, device) -> tuple[list[dict[str, Any]], Path]:
    """Every case on two ranks, in one process group."""
    scratch = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(7)
    config = AutoConfig.for_model(**CONFIGS["llama-tied"])
    AutoModelForCausalLM.from_config(config).save_pretrained(scratch / "directory")
    shutil.copytree(scratch / "directory", scratch / "lacking")
    (scratch / "lacking" / "model.safetensors").unlink()
    here = Path(__file__).parent
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    children = [
        subprocess.Popen(
            [sys.executable, str(here / "fsdp_two_ranks.py"), str(scratch), device],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=400)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [c.returncode for c in children] == [0, 0], "\n".join(o[-3000:] for o in outputs)
    return [torch.load(scratch / f"rank{r}.pt", weights_only=True) for r in range(2)], scratch


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(ranks, device, name, tmp_path) -> None:
    results, scratch = ranks
    (tmp_path / "directory").symlink_to(scratch / "directory")
    one = run_case(CASES[name], 0, 1, tmp_path, device)
    loose = name.endswith("bfloat16")
    both = [results[r][name] for r in range(2)]
    assert_equal_runs(one, both, device, "fully_shard over 2 ranks", loose)
    record_runs(name, {"dp_shard": 2}, device, one, both, "bfloat16" if loose else "float32")


def test_the_comparison_fails_without_the_cures(ranks, device, tmp_path) -> None:
    results, _ = ranks
    wanted = run_case(CASES["llama"], 0, 1, tmp_path, device)["steps"][0]
    plain = results[0]["without-cures"]
    assert plain["loss"] == pytest.approx(wanted["loss"], rel=1e-5), "the loss alone would not notice"
    assert plain["grad_norm"] == pytest.approx(wanted["grad_norm"] / 2, rel=1e-4), (
        "a mean is off by the number of ranks"
    )


def test_only_one_rank_ever_holds_a_whole_model(ranks) -> None:
    results, _ = ranks
    assert results[0]["whole-models"] == 2 * len(CASES) + 3
    assert results[1]["whole-models"] == 0


def test_when_one_rank_refuses_the_other_does_not_wait(ranks) -> None:
    results, _ = ranks
    assert results[0]["refusals"][0] == "another rank refused its rows"
    assert results[1]["refusals"][0] == "a token id lies outside the model's vocabulary"
    assert results[0]["refusals"][1].endswith("lacking cannot be loaded")
    assert results[1]["refusals"][1] == "rank 0 could not build the model"
