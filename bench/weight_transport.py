"""Weights from a training process to a rollout process: GB/s over the link between pools, beside plain copies.

    python bench/weight_transport.py                              # two CPU processes over gloo
    python bench/weight_transport.py --link host                  # in shared memory
    python bench/weight_transport.py --device cuda --mib 4096     # two GPUs over NCCL
    python bench/weight_transport.py --device cuda --link host    # two processes on one GPU, by CUDA IPC
    python bench/weight_transport.py --shape tiny                 # the whole sync too: export, link, load, fingerprints
    python bench/weight_transport.py --device cuda --shape 0.6b

``transport`` is packing, carrying and unpacking of bfloat16 tensors into a receiver's own, in buckets; ``broadcast`` the
collective alone, on one bucket (there is none in shared memory); ``plain_copy`` a copy of the same tensors within one process (on
the same GPU), ``peer_copy`` one from one GPU to the other. ``sync`` is a sync of two pools as a run makes it, fsdp2 to hf, with random
weights, with and without fingerprints; ``in_process`` one within a pool. Rates are the median over the rounds after the first, in 10**9
bytes a second. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_step import MODELS

from rlctl import device as devices
from rlctl.config.schema import ModelConfig
from rlctl.runtime import meeting
from rlctl.runtime.carriage import MIB, Transfer, bucket_mib
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.link import CudaIpcLink, PackedLink, SharedMemoryLink
from rlctl.runtime.records import Boot, BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.transfer import LinkEnd
from rlctl.runtime.transports.process import ProcessTransport
from rlctl.runtime.worker import Worker

TIMEOUT_S = 60.0
DTYPE = torch.bfloat16
LINKS = {
    ("collective", "cpu"): PackedLink,
    ("collective", "cuda"): PackedLink,
    ("host", "cpu"): SharedMemoryLink,
    ("host", "cuda"): CudaIpcLink,
}


def shapes(total: int) -> Iterator[tuple[int, ...]]:
    """Shapes like those of decoder layers, of ``total`` bytes together."""
    layer = ((2048, 1024), (1024,), (1024, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (1024,))
    while True:
        for shape in layer:
            size = torch.Size(shape).numel() * DTYPE.itemsize
            if total <= size:
                yield (total // DTYPE.itemsize,)
                return
            total -= size
            yield shape


def make(total: int, device: str, *, filled: bool) -> dict[str, torch.Tensor]:
    """Named tensors of ``total`` bytes."""
    fill: Callable[..., torch.Tensor] = torch.randn if filled else torch.zeros
    return {f"w{i}": fill(shape, dtype=DTYPE, device=device) for i, shape in enumerate(shapes(total))}


def end_of_link(rank: int, url: str, args: argparse.Namespace, barrier: Any, answers: Any) -> None:
    """One of the two processes. Answers with (start or end, peak) of each round, and a checksum."""
    torch.set_num_threads(1)
    place = 0 if args.link == "host" else rank  # of one GPU, or a GPU each
    device = "cpu" if args.device == "cpu" else f"{args.device}:{place}"
    devices.set_device(args.device, place)
    tensors = make(args.mib * MIB, device, filled=rank == 0)
    link = LINKS[args.link, args.device](
        LinkEnd(url, rank, 2, device, TIMEOUT_S, args.bucket_mib * MIB, f"process {rank}")
    )
    times: list[float] = []
    for number in range(args.rounds + 1):
        devices.synchronize(device)
        barrier.wait(TIMEOUT_S)
        if rank == 0:
            times.append(time.monotonic())
            link.send(iter(tensors.items()), number)
        else:
            for name, tensor in link.receive(number):
                tensors[name].copy_(tensor)
            devices.synchronize(device)
            times.append(time.monotonic())
    checksum = sum(t.double().sum().item() for t in tensors.values())
    answer: dict[str, Any] = {"times": times, "peak_bytes": link.peak_bytes, "checksum": checksum}
    alone = broadcast_rate(link, device, args) if args.link == "collective" else None
    if rank == 0:
        if alone is not None:
            answer["broadcast"] = alone
        answer["plain_copy"] = copy_rate(tensors, device, args.rounds)
        if args.device != "cpu" and args.link == "collective":
            answer["peer_copy"] = copy_rate(tensors, f"{args.device}:1", args.rounds)
    answers.put((rank, answer))
    barrier.wait(TIMEOUT_S)  # the other may still be in the last round
    link.close()


def broadcast_rate(link: PackedLink, device: str, args: argparse.Namespace) -> float:
    """GB/s of the collective, on bytes that lie ready."""
    data = torch.zeros(min(args.bucket_mib, args.mib) * MIB, dtype=torch.uint8, device=device)
    seconds: list[float] = []
    for _ in range(2 * args.rounds + 1):
        devices.synchronize(device)
        start = time.perf_counter()
        link.carrier.wait(link.carrier.broadcast("alone", data))
        devices.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return round(data.numel() / statistics.median(seconds[1:]) / 1e9, 2)


def copy_rate(tensors: dict[str, torch.Tensor], device: str, rounds: int) -> float:
    """GB/s of copying each tensor into one that is there already."""
    mine = next(iter(tensors.values())).device
    targets = {name: torch.zeros_like(tensor, device=device) for name, tensor in tensors.items()}
    seconds: list[float] = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
        for used in {str(mine), device}:
            devices.synchronize(used)
        seconds.append(time.perf_counter() - start)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    return round(total / statistics.median(seconds[1:]) / 1e9, 2)


def measure_link(args: argparse.Namespace) -> dict[str, Any]:
    """Two processes and nothing else."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    holder, url = meeting.reserve("127.0.0.1")
    ends = [context.Process(target=end_of_link, args=(r, url, args, barrier, answers), daemon=True) for r in range(2)]
    try:
        for one in ends:
            one.start()
        found: dict[int, dict[str, Any]] = {}
        while len(found) < 2:
            try:
                rank, answer = answers.get(timeout=1.0)
                found[rank] = answer
            except queue.Empty:
                if any(one.exitcode for one in ends):
                    raise SystemExit("a process of the link failed, see above") from None
        for one in ends:
            one.join(TIMEOUT_S)
    finally:
        holder.close()
        for one in ends:
            one.kill()
    assert found[0]["checksum"] == found[1]["checksum"], "what was sent is what arrived"
    seconds = [end - start for start, end in zip(found[0]["times"], found[1]["times"], strict=True)]
    total = args.mib * MIB
    return {
        "transport": round(total / statistics.median(seconds[1:]) / 1e9, 2),
        **{name: found[0][name] for name in ("broadcast", "plain_copy", "peer_copy") if name in found[0]},
        "first_round_s": round(seconds[0], 3),
        "peak_mib": round(max(f["peak_bytes"] for f in found.values()) / MIB, 1),
    }


def measure_sync(args: argparse.Namespace, *, pools: int) -> dict[str, Any]:
    """From fsdp2 to hf, one rank each, as a run has them: in two pools, or in one."""
    place = {"path": args.model} if args.model else {"config": MODELS[args.shape], "init": "random"}
    model = {**ModelConfig.model_construct(**place, dtype="float32").model_dump(), "seed": 0}
    with tempfile.TemporaryDirectory(prefix="rlctl_bench_") as folder, ThreadPoolExecutor(2) as threads:
        specs = (
            BuildSpec("actor", "train", "fsdp2", model, {}, {"dp_shard": 1}),
            BuildSpec("rollout", "rollout", "hf", model, {"dtype": args.dtype}, {"dp_replicate": 1}),
        )
        one_gpu = args.link == "host"
        names = ("main", "gen")[:pools]
        groups = [new_pool(name, 0 if one_gpu else at, args.device, Path(folder)) for at, name in enumerate(names)]
        try:
            list(threads.map(WorkerGroup.start, groups))
            if pools == 2:
                actor, rollout = threads.map(RemoteEngine.build, groups, specs)
            else:
                actor, rollout = (RemoteEngine.build(groups[0], spec) for spec in specs)
            found: dict[str, Any] = {}
            version = 0
            for name, verify in (("fingerprinted", True), ("unchecked", False)):
                reports = []
                for _ in range(args.rounds + 1):
                    version += 1
                    transfer = Transfer(args.transport or args.link, args.bucket_mib)
                    reports.append(
                        actor.sync_to(rollout, version, share=False, verify=verify, dtype=args.dtype, transfer=transfer)
                    )
                last = reports[-1]
                found |= {"how": last.how, "mib": round(last.num_bytes / MIB, 1), "tensors": last.num_tensors}
                found["peak_mib"] = round(last.peak_bytes / MIB, 1)
                found[name] = round(statistics.median(r.gb_per_s for r in reports[1:]), 2)
                found[f"{name}_s"] = round(statistics.median(r.seconds for r in reports[1:]), 4)
            return found
        finally:
            for group in groups:
                group.close()


def new_pool(name: str, at: int, device: str, folder: Path) -> WorkerGroup:
    """A pool of one rank, on the ``at``-th device."""
    vendor = devices.detect_device(device).vendor
    boot = Boot(name, 0, 1, at, 1, device, vendor, num_threads=1, collective_timeout_s=TIMEOUT_S)
    limits = Limits(start_s=120.0, hang_s=300.0)  # a large model takes its time to build
    return WorkerGroup(name, ProcessTransport(folder / name), [boot], Worker, limits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mib", type=int, default=256, help="MiB of weights for the link alone")
    parser.add_argument("--bucket-mib", type=int, help="default: as in a run")
    parser.add_argument("--rounds", type=int, default=3, help="beside the first")
    parser.add_argument("--shape", choices=sorted(MODELS), help="also a sync of two pools with this model")
    parser.add_argument("--model", help="directory of a model to take instead of a shape")
    parser.add_argument("--dtype", default="bfloat16", help="of the copy in a sync")
    parser.add_argument("--link", choices=("collective", "host"), default="collective")
    parser.add_argument("--transport", choices=("controller", "auto"), help="of the sync, instead of --link")
    args = parser.parse_args()
    args.bucket_mib = args.bucket_mib or bucket_mib(args.device)
    wanted = {"cpu": 0, "cuda": 1 if args.link == "host" else 2}[args.device]
    if wanted and (seen := devices.device_count(args.device)) < wanted:
        print(f"{wanted} {args.device} devices are needed, {seen} found: --device cpu", file=sys.stderr)
        return 1
    name = devices.device_name(args.device)
    found: dict[str, Any] = {"device": name, "mib": args.mib, "bucket_mib": args.bucket_mib, "torch": torch.__version__}
    words = {"collective": ("gloo", "nccl"), "host": ("shared_memory", "cuda_ipc")}[args.link]
    found |= {"link": words[args.device != "cpu"], **measure_link(args)}
    if args.shape is not None or args.model is not None:
        which = {"shape": args.shape} if args.model is None else {"model": Path(args.model).name}
        found["sync"] = {**which, **measure_sync(args, pools=2)}
        found["in_process"] = {**which, **measure_sync(args, pools=1)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
