"""What `rlctl train` shows on a terminal: progress with rate and ETA, and a live table of the metrics that matter.

Everything goes to stderr. Where stderr is no terminal, :class:`rlctl.tracking.reporter.PlainReporter` writes single
lines instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from rlctl.tracking.headline import HEADLINES, Headline, pick, write_duration, write_number
from rlctl.tracking.reporter import NullReporter, Phase, PlainReporter, Reporter
from rlctl_cli.sparkline import sparkline

_NAME_WIDTH = 16
_HISTORY = 2000
_NOT_PHASES = ("timing_s/step", "timing_s/testing")  # the whole, and what lies outside a step


def make_reporter(quiet: bool = False) -> Reporter:
    """The reporter for this terminal: rich on one, single lines elsewhere, none with ``quiet``."""
    if quiet:
        return NullReporter()
    if sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return RichReporter()
    return PlainReporter()


class _Rate(ProgressColumn):
    """Units a second, or seconds a unit where one takes longer."""

    def render(self, task: Task) -> Text:
        speed = task.speed or task.finished_speed
        if not speed:
            return Text(" " * 10)
        text = (
            f"{write_number(speed, 'rate' if speed >= 10 else 'count')}/s" if speed >= 1 else f"{1 / speed:.1f} s each"
        )
        return Text(f"{text:>10}", style="dim")


class _Time(ProgressColumn):
    """Time left where it is known, else time spent."""

    def render(self, task: Task) -> Text:
        if task.total is not None and not task.finished and task.time_remaining is not None:
            return Text(f"{'eta ' + write_duration(task.time_remaining):>11}", style="cyan")
        return Text(f"{write_duration(task.elapsed):>11}", style="dim")


class _Curve:
    """The values of one watched metric so far."""

    def __init__(self, headline: Headline) -> None:
        self.headline = headline
        self.values: list[float] = []
        self.step = 0
        self.first: float | None = None
        self.best: float | None = None

    def add(self, value: float, step: int) -> None:
        # A new list instead of a change in place: the thread that draws may be reading the old one.
        self.values = [*self.values[-_HISTORY:], value]
        self.step = step
        if value == value:
            better = max if self.headline.better == "up" else min
            self.first = value if self.first is None else self.first
            self.best = value if self.best is None else better(self.best, value)


class _Board:
    """The table under the bars; renders to what fits."""

    def __init__(self) -> None:
        self.curves = {headline.key: _Curve(headline) for headline in HEADLINES}
        self.step = 0
        self.timing: dict[str, float] = {}

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        for curve in self.curves.values():
            value = pick(metrics, curve.headline)
            if value is not None:
                curve.add(value, step)
        self.timing = {k[9:]: v for k, v in metrics.items() if k.startswith("timing_s/") and k not in _NOT_PHASES}
        self.step = step

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [curve for curve in self.curves.values() if curve.values]
        if not shown:
            return
        room = max(2, options.size.height - 6)
        width = options.max_width
        trend = min(40, width - _NAME_WIDTH - 3 * 11 - 2)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
        table.add_column("", no_wrap=True, min_width=_NAME_WIDTH)
        table.add_column("now", justify="right", no_wrap=True, min_width=8, style="bold")
        if width >= 45:
            table.add_column("first", justify="right", no_wrap=True, min_width=8, style="dim")
        if width >= 56:
            table.add_column("best", justify="right", no_wrap=True, min_width=8, style="dim")
        if trend >= 8:
            table.add_column("trend", no_wrap=True, style="cyan")
        for curve in shown[:room]:
            style = curve.headline.style
            late = "" if curve.step == self.step else f" @{curve.step}"
            cells = [curve.headline.label + late, write_number(curve.values[-1], style)]
            if width >= 45:
                cells.append(write_number(curve.first, style))
            if width >= 56:
                cells.append(write_number(curve.best, style) if curve.headline.better else "")
            if trend >= 8:
                cells.append(sparkline(curve.values, trend, ascii_only=options.ascii_only))
            table.add_row(*cells)
        yield table
        total = sum(self.timing.values())
        if total > 0 and len(shown) < room:
            parts = sorted(self.timing.items(), key=lambda item: -item[1])
            text = "  ".join(f"{name} {value / total:.0%}" for name, value in parts if value / total >= 0.005)
            yield Text(f"{'time':<{_NAME_WIDTH}}  {text}", style="dim", no_wrap=True, overflow="ellipsis")


class RichReporter:
    """Bars and a table that redraw in place; messages scroll above them. Use :meth:`close` in a ``finally``."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._board = _Board()
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[amount]}", table_column=Column(no_wrap=True, justify="right")),
        ]
        if self._console.width >= 64:
            columns.append(_Rate(table_column=Column(no_wrap=True)))
        columns.append(_Time(table_column=Column(no_wrap=True)))
        self._bars = Progress(*columns, console=self._console, expand=True)
        self._steps: TaskID | None = None
        self._phases: list[TaskID] = []
        self._live: Live | None = None

    def _start(self) -> None:
        if self._live is None:
            self._live = Live(
                Group(self._bars, self._board), console=self._console, refresh_per_second=4, vertical_overflow="crop"
            )
            self._live.start()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        self._start()
        if self._phases:
            self._bars.update(self._phases[-1], visible=False)
        task = self._bars.add_task(_fit(name), total=total, amount=_amount(0, total))
        self._phases.append(task)
        try:
            yield _RichPhase(self._bars, task, total)
        finally:
            self._phases.remove(task)
            self._bars.remove_task(task)
            if self._phases:
                self._bars.update(self._phases[-1], visible=True)

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        self._start()
        self._board.update(step, metrics)
        if self._steps is None:
            # What a resumed run did before is no speed of this process.
            self._steps = self._bars.add_task(_fit("steps"), total=total, completed=step - 1, amount="")
        self._bars.update(self._steps, completed=step, total=total, amount=_amount(step, total))

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back. May be called twice."""
        if self._live is not None:
            for task in self._phases:
                self._bars.update(task, visible=False)
            self._live.stop()
            self._live = None


class _RichPhase:
    def __init__(self, bars: Progress, task: TaskID, total: int | None) -> None:
        self._bars = bars
        self._task = task
        self._total = total
        self._done = 0

    def advance(self, n: int = 1) -> None:
        self._done += n
        self._bars.update(self._task, completed=self._done, amount=_amount(self._done, self._total))


def _fit(name: str) -> str:
    return f"{name[:_NAME_WIDTH]:<{_NAME_WIDTH}}"


def _amount(done: int, total: int | None) -> str:
    if total is None:
        return str(done) if done else ""
    return f"{done:>{len(str(total))}}/{total}"
