"""The last lines of a training run: what changed, and where to look."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlctl.trainers.run import RunResult

SHOWN = (
    ("critic/score/mean", "mean reward"),
    ("rewards/accuracies", "pairs the right way round"),
    ("rewards/margins", "margin of the rewards"),
    ("train/loss", "training loss"),
    ("distillation/loss", "distillation loss"),
    ("response_length/mean", "response length"),
    ("actor/entropy", "entropy"),
    ("critic/vf_explained_var", "explained by the critic"),
    ("timing_s/step", "seconds a step"),
)

VALIDATION = {
    "val/score/mean": "held-out score, greedy",
    "val/rewards/accuracies": "held-out pairs the right way round",
    "val/loss": "held-out loss",
}
"""The metric of held-out rows that is shown: the first that a run has."""


def summary(result: RunResult) -> dict[str, Any]:
    """The result as data: means over the first and the last tenth of the steps, and validation before and after."""
    size = max(1, len(result.history) // 10)

    def mean(name: str, part: list[dict[str, float]]) -> float | None:
        # Where all returns are equal there is nothing to explain: NaN.
        values = [m[name] for m in part if not math.isnan(m.get(name, math.nan))]
        return sum(values) / len(values) if values else None

    tenths = {
        name: {"first_tenth": mean(name, result.history[:size]), "last_tenth": mean(name, result.history[-size:])}
        for name, _ in SHOWN
        if any(name in m for m in result.history)
    }
    key = next((k for k in VALIDATION if result.validation and k in result.validation[0][1]), None)
    validation = None
    if key is not None:
        points = [(step, metrics[key]) for step, metrics in result.validation]
        validation = {"metric": key, "first": points[0][1], "last": points[-1][1], "steps": [p[0] for p in points]}
    return {
        "run": str(result.path),
        "steps": result.steps,
        "metrics": tenths,
        "validation": validation,
        "best_step": result.best_step,
        "export": str(result.path / "export"),
        "export_adapter": str(adapter) if (adapter := result.path / "export_adapter").is_dir() else None,
    }


def print_summary(result: RunResult) -> None:
    from rich.table import Table

    from rlctl_cli.output import console

    data = summary(result)
    table = Table(title=f"{result.steps} steps", title_justify="left", box=None, pad_edge=False)
    for column in ("metric", "first tenth", "last tenth", "change"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, label in SHOWN:
        pair = data["metrics"].get(name)
        if pair and pair["first_tenth"] is not None and pair["last_tenth"] is not None:
            first, last = pair["first_tenth"], pair["last_tenth"]
            table.add_row(f"{label} ({name})", f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}")
    if data["validation"] and len(data["validation"]["steps"]) > 1:
        first, last = data["validation"]["first"], data["validation"]["last"]
        label = VALIDATION[data["validation"]["metric"]]
        table.add_row(f"{label} (before, after)", f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}")
    console().print(table)
    if data["metrics"].get("critic/vf_explained_var", {}).get("last_tenth") is not None:
        click.echo("critic/vf_explained_var: 0 is as good as a constant, 1 all of the returns")
    adapter = "" if data["export_adapter"] is None else f"\nadapter {data['export_adapter']}"
    click.echo(
        f"\nrun     {data['run']}\nmodel   {data['export']}{adapter}\nreport  rlctl report {shlex.quote(data['run'])}"
    )
