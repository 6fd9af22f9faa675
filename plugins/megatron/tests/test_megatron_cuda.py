"""One GPU, in a process that no stand-in touched: float32 as on the CPU, bfloat16 with float32 main weights, parts that wait on
the host, resumed runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from megatron_tiny import CONFIGS, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers here"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("cuda")
    run_ranks("megatron_cuda_process.py", scratch, world=1, device="cuda")
    return json.loads((scratch / "seen.json").read_text())


def _part(seen: dict[str, Any], name: str) -> dict[str, Any]:
    assert "error" not in seen[name], seen[name]["error"]
    return seen[name]


def test_no_stand_in_is_at_work_on_a_gpu(seen) -> None:
    assert _part(seen, "untouched") == {"torch": True, "device": "cuda"}


@pytest.mark.parametrize("name", [*CONFIGS, "values"])
def test_float32_on_a_gpu_is_what_transformers_computes(seen, name) -> None:
    found = _part(seen, "parity")[name]
    assert all(found[k] < 1e-4 for k in ("loss", "grad_norm", "numbers")), found
    assert found["gradients"] < 5e-4, found


def test_bfloat16_on_a_gpu_trains_float32_main_weights(seen) -> None:
    for name, found in _part(seen, "half_precision").items():
        assert found["notes"]["compute_dtype"] == "bfloat16"
        assert found["dtypes"] == ["torch.float32"], "main weights are what is exported"
        assert found["losses"][1] < found["losses"][0] - 0.05, name
        assert found["grad_norm"] < 0.05, name
        assert found["numbers"] < 0.1, name
        assert found["moved"] == 1.0, name


def test_parts_of_a_gpu_wait_on_the_host(seen) -> None:
    home, away = (_part(seen, "offload")[k] for k in ("False", "True"))
    # Sums whose order is left to the device may differ in their last bits.
    assert away["norms"] == pytest.approx(home["norms"], rel=1e-4)
    assert away["sum"] == pytest.approx(home["sum"], rel=1e-3)
    # Weights in bfloat16 (2 bytes), gradients, main weights and two moments in float32 (4 bytes each).
    at_least = 0.9 * (2 + 4 * 4) * home["weights"]
    assert home["resting"] - away["resting"] > at_least
    assert home["resting"] - home["moved"] > at_least
    assert away["moved"] <= away["resting"]


@pytest.mark.parametrize("choice", ["never", "always"])
def test_a_run_resumed_on_a_gpu_takes_the_same_step(seen, choice) -> None:
    found = _part(seen, "resume")[choice]
    assert found["grad_norm"] < 1e-5
    assert found["weights"] < 5e-5, "far from a rate's 1e-3, which other moments or another step count would show"


def test_layers_computed_again_on_a_gpu_have_the_same_gradients(seen) -> None:
    found = _part(seen, "recompute")
    assert found["loss"] == 0.0
    assert found["grad_norm"] < 1e-5
