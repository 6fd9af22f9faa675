"""`rlctl capabilities`: the matrix of backends and axes, with the reason and the evidence of each cell."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.capabilities import Cell

_WORD = {"supported": "yes", "conditional": "if", "unsupported": "no", "not_applicable": "-"}
_STYLE = {"supported": "green", "conditional": "yellow", "unsupported": "red", "not_applicable": "dim"}
_STATE = {
    "installed": "",
    "broken": "not usable here",
    "released": "not installed",
    "planned": "not built (plugin not released)",
    "not_built": "not built",
}
_PROVED = ("parity", "end_to_end")


@dataclass(frozen=True)
class Group:
    """Rows of a backend that say the same: the cells of one of them, and the heads and devices of all."""

    cells: Sequence[Cell]
    heads: str
    devices: str


@click.command()
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Show one backend in full (repeatable).")
@click.option("--device", metavar="TYPE", help="Only cells of this device type (cpu, cuda, npu).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def capabilities(backends: tuple[str, ...], device: str | None, as_json: bool) -> None:
    """Show what each backend can do on each parallel axis, why not, and what proved it.

    Evidence, lowest to highest: declared, importable, buildable, parity (against one process), end_to_end. A record holds
    for its versions, device and topology; elsewhere it is stale.
    """
    from rlctl.capabilities import matrix
    from rlctl.evidence import load_evidence
    from rlctl.plugins import load_plugins

    plugins = load_plugins()
    book = load_evidence(plugins.entries)
    cells = [c for c in matrix(plugins, book, backends) if device in (None, c.device)]
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json({"cells": [c.to_json() for c in cells], "problems": list(book.problems)})
        return
    from rlctl_cli.output import console

    out = console()
    if backends:
        for group in _groups(cells, _all_facts):
            _print_group(group, out)
    else:
        _print_overview(cells, out)
        here = [c for c in cells if c.state in ("installed", "broken")]
        for key in dict.fromkeys((c.backend, c.dist) for c in here):
            _print_merged([c for c in here if (c.backend, c.dist) == key], out)
        click.echo("Other backends, and every record of evidence: rlctl capabilities --backend NAME")
    for problem in book.problems:
        click.echo(f"evidence left out: {problem}", err=True)


def _groups(cells: Sequence[Cell], facts: Callable[[Sequence[Cell]], str]) -> list[Group]:
    """One group a backend and distinct ``facts``: the heads and devices that share them are merged."""
    rows: dict[tuple[str, str, str, str, str | None], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.backend, cell.dist, cell.model_type, cell.device, cell.vendor), []).append(cell)
    merged: dict[tuple[str, str, str], list[list[Cell]]] = {}
    for row in rows.values():
        merged.setdefault((row[0].backend, row[0].dist, facts(row)), []).append(row)
    groups = [
        Group(same[0], _join(r[0].model_type for r in same), _join(map(_place, same))) for same in merged.values()
    ]
    order = list(dict.fromkeys(c.backend for c in cells))
    return sorted(groups, key=lambda g: order.index(g.cells[0].backend))


def _all_facts(row: Sequence[Cell]) -> str:
    """Everything that a row says, without the device and head that it is about."""
    return json.dumps([[c.axis, c.support, c.reason, c.evidence.to_json()] for c in row])


def _words(row: Sequence[Cell]) -> str:
    """What the overview shows of a row."""
    return " ".join(_WORD[c.support] + _mark(c) for c in row)


def _place(row: Sequence[Cell]) -> str:
    return row[0].device if row[0].vendor is None else f"{row[0].device}/{row[0].vendor}"


def _join(items: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(items))


def _print_overview(cells: Sequence[Cell], out: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "kind", "heads and devices", box=None, pad_edge=False, header_style="bold")
    for axis in dict.fromkeys(c.axis for c in cells):
        table.add_column(str(axis))
    table.add_column("state")
    for group in _groups(cells, _words):
        first = group.cells[0]
        words = [Text(_WORD[c.support] + _mark(c), style=_STYLE[c.support]) for c in group.cells]
        heads = group.heads.replace("language_model", "lm").replace("value_model", "value")
        table.add_row(
            Text(first.backend), first.kind, Text(f"{heads}: {group.devices}"), *words, Text(_STATE[first.state])
        )
    out.print(table)
    out.print(
        Text(
            "yes, if (on a condition), no, - (does not apply); * proved here by parity or end to end, ~ proof is stale, "
            "! a comparison failed here\n"
        )
    )


def _mark(cell: Cell) -> str:
    if cell.evidence.failed:
        return "!"
    if cell.evidence.level not in _PROVED:
        return ""
    return "~" if cell.evidence.stale else "*"


def _print_group(group: Group, out: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    first = group.cells[0]
    state = f", {_STATE[first.state]}" if _STATE[first.state] else ""
    out.print(
        Text(f"{first.backend} ({first.dist or 'no plugin'}{state}): {group.heads} on {group.devices}", style="bold")
    )
    table = Table("axis", "support", "evidence", "reason", box=None, pad_edge=False, header_style="dim")
    for cell in group.cells:
        support = Text(str(cell.support).replace("_", " "), style=_STYLE[cell.support])
        table.add_row(str(cell.axis), support, Text(_evidence(cell)), Text(cell.reason))
    out.print(table)
    _print_routing(group.cells, out)
    out.print()


def _print_merged(cells: Sequence[Cell], out: Console) -> None:
    """One backend in one table: heads and devices that say the same of an axis share a line."""
    from rich.table import Table
    from rich.text import Text

    first = cells[0]
    state = f", {_STATE[first.state]}" if _STATE[first.state] else ""
    heads, places = _join(c.model_type for c in cells), _join(_place([c]) for c in cells)
    out.print(Text(f"{first.backend} ({first.dist or 'no plugin'}{state}): {heads} on {places}", style="bold"))
    table = Table("axis", "support", "proved", "reason", box=None, pad_edge=False, header_style="dim")
    for axis in dict.fromkeys(c.axis for c in cells):
        same: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            if cell.axis is axis:
                same.setdefault((cell.support, cell.reason), []).append(cell)
        for (support, reason), group in same.items():
            where = "" if len(same) == 1 else f" on {_join(_place([c]) for c in group)}"
            words = Text(support.replace("_", " ") + where, style=_STYLE[support])
            table.add_row(str(axis), words, Text(_proofs(group)), Text(reason))
    out.print(table)
    _print_routing(cells, out)
    out.print()


def _print_routing(cells: Sequence[Cell], out: Console) -> None:
    """Of devices where nothing was proved: the test of how a run reaches the backend there."""
    from rich.text import Text

    for test in dict.fromkeys(c.routing_test for c in cells if c.routing_test):
        places = _join(_place([c]) for c in cells if c.routing_test == test)
        out.print(Text(f"{places}: nothing is proved; routing by {test}", style="dim"))


def _proofs(cells: Sequence[Cell]) -> str:
    """``parity on cpu; declared on cuda, npu``: what holds here of the axis, by device."""
    if cells[0].support not in ("supported", "conditional"):
        return ""
    by_word: dict[str, list[str]] = {}
    for cell in cells:
        proved = cell.evidence.level in _PROVED
        word = str(cell.evidence.level).replace("_", " ")
        if cell.evidence.failed:
            word = "failed"
        elif proved and cell.evidence.stale:
            word = "stale"
        by_word.setdefault(word, []).append(_place([cell]))
    if len(by_word) == 1:
        return next(iter(by_word))
    return "; ".join(f"{word} on {_join(places)}" for word, places in by_word.items())


def _evidence(cell: Cell) -> str:
    from rlctl.evidence import axes_words

    if cell.support in ("unsupported", "not_applicable"):
        return ""
    found = cell.evidence
    text = str(found.level).replace("_", " ")
    record = None if found.proof is None else found.proof.record
    if record is not None and record.device != cell.device:
        text += f"; {str(record.level).replace('_', ' ')} on {record.device}"
    elif record is not None and found.level in _PROVED:
        text += f" ({axes_words(record.axes)}, {record.model_family}, {record.device})"
    if found.stale and record is not None and record.device == cell.device:
        text += f", stale: {found.reasons[0]}"
    if found.simulated:
        text += f", {found.simulated} simulated"
    if found.failed:
        record = found.failed[0].record
        text += f", {len(found.failed)} failed here ({axes_words(record.axes)}, {record.model_family}: {record.what})"
    return text
