"""Two gloo ranks: one step along every axis is the step of plain transformers, and without its cure each known silent error is
far from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from megatron_silent_ranks import CASES, LOUD, MISTAKES
from megatron_tiny import CONFIGS, run_ranks, save_model

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
FAR = 1000 * TOLERANCE


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, Any]]:
    """What both ranks saw: one process group for all cases."""
    scratch = tmp_path_factory.mktemp("silent")
    for name, config in CONFIGS.items():
        save_model(scratch / name, config)
    save_model(scratch / "qwen2-value", CONFIGS["qwen2"], value=True)
    save_model(scratch / "qwen3-moe-all", {**CONFIGS["qwen3-moe"], "norm_topk_prob": False})
    run_ranks("megatron_silent_ranks.py", scratch)
    return [json.loads((scratch / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_one_step_of_two_ranks_is_that_of_transformers(seen, name) -> None:
    for rank in seen:
        found = rank["cases"][name]
        off = {k: v for k, v in found.items() if k != "worst" and not v < TOLERANCE}
        assert not off, (off, found["worst"])


@pytest.mark.parametrize("name", MISTAKES)
def test_without_its_cure_a_silent_error_is_far_off(seen, name) -> None:
    mistake = MISTAKES[name]
    found = [rank["mistakes"][name] for rank in seen]
    assert all(f[mistake.figure] > FAR for f in found), found
    # Looking at these alone, nobody would have noticed.
    assert all(f[quiet] < TOLERANCE for f in found for quiet in mistake.quiet), found


@pytest.mark.parametrize("name", LOUD)
def test_without_its_stand_in_a_mixture_does_not_run(seen, name) -> None:
    words = {"router-gemm-name": "te_general_gemm", "split-sizes": "all_to_all"}[name]
    for rank in seen:
        assert words in rank["loud"][name]


def test_weights_do_not_share_a_step_count_after_loading(seen) -> None:
    for rank in seen:
        assert rank["counter"]["ours"] == 0.0
        assert rank["counter"]["one counter"] > 1e-4
