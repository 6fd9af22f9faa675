"""Checks of roles against pools of processes: that each lives somewhere, nothing runs in vain, and interpreters agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.config.schema_runtime import MAIN_POOL

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig


def pool_faults(config: RunConfig, roles: tuple[str, ...]) -> list[str]:
    """What is wrong with the pools of ``config``, one line each.

    Args:
        roles: names of the sections that name a pool.
    """
    faults: list[str] = []
    runtime, sizes = config.runtime, config.runtime.sizes()
    pools = {role: config.pool_of(role) for role in roles if getattr(config, role) is not None}
    for role in pools:
        own = getattr(config, role).pool
        if own and own not in sizes:
            faults.append(
                f"{role}.pool is {own!r}, and the pools are {', '.join(sizes)}; "
                f"runtime.pools={{{own}: {{nproc: 1}}}} makes it"
            )
    if idle := ", ".join(name for name in runtime.pools if name not in pools.values()):
        faults.append(
            f"runtime.pools has {idle}, where no role lives: set actor.pool, rollout.pool, ref.pool, critic.pool or teacher.pool to it"
        )
    if runtime.nproc > 1 and MAIN_POOL not in pools.values():
        faults.append(f"runtime.nproc is {runtime.nproc}, and no role lives in that pool, {MAIN_POOL}: take it out")
    for role, pool in pools.items():
        wanted = getattr(config, role).python
        if wanted is None or pool not in sizes or (found := runtime.python_of(pool)) == wanted:
            continue
        faults.append(
            f"{role}.python is {wanted}, and the processes of its pool, {pool}, run in {found or 'this interpreter'}: "
            f"{role}.pool={role} gives it a pool of its own"
        )
    return faults
