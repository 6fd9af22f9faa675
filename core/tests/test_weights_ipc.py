"""Weights between processes on one GPU, through memory that all of them open. Run on a GPU: `pytest core/tests/test_weights_ipc.py`."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from sync_toys import odd_tensors

from rlctl.runtime import meeting
from rlctl.runtime.link import CudaIpcLink
from rlctl.runtime.transfer import LinkEnd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RECEIVERS = 2
BUCKET = 64 * 1024
SYNCS, BROKEN = 5, 3
LIMIT_S = 120.0


def end_of_link(rank: int, url: str, barrier: Any, answers: Any) -> None:
    """One process. Answers with what is wrong in each sync, nothing where nothing is."""
    torch.cuda.set_device(0)
    link = CudaIpcLink(LinkEnd(url, rank, 1 + RECEIVERS, "cuda:0", 60.0, BUCKET, f"end {rank}"))
    found: list[str] = []
    for number in range(SYNCS):
        wanted = odd_tensors(number)
        barrier.wait(LIMIT_S)
        try:
            if rank == 0:
                link.send(((name, tensor.cuda()) for name, tensor in wanted.items()), number)
                found.append("")
                continue
            got: dict[str, torch.Tensor] = {}
            for name, tensor in link.receive(number):
                got[name] = tensor.clone()
                if number == BROKEN and rank == 1 and len(got) == 30:
                    raise ValueError("a fault on purpose")
            bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (*got.values(), *wanted.values())]
            same = all(torch.equal(a.cpu(), b) for a, b in zip(bits[: len(got)], bits[len(got) :], strict=True))
            found.append("" if same and list(got) == list(wanted) else "other tensors than were sent")
            got.clear()
            del tensor, bits
        except Exception as error:
            got.clear()
            link.give_up(f"{type(error).__name__}: {error}")
            found.append(str(error))
    torch.cuda.synchronize()
    barrier.wait(LIMIT_S)
    link.close()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    answers.put((rank, found, torch.cuda.memory_allocated()))
    barrier.wait(LIMIT_S)


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
