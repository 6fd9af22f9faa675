"""`rlctl report`: a run as one page to show to a colleague."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Default: report.html in the run."
)
@click.option("--png/--no-png", default=True, help="Also write the curves as a picture beside the page (default).")
@click.option("--open", "open_", is_flag=True, help="Open the page in a browser.")
@click.option(
    "--root", type=click.Path(path_type=Path), help="Directory of runs (default: $RLCTL_RUNS_DIR, or ./runs)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the paths as one JSON object on stdout.")
def report(run: str, output: Path | None, png: bool, open_: bool, root: Path | None, as_json: bool) -> None:
    """Write one self-contained HTML page about a run: curves, rollouts early and late, how to repeat it.

    RUN is a path, a name, the unique beginning of a name, or `last`. It may still be going on.
    """
    from rlctl.errors import UsageError
    from rlctl.runs import find_run
    from rlctl_cli.report import write_report

    found = find_run(run, root)
    try:
        written = write_report(found, output, png)
    except OSError as error:
        raise UsageError(
            "the report cannot be written",
            found=f"{type(error).__name__}: {error}",
            next="--output FILE in a directory that can be written",
        ) from error
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json({"run": found.path, "files": written})
    else:
        for path in written:
            click.echo(path)
    if open_:
        click.launch(str(written[0]))
