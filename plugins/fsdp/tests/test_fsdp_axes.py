"""Replicas, shards and Ulysses slices on four gloo ranks (NCCL where there are GPUs) compute what one process computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_axes_faults import FAULTS
from fsdp_axes_ranks import NAMED, NAMED_OF_TWO, RANDOM_CASES
from fsdp_cases import FAMILIES, LOSSES, SIZES, differences, draw
from fsdp_compare import assert_equal_runs, axes_name, record_runs
from fsdp_helpers import CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import record_evidence

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
_GPUS = torch.cuda.device_count()
_TIME_LIMIT_S = 900

Results = list[dict[str, Any]]


def _gpus(count: int) -> Any:
    return pytest.mark.skipif(count > _GPUS, reason=f"fewer than {count} CUDA devices answer here")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", 4), id="cpu"),
        pytest.param(("cuda", 2), id="cuda-2", marks=_gpus(2)),
        pytest.param(("cuda", 4), id="cuda-4", marks=_gpus(4)),
    ],
)
def group(request, tmp_path_factory) -> tuple[str, int, Results]:
    """(device, world size, what each rank wrote) of one process group that ran every case."""
    device, world = request.param
    scratch = tmp_path_factory.mktemp("axes")
    torch.manual_seed(7)
    config = AutoConfig.for_model(**CONFIGS["llama-tied"])
    AutoModelForCausalLM.from_config(config).save_pretrained(scratch / "directory")
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    log = scratch / "log"
    with log.open("w") as stream:
        child = subprocess.Popen(
            [sys.executable, str(here / "fsdp_axes_ranks.py"), str(scratch), device, str(world)],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=_TIME_LIMIT_S)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    assert code == 0, log.read_text()[-6000:]
    return device, world, [torch.load(scratch / f"rank{r}.pt", weights_only=True) for r in range(world)]


def _random(results: Results, world: int, number: int) -> tuple[Results, dict[str, Any]]:
    """What the ranks of a random case saw, and what one process saw."""
    name = f"random-{world}-{number}"
    seen = [r[name] for r in results if name in r]
    return seen, next(r[f"{name} alone"] for r in results if f"{name} alone" in r)


@pytest.mark.parametrize("world", [4, 2, 1])
def test_axes_random_cases_equal_one_process(group, world) -> None:
    """Loss, gradient norm, metrics and the weights after a linear step, whatever the rows, micro-batches and mesh."""
    device, started, results = group
    if device == "cuda" and world != started:
        pytest.skip("another group of ranks")
    # Matrix products on a GPU add up in another order for another number of rows.
    tolerance = TOLERANCE if device == "cpu" else 1e-4
    worst: dict[tuple[int, int, int], dict[str, float]] = {}
    failed = []
    for number in range(RANDOM_CASES[world]):
        case = draw(number, world)
        seen, alone = _random(results, world, number)
        assert len(seen) == world, case
        assert len({rank["checksum"] for rank in seen}) == 1, f"{case}: ranks export other weights"
        for rank in seen:
            assert (rank["loss"], rank["grad_norm"]) == (seen[0]["loss"], seen[0]["grad_norm"]), case
            if case.calls == 1:
                assert (rank["alignment"] is None) == (case.sizes[2] == 1), case
        found = differences(next(rank for rank in seen if "weights" in rank), alone)
        if max(found.values()) > tolerance:
            failed.append(f"{case}: {found}")
        sofar = worst.setdefault(case.sizes, found)
        worst[case.sizes] = {k: max(v, sofar[k]) for k, v in found.items()}
    assert not failed, "\n".join(failed)
    assert set(worst) == set(SIZES[world])
    for sizes, deltas in worst.items():
        axes = {k: v for k, v in zip(("dp_replicate", "dp_shard", "usp"), sizes, strict=True) if v > 1}
        if axes:
            families = {draw(n, world).family for n in range(RANDOM_CASES[world]) if draw(n, world).sizes == sizes}
            record_evidence(
                f"{axes_name(axes)}-{device}-random",
                backend="fsdp2",
                level=EvidenceLevel.PARITY,
                axes=axes,
                world_size=world,
                device=device,
                model_family=FAMILIES[sorted(families)[0]]["model_type"],
                what=f"random rows, masks, micro-batches, calls and losses of {', '.join(sorted(families))} on {world} "
                "ranks against one process, float32, one step that is linear in the gradient",
                deltas={f"{k}_relative": v for k, v in deltas.items()},
            )


def test_axes_random_cases_are_enough_and_of_every_kind() -> None:
    assert RANDOM_CASES[4] >= 60, "in one process group"
    cases = [draw(n, world) for world, count in RANDOM_CASES.items() for n in range(count)]
    assert {c.family for c in cases if c.sizes[2] > 1} == set(FAMILIES), "every family is cut into slices"
    assert {c.loss for c in cases if c.sizes[2] > 1} == set(LOSSES), (
        "every loss is cut into slices, those of whole rows too"
    )
    assert {c.calls for c in cases} == {1, 2}
    assert {c.max_rows is None for c in cases} == {True, False}
    assert {k for c in cases for k, _ in c.settings} == {
        "activation_checkpointing", "reshard_after_forward", "share_prompts",
    }  # fmt: skip
    assert any(set(range(c.sizes[0] * c.sizes[1])) - set(c.owner) for c in cases), "a replica without rows"
    heads = {name: config.get("num_key_value_heads", 4) for name, config in FAMILIES.items()}
    assert any(heads[c.family] < c.sizes[2] for c in cases), "more ranks than key/value heads"
    assert any(
        c.sizes[2] == 4 and c.max_rows == 1 and any(n <= 4 and p < 0 for n, p in zip(c.lengths, c.prompts, strict=True))
        for c in cases
    ), "a row of at most three tokens that score: one of four slices has nothing to do"


@pytest.mark.parametrize("name", [*NAMED, *NAMED_OF_TWO])
def test_axes_named_cases_equal_one_process(group, name) -> None:
    """Three steps, scores, export, save and resume."""
    device, _, results = group
    if name not in results[0]:
        pytest.skip("another group of ranks")
    sizes = {**NAMED, **NAMED_OF_TWO}[name][0]
    replicas, shards = sizes[0], sizes[1] * sizes[2]
    wrap = f"fully_shard over {shards} ranks" + (f", {replicas} replicas" if replicas > 1 else "")
    seen = [r[name] for r in results if name in r]
    one = next(r[f"{name} alone"] for r in results if f"{name} alone" in r)
    assert len(seen) == replicas * shards
    loose = name.endswith("bfloat16")
    assert_equal_runs(one, seen, device, wrap, loose)
    axes = {k: v for k, v in zip(("dp_replicate", "dp_shard", "usp"), sizes, strict=True) if v > 1}
    record_runs(name, axes, device, one, seen, "bfloat16" if loose else "float32")


_NOTICED_AT_THE_START = {
    "positions-restart", "positions-not-sliced", "border-tokens-lost", "heads-to-other-ranks", "slices-in-another-order",
    "boundaries-of-other-segments",
}  # fmt: skip
"""Faults that the engine's own probes see; wrong gradients are not among them."""


@pytest.mark.parametrize("fault", FAULTS)
def test_axes_faults_in_the_engine_are_noticed(group, fault) -> None:
    device, world, results = group
    if world != 4:
        pytest.skip("faults are injected on four ranks")
    tolerance = TOLERANCE if device == "cpu" else 1e-4
    for rank in results:
        found = rank["faults"][fault]
        assert max(found["sound"].values()) <= tolerance
        assert max(found["broken"].values()) >= 1000 * tolerance, found
        assert found["starts"] == (fault not in _NOTICED_AT_THE_START)


def test_axes_refusals_reach_every_rank(group) -> None:
    _, world, results = group
    if world != 4:
        pytest.skip("the groups of ranks are those of four")
    said = [r["refusals"] for r in results]
    assert all(s.keys() == said[0].keys() for s in said)

    def everywhere(name: str, *words: str) -> None:
        for rank in said:
            assert rank[name], name
            for word in words:
                assert word in rank[name], (name, rank[name])

    for model in ("border-mixing", "convolution", "recurrence"):
        for dtype in ("float32", "bfloat16"):
            everywhere(f"{model}-{dtype}", "EngineError", "cannot be split between ranks", "parallel.usp=1")
    everywhere("border-mixing-bfloat16", "BorderMixingModel (model)", "it is no attention")
    everywhere("convolution-bfloat16", "conv.out_proj")
    assert not any(rank["border-mixing-whole-rows"] for rank in said), "whole rows are no problem of such a model"
    everywhere("six-heads", "CapabilityError", "num_heads=6", "parallel.usp=2")
    everywhere("per-row", "ConfigError", "engine.attention=auto")
    everywhere("long-rope", "BatchError", "30 tokens", "at most 20 tokens")
    everywhere("other-count", "BatchError", "1 to 2")
    told = {
        "other-rows": ("were given different ones", (0, 1)),
        "other-mask": ("were given different ones", (2, 3)),
        "bad-ids": ("outside the model's vocabulary", (3,)),
    }
    for name, (words, own) in told.items():
        for rank, words_there in enumerate(said):
            assert (words in words_there[name]) == (rank in own), (name, rank, words_there[name])
            assert "BatchError" in words_there[name], "no rank goes on alone"
    assert not any(rank["sound-after-all"] for rank in said), "a refusal leaves the engine usable"


def test_axes_of_an_engine_that_only_scores(group) -> None:
    device, world, results = group
    if world != 4:
        pytest.skip("split over four ranks")
    for rank in results:
        assert max(rank["scorer"].values()) <= (TOLERANCE if device == "cpu" else 1e-4), rank["scorer"]


def test_a_failed_call_adds_nothing_to_the_next_one(group) -> None:
    _, world, results = group
    if world != 4:
        pytest.skip("sharded over four ranks")
    for rank in results:
        assert rank["failed"]["cured"] <= 1e-5, rank["failed"]
        assert rank["failed"]["kept"] > 0.01, "what was left shows, so the cure is one"


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint lora"])
def test_axes_of_a_checkpoint_may_change(group, name) -> None:
    device, world, results = group
    if world != 4:
        pytest.skip("saved and loaded by four ranks")
    if name not in results[0]:
        pytest.skip("peft is not installed: pip install 'rlctl-plugin-fsdp[lora]'")
    tolerance = TOLERANCE if device == "cpu" else 1e-4
    for rank in results:
        found = rank[name]
        assert found["fresh_loss"] <= tolerance
        assert found["moved_on"] > 0.01, "the second step is another one than the first"
        assert max(found["loss"], found["grad_norm"], found["weights"]) <= tolerance, found
