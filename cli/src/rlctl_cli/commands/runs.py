"""`rlctl runs`: what ran, how it went, and what was different."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

STATUS_STYLE = {"done": "green", "running": "cyan", "failed": "red", "died": "red", "interrupted": "yellow"}
_ROOT = click.option(
    "--root", type=click.Path(path_type=Path), help="Directory of runs (default: $RLCTL_RUNS_DIR, or ./runs)."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


@click.group()
def runs() -> None:
    """List, show and compare runs.

    RUN is a path, a name, the unique beginning of a name, or `last`.
    """


@runs.command("list")
@_ROOT
@click.option("-n", "--limit", type=click.IntRange(min=1), help="Only the newest.")
@_JSON
def list_(root: Path | None, limit: int | None, as_json: bool) -> None:
    """List runs, newest first."""
    from rlctl.rundir import default_root
    from rlctl.runs import list_runs
    from rlctl.tracking.headline import write_duration, write_number

    where = default_root() if root is None else root
    found = list_runs(where)[:limit]
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json({"root": where.resolve(), "runs": [vars(run) for run in found]})
        return
    if not found:
        click.echo(f"no runs in {where}; rlctl train quickstart makes one", err=True)
        return
    rows = [
        [
            run.name,
            _status(run.status),
            run.kind,
            f"{run.step if run.step is not None else 0}/{run.total_steps or '?'}",
            write_number(run.score, "score"),
            write_number(run.val_score, "score"),
            write_duration(run.duration_s),
            (run.model or "").rsplit("/", 1)[-1],
            run.task,
        ]
        for run in found
    ]
    _table(["run", "status", "kind", "step", "reward", "val", "took", "model", "task"], rows, right=(3, 4, 5, 6))
    if any(run.kind == "sft" for run in found):
        click.echo("(reward and val of an sft run are losses)")
    if any(run.kind in ("dpo", "rm") for run in found):
        click.echo("(reward and val of a dpo or rm run are shares of pairs that are the right way round)")


@runs.command()
@click.argument("run")
@_ROOT
@_JSON
def show(run: str, root: Path | None, as_json: bool) -> None:
    """Show one run: how it ended, its metrics, its files, and how to repeat it."""
    from rlctl.runs import describe
    from rlctl.runs import find_run as find

    data = describe(find(run, root))
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json(data)
        return
    for label, text in summary_lines(data):
        click.echo(f"{label:<12} {text}")
    click.echo()
    rows = [_statistics_row(name, entry) for name, entry in data["metrics"].items()]
    _table(["metric", "first", "last", "first tenth", "last tenth", "best", "at step"], rows, right=range(1, 7))
    if data["damaged_lines"]:
        click.echo(f"({data['damaged_lines']} damaged lines of metrics.jsonl are left out)")


@runs.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN RUN...")
@_ROOT
@click.option("--all", "everything", is_flag=True, help="Every metric, not only those that people watch.")
@_JSON
def compare(names: tuple[str, ...], root: Path | None, everything: bool, as_json: bool) -> None:
    """Compare runs: what was configured differently, and what came of it.

    The last tenth of the steps is compared, relative to the first run named.
    """
    from rlctl.errors import UsageError
    from rlctl.runs import compare as compare_runs
    from rlctl.runs import find_run as find

    if len(names) < 2:
        raise UsageError("rlctl runs compare needs two runs or more", found=" ".join(names), next="rlctl runs list")
    data = compare_runs([find(name, root) for name in names])
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json(data)
        return
    letters = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(names))]
    for letter, run in zip(letters, data["runs"], strict=True):
        click.echo(f"{letter}  {run['name']}  ({run['status']}, {run['step'] or 0} steps)")
    for note in data["notes"]:
        click.echo(click.style("note: ", fg="yellow") + note)
    click.echo()
    if data["config"]:
        _table(["configuration", *letters], [[k, *(_value(v) for v in values)] for k, values in data["config"].items()])
    else:
        click.echo("the configurations are the same")
    click.echo()
    _print_metrics(data["metrics"], letters, everything)


def find_run(reference: str, root: Path | None = None) -> Path:
    """The directory of the run that ``reference`` means (see :func:`rlctl.runs.find_run`)."""
    from rlctl.runs import find_run as find

    return find(reference, root).path


def summary_lines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) lines about a run, from :func:`rlctl.runs.describe`."""
    from rlctl.tracking.headline import write_duration, write_number

    run, manifest = data["run"], data["manifest"]
    device = manifest.get("device") or {}
    guards = manifest.get("guards") or {}
    git = manifest.get("git") or {}
    best = run["best"] or {}
    best_value = best.get("val/score/mean", best.get("val/loss"))
    steps = f"{run['step'] or 0} of {run['total_steps'] or '?'}"
    commit = (
        f"{str(git.get('commit', ''))[:12]}{' with uncommitted changes' if git.get('dirty') else ''}" if git else ""
    )
    lines = [
        ("run", run["name"]),
        ("directory", run["path"]),
        ("status", run["status"] + (f": {run['error']}" if run["error"] else "")),
        ("steps", steps),
        ("started", str(run["started"] or "-")),
        ("took", write_duration(run["duration_s"])),
        ("model", str(run["model"] or "-")),
        ("adapters", _adapters(data.get("lora"))),
        ("task", str(run["task"] or "-")),
        ("algorithm", " / ".join(str(manifest[k]) for k in ("algorithm", "backend", "rollout") if manifest.get(k))),
        ("device", " ".join(str(device[k]) for k in ("type", "name") if device.get(k))),
        ("seeds", ", ".join(f"{k} {v}" for k, v in (manifest.get("seeds") or {}).items())),
        ("guards off", ", ".join(guards.get("off", [])) or "none"),
        ("best", f"{write_number(best_value, 'score')} at step {best['step']}" if best_value is not None else ""),
        ("code", commit),
        ("checkpoints", ", ".join(_checkpoint(c) for c in data["checkpoints"])),
        ("files", ", ".join(Path(path).name for path in data["files"].values())),
        ("command", str(manifest.get("command_line", ""))),
    ]
    return [(label, text) for label, text in lines if text]


def _adapters(lora: Mapping[str, Any] | None) -> str:
    if lora is None:
        return ""
    targets = lora.get("target_modules")
    shown = ", ".join(map(str, targets)) if isinstance(targets, list) else str(targets)
    return f"LoRA of rank {lora.get('rank')}, alpha {lora.get('alpha')}, on {shown}"


def _checkpoint(entry: Mapping[str, Any]) -> str:
    return f"step {entry['step']}" + (f" (damaged: {entry['problem']})" if entry["problem"] else "")


def _statistics_row(name: str, entry: Mapping[str, Any]) -> list[str]:
    from rlctl.tracking.headline import style_of, write_number

    style = style_of(name)
    cells = [write_number(entry[key], style) for key in ("first", "last", "first_tenth", "last_tenth")]
    best = write_number(entry["best"], style) if entry["best"] is not None else ""
    return [name, *cells, best, "" if entry["best_step"] is None else str(entry["best_step"])]


def _print_metrics(metrics: Mapping[str, Any], letters: Sequence[str], everything: bool) -> None:
    """first tenth -> last tenth (best) a run, and the change of the last tenth against the first run."""
    from rlctl.tracking.headline import HEADLINES, style_of, write_number

    watched = {name for headline in HEADLINES for name in headline.names}
    rows = []
    for name, entry in metrics.items():
        if not everything and name not in watched:
            continue
        cells, style = [name], style_of(name)
        for statistics, relative in zip(entry["runs"], entry["relative"], strict=True):
            if statistics is None:
                cells.append("-")
                continue
            text = f"{write_number(statistics['first_tenth'], style)} > {write_number(statistics['last_tenth'], style)}"
            if statistics["best"] is not None:
                text += f" ({write_number(statistics['best'], style)})"
            if relative and statistics is not entry["runs"][0]:
                text += f" {relative:+.1%}"
            cells.append(text)
        rows.append(cells)
    if not rows:
        click.echo("no metrics yet")
        return
    _table(["first tenth > last tenth (best)", *letters], rows)


def _status(status: str) -> str:
    style = STATUS_STYLE.get(status)
    return f"[{style}]{status}[/]" if style else status


def _value(value: Any) -> str:
    return "-" if value is None else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> None:
    from rich.markup import escape
    from rich.table import Table

    from rlctl_cli.output import console

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, title in enumerate(head):
        table.add_column(title, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        marked = (str(cell) if "[/]" in str(cell) else escape("" if cell is None else str(cell)) for cell in row)
        table.add_row(*marked)
    console().print(table)
