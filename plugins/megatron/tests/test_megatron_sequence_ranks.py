"""Four gloo ranks: vocabularies over tp and sequences over cp give what one process gives, and the known mistakes do not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_sequence_ranks import CASES, MISTAKES, Figures

pytestmark = pytest.mark.slow

TOLERANCE = 1e-6


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> list[dict[str, Figures]]:
    """What every rank found, case by case: one process group for all of them."""
    scratch = tmp_path_factory.mktemp("sequence-ranks")
    here = Path(__file__).parent
    env = {
        **os.environ,
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    children = [
        subprocess.Popen(
            [sys.executable, str(here / "megatron_sequence_ranks.py"), str(scratch)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        outputs = [child.communicate(timeout=300)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [c.returncode for c in children] == [0] * 4, "\n".join(o[-3000:] for o in outputs)
    return [json.loads((scratch / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_equal_one_process(figures, name) -> None:
    for rank, found in enumerate(figures):
        wrong = {figure: off for figure, off in found[name].items() if not off < TOLERANCE}
        assert not wrong, (rank, wrong)


@pytest.mark.parametrize("name", MISTAKES)
def test_known_mistakes_are_far_off(figures, name) -> None:
    _, figure, _ = MISTAKES[name]
    assert max(found[name][figure] for found in figures) > 1000 * TOLERANCE


def test_logits_are_not_overwritten(figures) -> None:
    for found in figures:
        assert found["overwritten"]["ours"] == 0.0
        # Else the line above would prove nothing.
        assert found["overwritten"]["megatron's"] > 0.1
