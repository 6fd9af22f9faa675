"""The table of eight algorithms is made of the numbers that are there, they are of today's settings, and all eight learn."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from rlctl.config.load import load_config
from rlctl.plugins import load_plugins

ROOT = Path(__file__).parents[1]
NAMES = ("GRPO", "RLOO", "REINFORCE++", "Dr.GRPO", "GSPO", "DAPO", "CISPO", "ReMax")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_algorithms", ROOT / "bench" / "algorithms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_measured_numbers(bench: ModuleType) -> None:
    results = json.loads(bench.RESULTS.read_text())
    _, _, rest = bench.PAGE.read_text().partition(bench.START)
    shown, _, _ = rest.partition(bench.END)
    assert shown == bench.table(results)
    assert all(f"| {name} |" in shown for name in NAMES)


def test_every_one_of_the_eight_improves(bench: ModuleType) -> None:
    results = json.loads(bench.RESULTS.read_text())
    assert tuple(results["algorithms"]) == tuple(bench.ALGORITHMS) == NAMES
    assert (results["steps"], results["prompts"], results["samples"]) == (bench.STEPS, bench.PROMPTS, bench.SAMPLES)
    starts = set()
    for name, row in results["algorithms"].items():
        assert (row["settings"], row["lr"]) == (list(bench.ALGORITHMS[name]), bench.RATES.get(name, "1e-4")), name
        assert bench.improved(row), name
        assert row["reward"][1] > row["reward"][0] + 0.05, name
        assert row["prompts_sampled"] >= bench.STEPS * bench.PROMPTS
        starts.add(row["held_out"][0])
    assert len(starts) == 1, "all start from one model"
    assert not bench.improved({"reward": [0.3, 0.4], "held_out": [0.7, 0.7]})
    assert not bench.improved({"reward": [0.3, 0.2], "held_out": [0.7, 0.8]})


def test_every_setting_is_one_that_a_run_takes(bench: ModuleType) -> None:
    plugins = load_plugins()
    found = {name: load_config("quickstart", bench.overrides(name), plugins=plugins).config for name in NAMES}
    assert {name: config.algorithm.adv_estimator for name, config in found.items()} == {
        "GRPO": "grpo", "RLOO": "rloo", "REINFORCE++": "reinforce_plus_plus", "Dr.GRPO": "dr_grpo", "GSPO": "grpo",
        "DAPO": "grpo", "CISPO": "grpo", "ReMax": "remax",
    }  # fmt: skip
    same = {(c.rollout.n, c.data.train_batch_size, c.trainer.total_training_steps) for c in found.values()}
    assert same == {(bench.SAMPLES, bench.PROMPTS, bench.STEPS)}
    assert found["DAPO"].algorithm.filter_groups is not None
