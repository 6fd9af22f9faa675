"""A plan for people: tables of ranks, batches, memory and backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rlctl.interpreters.program import short
from rlctl.plan.layout import RANK_AXES, Groups, RoleLayout, groups, members, places
from rlctl.plan.memory import GIB, Moment

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.plan.backends import Choice
    from rlctl.plan.budget import MemoryPlan
    from rlctl.plan.planner import Plan

_VERDICT_STYLE = {"fits": "green", "tight": "yellow", "too_large": "red", "unknown": "dim"}
_STATE = {
    "installed": "installed",
    "broken": "installed, not usable",
    "released": "not installed",
    "planned": "not released",
    "not_built": "no plugin",
}


def print_plan(plan: Plan, device_memory_gib: float | None, out: Console, *, ranks: bool) -> None:
    """Everything, in the order of the questions that a reader has."""
    _head(plan, out)
    _refused(plan, out)
    _ranks(plan.layouts, out, whole=ranks)
    _batch(plan, out)
    _memory(plan.memory, device_memory_gib, out)
    _backends("Training backends, best first", plan.train_backends, out)
    if plan.rollout_backends:
        _backends("Rollout backends, best first", plan.rollout_backends, out)


def gib(num_bytes: int) -> str:
    """``12.34 GiB``, below one of them MiB."""
    if num_bytes == 0:
        return "0"
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="dim", show_edge=False)


def _title(text: str, out: Console) -> None:
    out.print()
    out.print(Text(text, style="bold"))


def _head(plan: Plan, out: Console) -> None:
    request, size = plan.request, plan.size
    ranks = sum({layout.pool: layout.world_size for layout in plan.layouts}.values())
    what = f"{ranks:,} {'rank' if ranks == 1 else 'ranks'} on {request.device}"
    out.print(Text(f"{request.source}: {request.config.trainer.type}, {what} ({request.device_words})"))
    if size.total is not None:
        model = plan.source.config.get("model_type") if plan.source.config else "model"
        out.print(
            Text(
                f"model: {model}, {size.total:,} parameters ({size.how}), master weights in {request.config.model.dtype}"
            )
        )
    for note in plan.notes:
        out.print(Text(f"note: {note}", style="yellow"))


def _refused(plan: Plan, out: Console) -> None:
    if not plan.refusals:
        return
    _title("Refused before launch", out)
    for refusal in plan.refusals:
        out.print(Text(f"  {refusal.what}", style="red"))
        if refusal.nearest:
            out.print(Text(f"    nearest that fits: {'; or '.join(refusal.nearest)}"))


# ---- ranks ------------------------------------------------------------------------------------------------------------
def _ranks(layouts: Sequence[RoleLayout], out: Console, *, whole: bool) -> None:
    _title("Ranks", out)
    table = _table("role", "backend", "pool", "ranks", "axes", "dp", "groups")
    for layout in layouts:
        if layout.topology is None:
            row = (layout.role, layout.backend, _pool(layout), f"{layout.world_size:,}", "do not fit", "", "")
            table.add_row(*map(Text, row))
            continue
        topology = layout.topology
        axes = ", ".join(f"{a}={str(bool(n)).lower() if a == 'sp' else n}" for a, n in topology.axes().items())
        found = groups(topology, layout.kind)
        if twin := _twin(layout, layouts):
            found = []
        first = [_group_words(g, topology.world_size) for g in found] or [f"as {twin.role}" if twin else "-"]
        row = (
            layout.role,
            layout.backend,
            _pool(layout),
            f"{layout.world_size:,}",
            axes or "one rank",
            f"{layout.dp_size:,}",
        )
        table.add_row(*map(Text, row), Text(first[0]))
        for words in first[1:]:
            table.add_row(*[""] * 6, Text(words))
    out.print(table)
    if whole:
        for layout in layouts:
            if layout.topology is not None and _twin(layout, layouts) is None:
                _every_rank(layout, out)
    elif any(layout.world_size > 1 for layout in layouts):
        out.print(Text("every rank and group: --ranks, or --json", style="dim"))


def _pool(layout: RoleLayout) -> str:
    """``main``, or ``rollout (.venvs/vllm)``."""
    return layout.pool + (f" ({short(layout.python)})" if layout.python else "")


def _twin(layout: RoleLayout, layouts: Sequence[RoleLayout]) -> RoleLayout | None:
    """An earlier role with the same ranks."""
    for other in layouts[: list(layouts).index(layout)]:
        if (other.topology, other.kind, other.pool) == (layout.topology, layout.kind, layout.pool):
            return other
    return None


def _group_words(group: Groups, world_size: int) -> str:
    shown = [span(ranks) for ranks in islice(members(group, world_size), 2)]
    more = ", ..." if group.count > 2 else ""
    return f"{group.axis}: {group.count:,} x {group.size:,} ({'; '.join(shown)}{more}): {group.words}"


def span(ranks: Sequence[int]) -> str:
    """``0-3``, ``0, 2, 4, 6``, or ``0, 8, ..., 120`` for many."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]:,}-{ranks[-1]:,}"
    if len(ranks) <= 4:
        return ", ".join(f"{r:,}" for r in ranks)
    return f"{ranks[0]:,}, {ranks[1]:,}, ..., {ranks[-1]:,}"


def _every_rank(layout: RoleLayout, out: Console) -> None:
    topology = layout.topology
    assert topology is not None, "only fitting layouts are written out"
    _title(f"Every rank of {layout.role}", out)
    axes = [a for a in RANK_AXES if int(getattr(topology, a)) > 1]
    table = _table("rank", *axes, "dp rank", "gives the output")
    for place in places(topology):
        at = [str(n) for a, n in zip(RANK_AXES, place.coordinates, strict=True) if a in axes]
        table.add_row(str(place.rank), *at, str(place.dp_rank), "yes" if place.is_collector else "")
    out.print(table)
    for group in groups(topology, layout.kind):
        out.print(
            Text(
                f"{group.axis}: "
                + " | ".join(" ".join(map(str, ranks)) for ranks in members(group, topology.world_size))
            )
        )


# ---- batch ------------------------------------------------------------------------------------------------------------
def _batch(plan: Plan, out: Console) -> None:
    _title("Batch", out)
    table = _table("", "", "how")
    table.columns[0].justify = "right"
    for line in plan.batch:
        value = "unknown" if line.value is None else f"{line.value:,}"
        table.add_row(Text(value, style="bold"), Text(line.unit), Text(line.how))
        if line.note:
            table.add_row("", "", Text(line.note, style="yellow"))
    out.print(table)


# ---- memory -----------------------------------------------------------------------------------------------------------
def _memory(memory: MemoryPlan, device_memory_gib: float | None, out: Console) -> None:
    _title("Memory of one rank", out)
    for pool in memory.pools:
        if len(memory.pools) > 1:
            out.print(Text(f"pool {pool.pool}: {', '.join(pool.roles)}"))
        table = _table("phase", "total", "of which")
        table.columns[1].justify = "right"
        for phase in pool.phases:
            style = "bold" if phase is pool.peak else ""
            table.add_row(Text(phase.name, style=style), Text(gib(phase.num_bytes), style=style), Text(_parts(phase)))
        out.print(table)
        _items(pool.peak, out)
    if memory.checkpointing is not None:
        without, with_, peak_without, peak_with = memory.checkpointing
        out.print(
            Text(
                f"activations of the actor: {gib(without)} without checkpointing (peak of its step {gib(peak_without)}), "
                f"{gib(with_)} with (peak {gib(peak_with)})"
            )
        )
    verdict, words = memory.verdict(device_memory_gib)
    out.print(Text(words, style=_VERDICT_STYLE[verdict]))
    if memory.missing and memory.pools and verdict == "unknown":
        out.print(Text(f"not counted: {memory.missing}", style="yellow"))
    for note in memory.notes:
        out.print(Text(note, style="dim"))


def _parts(phase: Moment) -> str:
    largest = sorted((i for i in phase.items if i.num_bytes), key=lambda item: -item.num_bytes)[:4]
    return ", ".join(f"{_owned(i.name, i.role)} {gib(i.num_bytes)}" for i in largest)


def _owned(name: str, role: str) -> str:
    return name if role in ("actor", "rollout") else f"{role}'s {name}"


def _items(peak: Moment, out: Console) -> None:
    out.print(Text(f"at the peak, {peak.name}:"))
    table = _table("item", "role", "size", "formula")
    table.columns[2].justify = "right"
    for item in peak.items:
        table.add_row(Text(item.name), Text(item.role), Text(gib(item.num_bytes)), Text(item.formula))
    out.print(table)


# ---- backends ---------------------------------------------------------------------------------------------------------
def _backends(title: str, choices: Iterable[Choice], out: Console) -> None:
    _title(title, out)
    table = _table("", "backend", "", "evidence", "why not, or how to get it")
    for number, choice in enumerate(choices, 1):
        mark = Text(str(number), style="green") if choice.fits else Text("-", style="red")
        words = "; ".join(choice.reasons) if not choice.fits else choice.install or choice.elsewhere
        table.add_row(
            mark, Text(choice.name), Text(_STATE[choice.state]), Text(choice.evidence.replace("_", " ")), Text(words)
        )
    out.print(table)
