"""What `rlctl verify` shows: progress with the time left on stderr, a table for each case on stdout."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from rlctl.tracking.headline import write_duration
from rlctl.verify.compare import QUANTITIES
from rlctl.verify.report import Case, Report, axes_text, model_text, summary_line
from rlctl.verify.run import Watcher
from rlctl_cli.output import console


class View(Watcher):
    """Shows a verification while it runs. A context manager: the terminal is given back at its end.

    Args:
        tables: print a table for each case.
        quiet: tables of cases that failed only, and no progress.
    """

    def __init__(self, tables: bool, quiet: bool) -> None:
        self._tables = tables
        self._quiet = quiet
        self._out = console()
        self._err = console(stderr=True)
        self._total = 0
        self._done = 0
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    # ---- while it runs ----------------------------------------------------------------------------------------
    def start(self, num_cases: int) -> None:
        """See :class:`rlctl.verify.run.Watcher`."""
        self._total = num_cases
        self._started = time.monotonic()
        if not self._quiet and self._err.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self._bar = Progress(*columns, console=self._err, transient=True)
            self._task = self._bar.add_task("", total=num_cases, left="")
            self._bar.start()

    def begin(self, what: str) -> None:
        """See :class:`rlctl.verify.run.Watcher`."""
        if self._quiet:
            return
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what, completed=self._done, left=self._left())
        else:
            self._err.print(Text(f"[{min(self._done + 1, self._total)}/{self._total}] {what}{self._left(', ')}"))

    def end(self, case: Case) -> None:
        """See :class:`rlctl.verify.run.Watcher`."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, left=self._left())
        if self._tables and not (self._quiet and case.passed):
            target = self._out if self._bar is None or not self._out.is_terminal else self._bar.console
            target.print(case_table(case))

    def _left(self, before: str = "") -> str:
        """The time left, as far as the cases that have ended tell."""
        if not self._done or self._done == self._total:
            return ""
        each = (time.monotonic() - self._started) / self._done
        return f"{before}about {write_duration(each * (self._total - self._done))} left"

    # ---- at the end -------------------------------------------------------------------------------------------
    def finish(self, report: Report) -> None:
        """What was left out, evidence, and the last line."""
        for entry in report.left_out:
            self._out.print(Text(f"left out: {entry.topology}, {model_text(entry)}: {entry.reason}", style="dim"))
        for message in report.messages:
            self._out.print(Text(message, style="yellow"))
        records = [c.evidence for c in report.cases if c.evidence and c.passed]
        if records:
            count = f"{len(records)} {'record' if len(records) == 1 else 'records'}"
            self._out.print(Text(f"{count} of evidence written; rlctl capabilities shows them", style="dim"))
        style = "green" if report.passed else "red"
        self._out.print(Text(f"{summary_line(report.cases)} ({write_duration(report.seconds)})", style=f"bold {style}"))


def case_table(case: Case) -> Group:
    """One case: a line for each quantity, then what was skipped or went wrong."""
    verdict = Text("passed", style="green") if case.passed else Text("FAILED", style="bold red")
    head = Text(f"{case.backend}, {axes_text(case)}, {model_text(case)}, {case.dtype} on {case.device}: ", style="bold")
    table = Table("quantity", box=None, pad_edge=False, header_style="dim")
    table.add_column("largest delta", justify="right")
    table.add_column("tolerance", justify="right")
    table.add_column("")
    table.add_column("where", style="dim", overflow="fold")
    for quantity in QUANTITIES:
        found = case.deltas.get(quantity)
        if found is None:
            continue
        good = quantity not in case.failures
        mark = Text("ok", style="green") if good else Text("FAIL", style="bold red")
        table.add_row(quantity, f"{found.value:.2e}", f"{case.tolerances[quantity]:.1e}", mark, Text(found.where))
    lines = [Text(f"not compared: {what}: {why}", style="dim") for what, why in case.skipped.items()]
    if case.error is not None:
        lines.append(Text(f"ended early: {case.error['what']}", style="red"))
        lines += [Text(f"  {line}", style="dim") for line in case.error.get("details") or ()]
        lines += [
            Text(f"  {key + ':':<8} {case.error[key]}") for key in ("found", "wanted", "next") if case.error.get(key)
        ]
    return Group(
        head.append_text(verdict).append(f" in {write_duration(case.seconds)}", style="dim"), table, *lines, Text()
    )
