"""Faults of one rank in a group of two real engines, as a table, and what each must end in, whatever the transport is.

``run_case(case, make_transport, scratch)`` starts a group over ``make_transport(env)``, runs the calls of one training
step, and checks how it ends. It returns the error for further checks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.config.schema import ModelConfig, OptimConfig
from rlctl.errors import EngineError, RlctlError
from rlctl.generation import GenerateRequest, SamplingParams
from rlctl.microbatch import MicroBatchPlan
from rlctl.runtime.failures import WorkerError
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.records import Boot, BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.runtime.transports.base import Transport
from rlctl.runtime.worker import Worker
from rlctl.testing.faults import Fault, FaultKind

MakeTransport = Callable[[Mapping[str, str]], Transport]

ENDS_WITHIN_S = 30.0
HANG_S = 8.0
MODEL = {
    **{name: f.get_default() for name, f in ModelConfig.model_fields.items()},
    "config": {
        "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
    },
    "dtype": "float32",
    "seed": 0,
}  # fmt: skip
LIGHT_MODULE = """
from rlctl.hookspecs import hookimpl


@hookimpl
def rlctl_engine_wrappers(backend, role):
    return [("fault", "rlctl.testing.faults:FaultyEngine")]
"""


@dataclass(frozen=True)
class Case:
    """A fault, and the words that its message must have.

    Args:
        fault: where and what.
        call: ``train`` or ``generate``.
        says: in the message, as given.
        error: its class.
        hangs: it ends by the limit for hangs.
    """

    fault: Fault
    says: tuple[str, ...]
    call: str = "train"
    error: type[RlctlError] = WorkerError
    hangs: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)


def _kill(says: tuple[str, ...] = (), call: str = "train", **where: Any) -> Case:
    return Case(
        Fault(FaultKind.KILL, 1, **where), ("rank 1 (dp_shard 1) of pool main died", "killed by SIGKILL", *says), call
    )


CASES: dict[str, Case] = {
    "killed in generation": _kill(("died during generation", "prompts 2"), "generate", phase="generation"),
    "killed in forward": _kill(("died during forward (micro-batch 2 of 3:",), phase="forward", occurrence=3),
    "killed in backward": _kill(
        ("died during backward (micro-batch 1 of 3: 1 row,", "mini-batch of this rank: 3 rows,"), phase="backward"
    ),
    "killed in a collective": _kill(("died during reduce", "3 rows,"), hook="rlctl_reduce", occurrence=2),
    "killed in the optimizer step": _kill(("died during optimizer step",), hook="rlctl_optimizer_step"),
    "hangs in backward": Case(
        Fault(FaultKind.HANG, 1, phase="backward", occurrence=2),
        (
            "rank 1 (dp_shard 1) of pool main hangs during backward: no progress for 8 s; rank 0 ",
            "the call: train_batch of actor with 6 rows",
            "rank 0 (dp_shard 0), dp rank 0 of 2: ",
            "rank 1 (dp_shard 1), dp rank 1 of 2: backward (micro-batch 2 of 3: 1 row, ",
            "mini-batch of this rank: 3 rows, ",
            "stack of rank 1 (dp_shard 1):",
            "in strike",
            "runtime.hang_timeout_s sets the limit",
        ),
        hangs=True,
    ),
    "out of memory in backward": Case(
        Fault(FaultKind.OUT_OF_MEMORY, 1, phase="backward", occurrence=3),
        (
            "out of memory during backward",
            "Tried to allocate 2.00 GiB",
            "raised on rank 1 (dp_shard 1) of pool main during backward (micro-batch 3 of 3:",
            "lower actor.max_tokens_per_device",
        ),
        error=EngineError,
    ),
}


def boots(count: int = 2, device: str = "cpu") -> list[Boot]:
    """One pool on one host."""
    vendor = "nvidia" if device == "cuda" else None
    return [
        Boot(
            rank=i,
            world_size=count,
            local_rank=i,
            local_world_size=count,
            num_threads=1,
            device=device,
            vendor=vendor,
        )
        for i in range(count)
    ]


def batch(rows: int = 6) -> PackedBatch:
    """Rows of 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 60, (rows, 6), generator=generator)
    return pack({"input_ids": list(ids), "loss_mask": [[False] + [True] * 5] * rows})


def fault_site(root: Path) -> Path:
    """A directory with a distribution whose plugin names the faulty wrapper, for ``PYTHONPATH``."""
    site = root / "site"
    info = site / "rlctl_test_faults-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlctl-test-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.plugins]\ntest-faults = rlctl_test_faults\n")
    (site / "rlctl_test_faults.py").write_text(LIGHT_MODULE)
    return site


def fault_env(site: Path, fault: Fault | None = None) -> dict[str, str]:
    """The environment of ranks that see ``site``."""
    path = os.pathsep.join([str(site), *(p for p in sys.path if p)])
    return {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **({} if fault is None else fault.to_env())}


def build_actor(group: WorkerGroup) -> RemoteEngine:
    """The training engine over all ranks."""
    from rlctl_fsdp.config import FSDPConfig

    optimizer = OptimConfig(lr=1e-2).model_dump()
    axes = {"dp_shard": group.world_size}
    return RemoteEngine.build(
        group, BuildSpec("actor", "train", "fsdp2", MODEL, FSDPConfig().model_dump(), axes, optimizer)
    )


def build_rollout(group: WorkerGroup) -> RemoteEngine:
    """The rollout engine, one replica a rank."""
    from rlctl_fsdp.rollout_config import HFRolloutConfig

    axes = {"dp_replicate": group.world_size}
    return RemoteEngine.build(group, BuildSpec("rollout", "rollout", "hf", MODEL, HFRolloutConfig().model_dump(), axes))


def run_case(case: Case, make_transport: MakeTransport, scratch: Path, device: str = "cpu") -> RlctlError:
    """Start, run into the fault, check the end; see the module."""
    limits = Limits(start_s=120.0, hang_s=HANG_S if case.hangs else 120.0, grace_s=3.0, close_s=10.0)
    transport = make_transport(fault_env(fault_site(scratch), case.fault))
    group = WorkerGroup("main", transport, boots(device=device), Worker, limits)
    group.start()
    pids = [hello.pid for hello in group.hellos]
    try:
        engine = build_actor(group)
        if case.call == "generate":
            rollout = build_rollout(group)
            engine.sync_to(rollout, 1, share=False, verify=True, dtype=None)
        begun = time.monotonic()
        with pytest.raises(case.error) as caught:
            if case.call == "generate":
                rollout.generate(GenerateRequest([[3, 4, 5], [6, 7], [8], [9]], SamplingParams(max_tokens=8, seed=1)))
            else:
                engine.train_batch(batch(), CrossEntropyLoss(), MicroBatchPlan(max_rows=1))
        took = time.monotonic() - begun
    finally:
        group.close()
    message = str(caught.value)
    missing = [words for words in case.says if words not in message]
    assert not missing, f"{missing} not in:\n{message}"
    assert took < ENDS_WITHIN_S, message
    assert group.closed
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    return caught.value
