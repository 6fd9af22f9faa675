"""The ``runtime`` section: the processes of a run. Imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from rlctl.config.base import Count, Strict

MAIN_POOL = "main"
"""The pool that exists without being named; roles live there unless they say otherwise."""

_POOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class PoolConfig(Strict):
    """A further pool of processes, for roles that name it."""

    nproc: Count = Field(default=1, description="Processes (ranks) of the pool.")
    python: str | None = Field(
        default=None,
        description="Directory of the virtual environment, or interpreter, in which the pool's processes run; default: this one.",
    )


class RayConfig(Strict):
    """Where Ray is, and how ranks are laid out on its nodes. Used with launcher ray."""

    address: str | None = Field(
        default=None, description="auto, or HOST:PORT of a running cluster; default: a cluster of this run's own."
    )
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="PACK", description="How the ranks of a pool are laid out over nodes."
    )
    cpus_per_rank: PositiveFloat = Field(default=1.0, description="CPUs that Ray sets aside for a rank.")
    placement_timeout_s: PositiveFloat = Field(
        default=120.0, description="Longest wait for resources that the cluster has but does not have free."
    )


class RuntimeConfig(Strict):
    """Processes: how many, started how, and how long they are waited for."""

    launcher: Literal["auto", "inline", "process", "ray"] = Field(
        default="auto",
        description="inline: one rank in this very process. process: one process a rank on this host. ray: Ray actors, on "
        "one node or many. auto: ray where ray.address is set, else inline for one rank and process for more.",
    )
    nproc: Count = Field(default=1, description="Processes (ranks) of the main pool.")
    python: str | None = Field(
        default=None, description="Environment or interpreter of the main pool's processes; default: this one."
    )
    pools: dict[str, PoolConfig] = Field(
        default_factory=dict,
        description="Further pools by name, for roles that shall not share the main pool's processes.",
    )
    ray: RayConfig = Field(default_factory=RayConfig, description="Where Ray is. Used with launcher ray.")
    weight_transport: Literal["auto", "controller", "collective", "host"] = Field(
        default="auto",
        description="How weights go from the training pool to a rollout pool. host: through memory that all ranks see (shared "
        "memory between CPU processes of one host, CUDA IPC on one GPU). collective: from rank to rank in a process "
        "group of their own (NCCL between GPUs, gloo between CPU processes). controller: through the controller, on the "
        "CPU. auto: the first of them that fits. In one pool none is used.",
    )
    weight_bucket_mib: Annotated[int, Field(ge=1, le=16_384)] | None = Field(
        default=None,
        description="MiB of a bucket in which weights travel between pools; each side holds two. Default: 32 from CPU to "
        "CPU over a link, else 256.",
    )
    start_timeout_s: PositiveFloat = Field(default=300.0, description="Longest wait for the first word of every rank.")
    hang_timeout_s: PositiveFloat = Field(
        default=1800.0, description="A run ends when no rank makes any progress for this long."
    )
    collective_timeout_s: PositiveFloat = Field(
        default=1800.0, description="Limit of one collective between ranks, for the collective library itself."
    )
    failure_grace_s: PositiveFloat = Field(
        default=3.0, description="After a first failure, how long the other ranks' last words are waited for."
    )

    @model_validator(mode="after")
    def _pools_fit(self) -> RuntimeConfig:
        if MAIN_POOL in self.pools:
            raise ValueError("the main pool is runtime.nproc itself: take main out of runtime.pools")
        if bad := next((name for name in self.pools if not _POOL_NAME.fullmatch(name)), None):
            raise ValueError(
                f"pools has {bad!r}: a name of letters, digits, _, - and . is wanted, it names a directory of logs"
            )
        if self.launcher == "inline" and (apart := [name for name in self.sizes() if self.python_of(name)]):
            raise ValueError(
                f"launcher inline runs its one rank in this very process, which has one interpreter, and pool {apart[0]} has "
                "another: take python out, or set launcher to process or ray"
            )
        if self.launcher == "inline" and (self.nproc > 1 or self.pools):
            raise ValueError(
                "launcher inline has one rank: set nproc to 1 without pools, or launcher to process or ray"
            )
        if self.launcher in ("inline", "process") and self.ray.address is not None:
            raise ValueError(f"launcher {self.launcher} joins no cluster: take ray.address out, or set launcher to ray")
        return self

    def sizes(self) -> dict[str, int]:
        """Pool name -> number of ranks, the main pool first."""
        return {MAIN_POOL: self.nproc, **{name: pool.nproc for name, pool in self.pools.items()}}

    def python_of(self, pool: str) -> str | None:
        """The interpreter of a pool; None for this one."""
        return self.python if pool == MAIN_POOL else self.pools[pool].python

    def chosen_launcher(self) -> str:
        """``inline``, ``process`` or ``ray``."""
        if self.launcher != "auto":
            return self.launcher
        if self.ray.address is not None:
            return "ray"
        return "inline" if self.nproc == 1 and not self.pools and self.python is None else "process"
