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
from fsdp_helpers import CONFIGS
from fsdp_two_ranks import CASES, run_case
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import record_evidence

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
    loose = name == "bfloat16"
    # Matrix products on a GPU add up in another order for another number of rows.
    tolerance = 3e-2 if loose else 2e-6 if device == "cpu" else 2e-5
    assert one["wrap"] == "plain module"
    for two in (results[0][name], results[1][name]):
        assert two["wrap"] == "fully_shard over 2 ranks"
        for got, wanted in zip(two["steps"], one["steps"], strict=True):
            assert got.keys() == wanted.keys()
            for key, value in wanted.items():
                assert got[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key
        for stage in ("before", "weights"):
            assert list(two[stage]) == list(one[stage])
            for key, value in one[stage].items():
                difference = (two[stage][key] - value).abs()
                if stage == "before":
                    assert float(difference.max()) == 0.0, key
                elif loose:
                    # Adam turns the sign of a tiny gradient into a whole step, so only the mean is near.
                    assert float(difference.mean()) <= 2e-3, key
                else:
                    assert float(difference.max()) <= (2e-5 if device == "cpu" else 2e-4), key
        for key, per_row in two["scores"].items():
            for row, values in zip(two["rows"], per_row, strict=True):
                torch.testing.assert_close(
                    values, one["scores"][key][row], atol=5e-2 if loose else 10 * tolerance, rtol=1e-5
                )
        assert two["resume_equal"], "a resumed run takes the very step that the first one took"
    assert one["resume_equal"]
    _record(name, device, one, [results[r][name] for r in range(2)], "bfloat16" if loose else "float32")
    assert any((one["weights"][k] != one["before"][k]).any() for k in one["weights"])


def _record(name: str, device: str, one: dict[str, Any], ranks: list[dict[str, Any]], dtype: str) -> None:
    """Hand what was just compared to the evidence of dp_shard (see rlctl.testing.evidence)."""

    def worst(key: str) -> float:
        pairs = [(a[key], b[key]) for two in ranks for a, b in zip(two["steps"], one["steps"], strict=True)]
        return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)

    weights = max(float((two["weights"][k] - v).abs().max()) for two in ranks for k, v in one["weights"].items())
    scores = max(
        float((values - one["scores"][key][row]).abs().max())
        for two in ranks
        for key, per_row in two["scores"].items()
        for row, values in zip(two["rows"], per_row, strict=True)
    )
    record_evidence(
        f"dp_shard2-{device}-{name}",
        backend="fsdp2",
        level=EvidenceLevel.PARITY,
        axes={"dp_shard": 2},
        world_size=2,
        device=device,
        model_family=one["family"],
        what=f"three steps, scores, export and resume of two {'NCCL' if device == 'cuda' else 'gloo'} ranks against one "
        f"process, {dtype}, case {name}",
        deltas={
            "loss_relative": worst("loss"),
            "grad_norm_relative": worst("grad_norm"),
            "updated_weights_max": weights,
            "scores_max": scores,
        },
    )


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
