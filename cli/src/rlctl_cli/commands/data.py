"""`rlctl data check`: everything that can be known of a run's data before a model is loaded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.config.schema import DataConfig
    from rlctl.data.faults import Fault
    from rlctl.data.report import DataReport, LengthStats

    Progress = Callable[[str, int, int | None], None]

SHOWN = 20
PROGRESS_AFTER_S = 2.0
BAR_WIDTH = 30


@click.group()
def data() -> None:
    """Check a dataset before any model is loaded."""


@data.command()
@click.argument("target", metavar="RECIPE|FILE|DATASET")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--model", help="Model of the run, for its tokenizer (model.path).")
@click.option("--data", "data_file", help="Training file or directory of the run (data.train_files).")
@click.option("--val-data", help="Validation file of the run (data.val_files).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--strict", is_flag=True, help="Exit 1 on a warning too.")
@click.option(
    "--reward-limit",
    "reward_limit_s",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    help="Seconds for the dry run of the reward.",
)
@click.pass_context
def check(
    ctx: click.Context,
    target: str,
    overrides: tuple[str, ...],
    as_json: bool,
    strict: bool,
    reward_limit_s: float,
    model: str | None,
    data_file: str | None,
    val_data: str | None,
) -> int:
    """Read every row of a run's data, before any model is loaded.

    RECIPE or FILE: a configuration, with its tokenizer and reward. DATASET: a .jsonl or .parquet file, a directory with
    train and test files, or hf:DATASET:SPLIT, read alone, with data.* overrides. Exit 1 when something is wrong.

    \b
    rlctl data check quickstart
    rlctl data check run.yaml data.max_prompt_length=256
    rlctl data check train.jsonl data.columns.prompt=problem
    """
    from rlctl.data.check import check_data, check_files

    def notice(text: str) -> None:
        click.echo(text, err=True)

    with _progress(quiet=as_json) as progress:
        if is_dataset(target):
            report = check_files(target, _dataset_config(target, overrides), progress)
        else:
            from rlctl.config.load import load_config
            from rlctl.plugins import load_plugins

            plugins = load_plugins()
            flags = {"model": model, "data": data_file, "val_data": val_data}
            given = {name: value for name, value in flags.items() if value is not None}
            resolved = load_config(target, overrides, given, plugins, notice, backends=False)
            report = check_data(resolved, plugins, progress, reward_limit_s)
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json(report.to_json())
    else:
        from rlctl_cli.output import console

        _print(report, console())
    return 1 if report.faults or (strict and report.warnings) else 0


def is_dataset(target: str) -> bool:
    """True for what names rows themselves, false for a recipe or a configuration file."""
    from rlctl.data.readers import JSONL, PARQUET, directory_has_split

    if target.startswith("hf:"):
        return True
    path = Path(target)
    try:
        if path.is_dir():
            # A directory that happens to be called like a recipe holds no splits.
            return "/" in target or target == "." or any(directory_has_split(target, s) for s in ("train", "val"))
    except (OSError, ValueError):
        return False  # no possible path: let the configuration's loader say so
    return path.suffix.lower() in (*JSONL, *PARQUET)


def _dataset_config(target: str, overrides: Sequence[str]) -> DataConfig:
    """A ``data`` section for a bare dataset.

    Raises:
        UsageError: an override is of another section.
        InvalidConfigError: an override is wrong.
    """
    from rlctl.config.check import check as validate
    from rlctl.config.document import Document
    from rlctl.config.overrides import apply_overrides
    from rlctl.config.problems import InvalidConfigError, Problem
    from rlctl.config.schema import DataConfig
    from rlctl.errors import UsageError

    foreign = [text for text in overrides if "=" in text and not text.startswith("data.")]
    if foreign:
        raise UsageError(
            "a bare dataset takes overrides of the data section only",
            found=foreign[0],
            wanted="data.KEY=VALUE, for example data.columns.prompt=question",
            next="name a recipe or a YAML file instead of the dataset to check it with a model and a reward",
        )
    document = Document({"data": {"train_files": [target]}})
    problems: list[Problem] = []
    apply_overrides(document, overrides, problems)
    config, faults = validate(DataConfig, document, prefix=("data",))
    problems += faults
    if problems or config is None:
        raise InvalidConfigError(target, problems, "rlctl config schema lists every key of the data section")
    return config


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A bar on stderr with time left, once the check has taken two seconds; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from rlctl_cli.output import console

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("eta"), TimeRemainingColumn(), console=console(stderr=True), transient=True)
    started = time.monotonic()
    tasks: dict[str, TaskID] = {}

    def tell(phase: str, done: int, total: int | None) -> None:
        if phase not in tasks:
            for earlier in tasks.values():
                bar.update(earlier, visible=False)
            tasks[phase] = bar.add_task(phase, total=total)
        bar.update(tasks[phase], completed=done, total=total)
        if time.monotonic() - started > PROGRESS_AFTER_S and not bar.live.is_started:
            bar.start()

    try:
        yield tell
    finally:
        bar.stop()


# ---- printing -----------------------------------------------------------------------------------------------------
def _print(report: DataReport, out: Console) -> None:
    from rich.text import Text

    for name, split in report.splits.items():
        sources = ", ".join(f"{source} {count}" for source, count in sorted(split.sources.items())[:5])
        out.print(
            Text.assemble((f"{name}: ", "bold"), f"{split.rows} rows", (f"  {sources}" if sources else "", "dim"))
        )
        for kind, stats in split.lengths.items():
            _print_lengths(kind, stats, out)
    if report.reward is not None and report.reward.rows:
        reward = report.reward
        parts = ", ".join(f"{name} {value:.3f}" for name, value in reward.components.items())
        line = f"own answers score {reward.truth:.3f}, an empty completion {reward.empty:.3f}"
        out.print(Text.assemble(("reward: ", "bold"), f"{line} on {reward.rows} rows", (f"  {parts}", "dim")))
    _print_faults("fault", "red", report.faults, out)
    _print_faults("warning", "yellow", report.warnings, out)
    verdict = f"{report.target}: " + (_count(len(report.faults), "fault") if report.faults else "no fault")
    verdict += f", {_count(len(report.warnings), 'warning')}" if report.warnings else ""
    style = "bold red" if report.faults else "bold green"
    out.print(Text.assemble((verdict, style), (f"  ({report.seconds:.1f} s)", "dim")))


def _print_lengths(kind: str, stats: LengthStats, out: Console) -> None:
    from rich.text import Text

    head = f"  {kind} {stats.unit}: mean {stats.mean:.1f}, median {stats.p50}, 95 % {stats.p95}, longest {stats.max}"
    out.print(Text(head))
    if len(stats.histogram) < 2:
        return
    most = max(rows for _, _, rows in stats.histogram)
    digits = len(str(stats.max))
    for low, high, rows in stats.histogram:
        bar = "█" * -(-rows * BAR_WIDTH // most)
        out.print(Text.assemble((f"    {low:>{digits}} - {high:>{digits}} ", "dim"), (f"{bar} ", "cyan"), str(rows)))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _print_faults(word: str, style: str, faults: Sequence[Fault], out: Console) -> None:
    from rich.text import Text

    for place, fault in enumerate(faults[:SHOWN]):
        out.print(Text.assemble((f"{word}: ", f"bold {style}"), fault.line()))
        # One remedy for a run of faults of one kind is enough.
        following = faults[place + 1] if place + 1 < min(len(faults), SHOWN) else None
        if following is None or following.next != fault.next:
            out.print(Text(f"  next: {fault.next}", "dim"))
    if len(faults) > SHOWN:
        out.print(Text(f"... and {len(faults) - SHOWN} more {word}s (--json shows all that were kept)", "dim"))
