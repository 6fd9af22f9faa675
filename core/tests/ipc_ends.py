"""One process of a link through the memory of a GPU. A module of its own: a process that is started anew imports it by name."""

from __future__ import annotations

from typing import Any

import torch
from sync_toys import odd_tensors

from rlctl.runtime.link import CudaIpcLink
from rlctl.runtime.transfer import LinkEnd

RECEIVERS = 2
BUCKET = 64 * 1024
SYNCS, BROKEN = 5, 3
LIMIT_S = 60.0


def end_of_link(rank: int, url: str, barrier: Any, answers: Any) -> None:
    """One process. Answers with what is wrong in each sync, nothing where nothing is."""
    torch.cuda.set_device(0)
    link = CudaIpcLink(LinkEnd(url, rank, 1 + RECEIVERS, "cuda:0", 60.0, BUCKET, f"end {rank}"))
    found: list[str] = []
    for number in range(SYNCS):
        wanted = odd_tensors(number)
        got, tensor = dict[str, torch.Tensor](), None
        barrier.wait(LIMIT_S)
        try:
            if rank == 0:
                link.send(((name, tensor.cuda()) for name, tensor in wanted.items()), number)
                found.append("")
                continue
            for name, tensor in link.receive(number):
                got[name] = tensor.clone()
                if number == BROKEN and rank == 1 and len(got) == 30:
                    raise ValueError("a fault on purpose")
            bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (*got.values(), *wanted.values())]
            same = all(torch.equal(a.cpu(), b) for a, b in zip(bits[: len(got)], bits[len(got) :], strict=True))
            found.append("" if same and list(got) == list(wanted) else "other tensors than were sent")
            del bits
        except Exception as error:
            tensor = None  # it lies in the sender's memory
            link.give_up(f"{type(error).__name__}: {error}")
            found.append(str(error))
        got, tensor = {}, None
    torch.cuda.synchronize()
    barrier.wait(LIMIT_S)
    link.close()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    answers.put((rank, found, torch.cuda.memory_allocated()))
    barrier.wait(LIMIT_S)
