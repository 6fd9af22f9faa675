"""`rlctl doctor`: prints what :mod:`rlctl.doctor` found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.doctor import BackendReport, DoctorReport
    from rlctl.records import CheckResult

_STYLE = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--quick", is_flag=True, help="Read metadata and light modules only; import no backend and no torch.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--strict", is_flag=True, help="Exit 1 on a warning too.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=None, help="Seconds for each probe (default 45)."
)
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Check another environment: the directory of a virtual environment, or an interpreter.",
)
def doctor(
    names: tuple[str, ...], quick: bool, as_json: bool, strict: bool, timeout_s: float | None, python: Path | None
) -> int:
    """Check what is installed, what loads, and why something does not.

    NAME: backends, plugins, dists or checks to look at; everything without one. Each backend is imported in a process
    of its own. Exit codes: 0 nothing failed, 1 something did (with --strict also on a warning), 2 the doctor could not run.
    """
    from rlctl.doctor import run_doctor
    from rlctl.doctor.run import default_timeout

    limit_s = timeout_s or default_timeout()
    if python is None:
        report = run_doctor(names, quick=quick, timeout_s=limit_s)
    else:
        from rlctl.doctor.elsewhere import run_doctor_there

        report = run_doctor_there(python, names, quick, limit_s)
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json(report.to_json())
    else:
        from rlctl_cli.output import console

        _print(report, console())
    return report.exit_code(strict)


def _print(report: DoctorReport, out: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    if report.backends:
        table = Table("backend", "kind", "plugin", "stage", "status", box=None, pad_edge=False, header_style="bold")
        for row in report.backends:
            dist = f"{row.dist} {row.version}" if row.version else f"{row.dist} (not installed)"
            table.add_row(Text(row.name), row.kind or "?", Text(dist), str(row.stage), _status(str(row.status)))
        out.print(table)
        out.print()
    if report.checks:
        table = Table("check", "status", "found", box=None, pad_edge=False, header_style="bold")
        for check in report.checks:
            table.add_row(Text(check.name), _status(str(check.status)), Text(check.found))
        out.print(table)
        out.print()
    for row in report.backends:
        if row.cause:
            _print_fault(row, out)
    for check in report.checks:
        if str(check.status) in ("warn", "fail"):
            _print_check(check, out)
    _print_summary(report, out)


def _status(status: str) -> str:
    return f"[{_STYLE[status]}]{status}[/]"


def _print_fault(row: BackendReport, out: Console) -> None:
    from rich.text import Text

    head = Text.from_markup(_status(str(row.status)))
    out.print(head.append(f" {row.name} ({row.dist}{' ' + row.version if row.version else ''}), stage {row.stage}:"))
    for index, line in enumerate(row.cause):
        out.print(Text(f"    {'because ' if index else ''}{line}"))
    if row.next:
        out.print(Text(f"    next:   {row.next}"))
    out.print()


def _print_check(check: CheckResult, out: Console) -> None:
    from rich.text import Text

    out.print(Text.from_markup(_status(str(check.status))).append(f" {check.name}: {check.found}"))
    if check.wanted:
        out.print(Text(f"    wanted: {check.wanted}"))
    if check.next:
        out.print(Text(f"    next:   {check.next}"))
    out.print()


def _print_summary(report: DoctorReport, out: Console) -> None:
    from rich.text import Text

    from rlctl.records import CheckStatus

    counts = ", ".join(f"{report.count(s)} {s}" for s in CheckStatus if report.count(s))
    quick = " Backends were not imported: rlctl doctor without --quick does." if report.quick else ""
    where = f", in {report.python}" if report.python != sys.executable else ""
    out.print(Text(f"{counts} in {report.seconds:.1f} s{where}.{quick}"))
