"""Weights between processes on one GPU, through memory that all of them open. Run on a GPU: `pytest core/tests/test_weights_ipc.py`."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from ipc_ends import BROKEN, LIMIT_S, RECEIVERS, SYNCS, end_of_link

from rlctl.runtime import meeting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_processes_on_one_gpu_get_every_bit_and_a_failure_ends_one_sync_only() -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(1 + RECEIVERS), context.Queue()
    holder, url = meeting.reserve("127.0.0.1")
    ends = [
        context.Process(target=end_of_link, args=(rank, url, barrier, answers), daemon=True)
        for rank in range(1 + RECEIVERS)
    ]
    try:
        for one in ends:
            one.start()
        told = {rank: rest for rank, *rest in (answers.get(timeout=LIMIT_S) for _ in ends)}
        for one in ends:
            one.join(LIMIT_S)
    finally:
        holder.close()
        for one in ends:
            one.kill()
    for rank, (found, kept) in told.items():
        whole = [words for number, words in enumerate(found) if number != BROKEN]
        assert whole == [""] * (SYNCS - 1), (rank, found)
        assert "a fault on purpose" in found[BROKEN], (rank, found)
        assert kept == 0, (rank, kept)
