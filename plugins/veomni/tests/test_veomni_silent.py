"""Two and four gloo ranks: one step along every axis is the step of plain transformers, and without its cure each known silent
error is far from it."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

if importlib.util.find_spec("veomni") is None:  # not imported here: it would log all it does
    pytest.skip("veomni is not installed (it has an environment of its own)", allow_module_level=True)

from veomni_silent_ranks import CASES, MISTAKES
from veomni_tiny import CONFIGS, run_ranks, save_model

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
FAR = 100 * TOLERANCE
BOTH = [(world, name) for world, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """What every rank saw: one process group for all cases of a world size."""
    scratch = tmp_path_factory.mktemp("silent")
    for name, config in CONFIGS.items():
        save_model(scratch / name, config)
    save_model(scratch / "qwen3-value", {**CONFIGS["qwen3"], "tie_word_embeddings": False}, value=True)
    found: dict[int, list[dict[str, Any]]] = {}
    for world in CASES:
        run_ranks("veomni_silent_ranks.py", scratch, world=world)
        found[world] = [json.loads((scratch / f"world{world}-rank{rank}.json").read_text()) for rank in range(world)]
    return found


def close(found: dict[str, Any]) -> bool:
    return all(v < TOLERANCE for k, v in found.items() if k != "worst")


@pytest.mark.parametrize(("world", "name"), BOTH)
def test_one_step_of_several_ranks_is_that_of_transformers(seen, world, name) -> None:
    for rank in seen[world]:
        assert close(rank["cases"][name]), rank["cases"][name]


@pytest.mark.parametrize("name", MISTAKES)
def test_without_its_cure_a_silent_error_of_veomni_is_far_off(seen, name) -> None:
    mistake = MISTAKES[name]
    for rank in seen[2]:
        found = rank["mistakes"][name]
        assert found[mistake.figure] > FAR, found
        # Looking at these alone, nobody would have noticed.
        assert all(found[quiet] < TOLERANCE for quiet in mistake.quiet), found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eager experts", "cannot be spread over ranks"),
        ("grouped whole experts", "on a CPU grouped experts"),
        ("bfloat16 on a CPU", "float32 on a CPU"),
        ("tp", "take megatron"),
        ("cp", "take megatron"),
        ("experts beyond the replica", "ep must divide dp_shard x usp"),
        ("experts of a dense model", "experts divide"),
        ("missing weights", "lacks weights"),
        ("another activation", "silu"),
        ("attention within the slice", "each rank would look at its own slice"),
        ("gradients that were never reduced", "no gradients to step with"),
    ],
)
def test_what_would_go_wrong_is_refused_on_every_rank(seen, name, words) -> None:
    said = [rank["refusals"][name] for rank in seen[2]]
    assert words in said[0], said
    # A rank that is told by another one points at that one's words.
    assert all(words in text or "another rank" in text for text in said), said


def test_the_loader_itself_draws_what_is_missing_and_says_nothing(seen) -> None:
    assert all(rank["drawn in silence"] > 0.1 for rank in seen[2])


def test_experts_of_all_ranks_are_exported_one_by_one(seen) -> None:
    for rank in seen[2]:
        found = rank["exports"]
        assert found["experts of full_tensor"] == [2], "of four: a rank's DTensor knows of its own experts alone"
        assert found["names"]
        assert found["equal"]
        assert found["dtype"] == ["torch.float32"]
        assert found["drawn value head"], "of a language model's files: the same on all ranks, and said"


def test_models_with_spread_and_with_whole_experts_live_side_by_side(seen) -> None:
    for rank in seen[2]:
        assert close(rank["side by side"]), rank["side by side"]
        assert rank["side by side, one binding"] in ("IndexError", "AssertionError")


def test_a_failed_call_leaves_no_gradients_to_the_next(seen) -> None:
    for rank in seen[2]:
        assert close(rank["after a failure"]), rank["after a failure"]


@pytest.mark.parametrize("world", CASES)
def test_a_resumed_run_goes_on_bit_for_bit(seen, world) -> None:
    for rank in seen[world]:
        found = rank["checkpoints"]
        assert {found[k] for k in ("weights", "random state", "next step", "loss")} == {0.0}, found
        assert found.get("weights elsewhere", 0.0) == 0.0
        assert found.get("next step elsewhere", 0.0) < 1e-4


@pytest.mark.parametrize("world", CASES)
def test_written_as_they_are_the_experts_of_one_rank_would_be_those_of_all(seen, world) -> None:
    assert max(rank["checkpoints, local experts"]["weights"] for rank in seen[world]) > 0.01


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another world", "another number of ranks"),
        ("another optimizer", "another optimizer"),
        ("another step", "optimizer state is that of another step"),
        ("no numbers", "no complete checkpoint"),
        ("no random state", "random state of this rank"),
        ("a damaged index", "index cannot be read"),
        ("a damaged file", "cannot be read"),
        ("another model", "does not hold all of this model"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_words(seen, name, words) -> None:
    said = [rank["refused checkpoints"][name] for rank in seen[2]]
    assert any(words in text for text in said), said
    assert [rank["refused checkpoints"]["what changed"] for rank in seen[2]] == ["nothing"] * 2
    assert all(words in text or "another rank" in text for text in said), said
