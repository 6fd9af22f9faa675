"""The report of a run: one self-contained HTML page, and its curves as one PNG."""

from __future__ import annotations

from pathlib import Path

from rlctl import files
from rlctl.rundir import RunDirectory


def write_report(run: RunDirectory, output: Path | None = None, png: bool = True) -> list[Path]:
    """Write the report of ``run``, in whatever state it is.

    Args:
        output: the HTML file; default ``report.html`` in the run directory. The PNG lies beside it.
        png: write the curves as a picture too.

    Returns:
        The files written, the page first.

    Raises:
        CheckpointError: the run's manifest cannot be read.
        OSError: a file cannot be written.
    """
    from rlctl_cli.report import charts
    from rlctl_cli.report.collect import collect
    from rlctl_cli.report.page import render

    story = collect(run)
    page = run.path / "report.html" if output is None else output
    page.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(page, render(story))
    if not png:
        return [page]
    picture = page.with_suffix(".png")
    charts.png(story.charts, f"{run.name} ({story.run['status']}, {story.run['step'] or 0} steps)", picture)
    return [page, picture]
