"""Two gloo ranks of which one alone has a fault: both stop in words, at once, and go on together afterwards."""

from __future__ import annotations

import json
from typing import Any

import pytest
from megatron_agreement_ranks import LIMIT_S, ROWS, STARTS, STATES
from megatron_tiny import CONFIGS, run_ranks, save_model

pytestmark = pytest.mark.slow

OTHER_ROWS = "different ones"
OTHER_COUNTS = "different numbers of micro-batches"
ROWS_OF_ANOTHER = "another rank refused its rows"


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, Any]]:
    """What both ranks saw: one process group for all faults, so that each leaves it in order for the next."""
    scratch = tmp_path_factory.mktemp("agreement")
    for name in ("llama", "qwen3-moe"):
        save_model(scratch / name, CONFIGS[name])
    run_ranks("megatron_agreement_ranks.py", scratch)
    return [json.loads((scratch / f"rank{rank}.json").read_text()) for rank in range(2)]


def _both_stop(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["kind"] == "RlctlError", rank
        assert rank["seconds"] < LIMIT_S / 4, rank


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_one_rank_alone_has_are_refused_by_both(seen, name) -> None:
    found = [rank["rows"][name] for rank in seen]
    _both_stop(found)
    faulty = ROWS[name].faulty
    own, others = {
        "a bad": ("outside the model's vocabulary", ROWS_OF_ANOTHER),
        "other": (OTHER_ROWS, OTHER_ROWS),
        "a micro-batch": (OTHER_COUNTS, OTHER_COUNTS) if "dp2" in name or "ep2" in name else (OTHER_ROWS, OTHER_ROWS),
    }[next(k for k in ("a micro-batch", "a bad", "other") if name.startswith(k))]
    assert own in found[faulty]["words"]
    # Rows that differ are seen by the ranks that share them; the bad token is told first.
    assert any(words in found[1 - faulty]["words"] for words in (others, OTHER_ROWS)), found
    for rank in found:
        assert rank["after"] == rank["untouched"]


@pytest.mark.parametrize("name", STATES)
def test_a_checkpoint_that_one_rank_cannot_read_is_refused_by_both(seen, name) -> None:
    found = [rank["states"][name] for rank in seen]
    _both_stop(found)
    faulty = STATES[name][0]
    assert "another rank could not read its part" in found[1 - faulty]["words"]
    assert "another rank" not in found[faulty]["words"]
    assert all(rank["same"] for rank in found), "a refused checkpoint changes no weight"


@pytest.mark.parametrize("name", STARTS)
def test_weights_that_one_rank_cannot_load_stop_both(seen, name) -> None:
    found = [rank["starts"][name] for rank in seen]
    _both_stop(found)
    faulty = STARTS[name].faulty
    words = {
        "no config": "build its part of the model",
        "a full memory where it is drawn": "rank 0 could not build the model",
    }.get(name, "another rank could not load its weights")
    assert words in found[1 - faulty]["words"], found
    assert "another rank" not in found[faulty]["words"], found
