"""Interpreters of roles and pools, before validation.

The one place of an interpreter is the pool: ``runtime.pools.NAME.python``, ``runtime.python`` for the main pool. A role's own
``python`` is short for it. A role that names no pool gets one of its own, under its own name; one that names a pool gives
that pool its interpreter.
"""

from __future__ import annotations

from math import prod

from rlctl.config.document import Document, Loc, Origin
from rlctl.config.schema_runtime import MAIN_POOL

ROLES = ("actor", "ref", "critic", "teacher", "rollout")
_TO_THE_ACTOR = ("ref", "critic", "teacher")
"""Roles that live in the actor's pool where they name none."""
_DENSE = ("tp", "pp", "cp", "usp", "dp_replicate", "dp_shard")
_SPARSE = ("pp", "ep", "etp")


def derived_from(role: str) -> Origin:
    """The origin of what a role's ``python`` stands for."""
    return Origin("derived", f"from {role}.python")


def is_derived(origin: str) -> bool:
    """True for the text of such an origin."""
    return origin.startswith("from ") and origin.endswith(".python")


def place_roles(document: Document) -> None:
    """Write down, for each role with a ``python``, its pool and that pool's interpreter. What does not fit together is left as it
    is: the schema compares each role with its pool."""
    for role in ROLES:
        python = document.get((role, "python"))
        pool = document.get((role, "pool")) or role
        # A main pool that is written down, perhaps by a run before this one, has other roles: they are not moved.
        known = isinstance(python, str) and isinstance(pool, str) and pool != MAIN_POOL
        if known and isinstance(document.get(("runtime", "pools"), {}), dict):
            _place(document, role, pool, python)


def _place(document: Document, role: str, pool: str, python: str) -> None:
    origin = derived_from(role)
    section: Loc = ("runtime", "pools", pool)
    if not document.get((role, "pool")):
        document.set((role, "pool"), pool, origin)
    if not document.has(section):
        if pool != role:
            return  # a pool that is not there: the schema says how to make one
        document.set(section, {}, origin)
    if isinstance(document.get(section), dict):
        if not document.has((*section, "nproc")):
            document.set((*section, "nproc"), _ranks(document, role), origin)
        if document.get((*section, "python")) is None:
            document.set((*section, "python"), python, origin)


def _ranks(document: Document, role: str) -> int:
    """How many ranks a pool gets that nobody sized: the actor's are those of the run, others as many as their axes take."""
    if role == "actor":
        nproc = document.get(("runtime", "nproc"), 1)
        return nproc if isinstance(nproc, int) else 1
    follows = role in _TO_THE_ACTOR and not document.get((role, "backend"))

    def size(axis: str) -> int:
        found = document.get((role, "parallel", axis))
        if found is None and follows and not axis.startswith("dp_"):
            found = document.get(("actor", "parallel", axis))
        return found if isinstance(found, int) and found > 0 else 1

    return max(prod(map(size, _DENSE)), prod(map(size, _SPARSE)))


def pool_of(document: Document, role: str) -> str | None:
    """The pool where a role lives; None where what stands there is no name."""
    pool = document.get((role, "pool"))
    if role in _TO_THE_ACTOR and not pool:
        pool = document.get(("actor", "pool"))
    pool = pool or MAIN_POOL
    return pool if isinstance(pool, str) else None


def python_loc(pool: str) -> Loc:
    """Where a pool's interpreter stands."""
    return ("runtime", "python") if pool == MAIN_POOL else ("runtime", "pools", pool, "python")


def python_of(document: Document, role: str) -> tuple[str, Loc] | None:
    """(interpreter of a role, the place where it was written); None where it is this one."""
    pool = pool_of(document, role)
    for loc in ((role, "python"), *(() if pool is None else (python_loc(pool),))):
        python = document.get(loc)
        if isinstance(python, str):
            return python, loc
    return None
