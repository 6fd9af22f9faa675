"""A plan as one JSON object; ``docs/plan.md`` documents its keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlctl.plan.backends import Choice
from rlctl.plan.budget import PoolMemory
from rlctl.plan.layout import RANK_AXES, RoleLayout, groups, members, places
from rlctl.plan.memory import GIB, Moment
from rlctl.plan.planner import Plan
from rlctl.records import Axis


def plan_to_json(plan: Plan, device_memory_gib: float | None, *, ranks: bool = True) -> dict[str, Any]:
    """The whole plan.

    Args:
        ranks: write out every rank and the members of every group.
    """
    request, size = plan.request, plan.size
    verdict, words = plan.memory.verdict(device_memory_gib)
    return {
        "source": request.source,
        "trainer": request.config.trainer.type,
        "device": request.device,
        "vendor": request.vendor,
        "device_from": request.device_words,
        "device_memory_gib": device_memory_gib,
        "refused": [asdict(refusal) for refusal in plan.refusals],
        "notes": list(plan.notes),
        "model": {
            "found": plan.source.words or None,
            "missing": plan.source.missing or None,
            "model_type": None if plan.source.config is None else plan.source.config.get("model_type"),
            "parameters": size.total,
            "parameters_from": size.how or None,
            "dtype": request.config.model.dtype,
        },
        "roles": [_role(layout, ranks) for layout in plan.layouts],
        "batch": [asdict(line) for line in plan.batch],
        "memory": {
            "known": bool(plan.memory.pools),
            "missing": plan.memory.missing or None,
            "checked": plan.memory.checked,
            "notes": list(plan.memory.notes),
            "peak_bytes": plan.memory.peak_bytes or None,
            "peak_gib": round(plan.memory.peak_bytes / GIB, 3) or None,
            "verdict": verdict,
            "verdict_words": words,
            "checkpointing": _checkpointing(plan.memory.checkpointing),
            "pools": [_pool(pool) for pool in plan.memory.pools],
        },
        "backends": [_choice(choice) for choice in (*plan.train_backends, *plan.rollout_backends)],
    }


def _role(layout: RoleLayout, ranks: bool) -> dict[str, Any]:
    topology = layout.topology
    out: dict[str, Any] = {
        "role": layout.role,
        "kind": str(layout.kind),
        "backend": layout.backend,
        "pool": layout.pool,
        "python": layout.python,
        "world_size": layout.world_size,
        "fits": topology is not None and not layout.problems,
        "axes": None if topology is None else {a.value: int(getattr(topology, a.value)) for a in Axis},
        "dp_size": None if topology is None else topology.dp_size,
        "nearest": list(layout.nearest),
        "rank_order": list(RANK_AXES),
        "groups": [],
        "ranks": [],
    }
    if topology is None:
        return out
    for group in groups(topology, layout.kind):
        found = {"axis": group.axis, "size": group.size, "count": group.count, "words": group.words}
        out["groups"].append(
            {**found, "members": [list(m) for m in members(group, topology.world_size)] if ranks else None}
        )
    if ranks:
        out["ranks"] = [
            {
                "rank": p.rank,
                "coordinates": list(p.coordinates),
                "dp_rank": p.dp_rank,
                "is_collector": p.is_collector,
            }
            for p in places(topology)
        ]
    return out


def _pool(pool: PoolMemory) -> dict[str, Any]:
    return {
        "pool": pool.pool,
        "roles": list(pool.roles),
        "peak_phase": pool.peak.name,
        "peak_bytes": pool.peak.num_bytes,
        "phases": [_phase(phase) for phase in pool.phases],
    }


def _phase(phase: Moment) -> dict[str, Any]:
    items = [{"name": i.name, "role": i.role, "bytes": i.num_bytes, "formula": i.formula} for i in phase.items]
    return {"phase": phase.name, "bytes": phase.num_bytes, "items": items}


def _checkpointing(found: tuple[int, int, int, int] | None) -> dict[str, int] | None:
    if found is None:
        return None
    names = ("activations_without_bytes", "activations_with_bytes", "peak_without_bytes", "peak_with_bytes")
    return dict(zip(names, found, strict=True))


def _choice(choice: Choice) -> dict[str, Any]:
    return {**asdict(choice), "kind": str(choice.kind), "reasons": list(choice.reasons)}
