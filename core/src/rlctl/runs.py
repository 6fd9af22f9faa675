"""Finding, summarising and comparing runs. Reads files only; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from rlctl import files
from rlctl.checkpoint import find_damage, list_checkpoints
from rlctl.errors import CheckpointError, UsageError
from rlctl.rundir import RunDirectory, default_root
from rlctl.tracking.headline import HEADLINES
from rlctl.tracking.reader import STEP, TIME, Metrics, Series, merge, read_metrics
from rlctl.trainer_kinds import watched

_TAIL_BYTES = 256 * 1024
_HIDDEN = (STEP, TIME, "training/epoch")
_WATCHED = tuple(name for headline in HEADLINES for name in headline.names)
_BETTER = {name: headline.better for headline in HEADLINES for name in headline.names if headline.better}


@dataclass(frozen=True)
class RunSummary:
    """One line of ``rlctl runs list``.

    Args:
        status: ``running``, ``done``, ``failed``, ``interrupted``, ``died`` (its process is gone) or ``unreadable``.
        score, val_score: last reward and validation score (RL), last training and validation loss (SFT), last share of pairs
            that are the right way round, in training and held out (dpo, rm).
        best: what the manifest says of the weights in ``best/``: ``step`` and their validation metrics.
        duration_s: from start to end, or until now for a run that goes on.
    """

    name: str
    path: str
    status: str
    kind: str | None = None
    model: str | None = None
    task: str | None = None
    backend: str | None = None
    device: str | None = None
    step: int | None = None
    total_steps: int | None = None
    score: float | None = None
    val_score: float | None = None
    best: Mapping[str, Any] | None = None
    started: str | None = None
    duration_s: float | None = None
    error: str | None = None


def iter_runs(root: Path | None = None) -> Iterator[RunDirectory]:
    """Run directories directly below ``root``, in no order."""
    root = default_root() if root is None else root.expanduser()
    if root.is_dir():
        yield from (RunDirectory(p.resolve()) for p in root.iterdir() if (p / "manifest.json").is_file())


def list_runs(root: Path | None = None) -> list[RunSummary]:
    """All runs below ``root``, newest first."""
    return sorted((summarise(run) for run in iter_runs(root)), key=_age, reverse=True)


def find_run(reference: str, root: Path | None = None) -> RunDirectory:
    """The run that ``reference`` means: a path, a name, a unique beginning of a name, or ``last``.

    Raises:
        UsageError: no such run, or several.
    """
    path = Path(reference).expanduser()
    if (path / "manifest.json").is_file():
        return RunDirectory.open(path)
    where = default_root() if root is None else root.expanduser()
    runs = {run.name: run for run in iter_runs(where)}
    if reference in runs:
        return runs[reference]
    if reference == "last" and runs:
        return RunDirectory(Path(max((summarise(run) for run in runs.values()), key=_age).path))
    matches = sorted(name for name in runs if name.startswith(reference))
    if len(matches) == 1:
        return runs[matches[0]]
    if matches:
        raise UsageError(
            f"{reference!r} is the beginning of {len(matches)} runs",
            found=", ".join(matches[:5]) + (" ..." if len(matches) > 5 else ""),
            wanted="a longer beginning",
        )
    near = get_close_matches(reference, runs, n=1)
    raise UsageError(
        f"there is no run {reference!r} in {where}",
        found=f"{len(runs)} runs" if runs else "no runs at all",
        wanted="a path, a name, the unique beginning of a name, or last",
        next=f"did you mean {near[0]}?" if near else "rlctl runs list (--root or RLCTL_RUNS_DIR for another directory)",
    )


def summarise(run: RunDirectory) -> RunSummary:
    """A run in one line, without reading its whole history. Never raises: what cannot be read is ``unreadable``."""
    try:
        manifest = run.manifest()
        status = run.status()
    except CheckpointError as error:
        return RunSummary(run.name, str(run.path), "unreadable", error=error.found)
    # A run that was resumed still has the metrics of its earlier end in the manifest.
    ended = manifest.get("metrics") if status != "running" else None
    values = ended if isinstance(ended, dict) and ended else merge(*_tail(run.metrics_path)).last_values()
    score, held_out = watched(manifest.get("kind"))
    device = manifest.get("device")
    return RunSummary(
        name=run.name,
        path=str(run.path),
        status=status,
        kind=manifest.get("kind"),
        model=manifest.get("model"),
        task=manifest.get("task"),
        backend=manifest.get("backend"),
        device=device.get("type") if isinstance(device, dict) else None,
        step=int(values[STEP]) if STEP in values else None,
        total_steps=manifest.get("total_training_steps"),
        score=values.get(score),
        val_score=values.get(held_out),
        best=manifest["best"] if isinstance(manifest.get("best"), dict) else None,
        started=manifest.get("started"),
        duration_s=run.worked_s() if status == "running" else manifest.get("duration_s"),
        error=manifest.get("error"),
    )


def describe(run: RunDirectory) -> dict[str, Any]:
    """Everything of one run: summary, manifest, statistics of each metric, checkpoints and what else is there."""
    metrics = read_metrics(run.metrics_path)
    places = {
        "config": run.config_path,
        "metrics": run.metrics_path,
        "samples": run.samples_path,
        "tensorboard": run.tensorboard,
        "export": run.export,
        "export_adapter": run.adapters_of(run.export),
        "best": run.best,
        "best_adapter": run.adapters_of(run.best),
        "warm_start": run.warm_start,
        "report": run.path / "report.html",
    }
    return {
        "run": asdict(summarise(run)),
        "manifest": run.manifest(),
        "lora": _lora(run),
        "metrics": statistics(metrics),
        "damaged_lines": metrics.damaged,
        "checkpoints": [
            {"step": step, "path": str(path), "problem": find_damage(path, deep=False)}
            for step, path in list_checkpoints(run.path)
        ],
        "files": {name: str(path) for name, path in places.items() if path.exists()},
    }


def _lora(run: RunDirectory) -> dict[str, Any] | None:
    """The section ``model.lora`` of a run's configuration; None where it trained every weight, or none can be read."""
    try:
        found: Any = yaml.safe_load(run.config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    model = found.get("model") if isinstance(found, dict) else None
    lora = model.get("lora") if isinstance(model, dict) else None
    return lora if isinstance(lora, dict) else None


def statistics(metrics: Metrics) -> dict[str, dict[str, Any]]:
    """Per metric: first, last, means of the first and last tenth, lowest, highest, and best where one way is better."""
    out: dict[str, dict[str, Any]] = {}
    for name in metrics.names():
        series = metrics.series(name)
        if name in _HIDDEN or not series:
            continue
        best = _best(series)
        out[name] = {
            "count": len(series.values),
            "first": series.first,
            "last": series.last,
            "first_tenth": series.tenth(last=False),
            "last_tenth": series.tenth(last=True),
            "min": min(series.values),
            "max": max(series.values),
            "best": best[0] if best else None,
            "best_step": best[1] if best else None,
        }
    return out


def compare(runs: Sequence[RunDirectory]) -> dict[str, Any]:
    """Runs side by side.

    Returns:
        ``runs`` (summaries), ``config`` (dotted key -> one value a run, only where they differ; a missing key is None),
        ``metrics`` (name -> one entry of :func:`statistics` or None a run, and ``relative``: last tenth of each run
        against the first run's, as a share), ``notes`` (what makes the runs hard to compare).
    """
    configs = [flat_config(run) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    tables = [statistics(read_metrics(run.metrics_path)) for run in runs]
    seen = dict.fromkeys(name for table in tables for name in table)
    names = [name for name in _WATCHED if name in seen] + [name for name in seen if name not in _WATCHED]
    metrics: dict[str, Any] = {}
    for name in names:
        entries = [table.get(name) for table in tables]
        metrics[name] = {"runs": entries, "relative": [_relative(entries[0], entry) for entry in entries]}
    return {
        "runs": [asdict(summarise(run)) for run in runs],
        "config": {
            key: [config.get(key) for config in configs]
            for key in keys
            if any(config.get(key) != configs[0].get(key) for config in configs)
        },
        "metrics": metrics,
        "notes": _notes([run.manifest() for run in runs]),
    }


def flat_config(run: RunDirectory) -> dict[str, Any]:
    """``config.yaml`` with dotted keys; empty when it cannot be read."""
    try:
        value = yaml.safe_load(run.config_path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return dict(flatten(value)) if isinstance(value, dict) else {}


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf) pairs of nested mappings and lists; an empty one is a leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}.{index}")
    else:
        yield prefix, value


def _best(series: Series) -> tuple[float, int] | None:
    better = _BETTER.get(series.name)
    if better is None:
        return None
    value = max(series.values) if better == "up" else min(series.values)
    return value, series.steps[series.values.index(value)]


def _relative(base: dict[str, Any] | None, entry: dict[str, Any] | None) -> float | None:
    if base is None or entry is None or base["last_tenth"] == 0:
        return None
    return (entry["last_tenth"] - base["last_tenth"]) / abs(base["last_tenth"])


def _notes(manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    def differ(what: str, key: Any) -> str | None:
        values = [key(m) for m in manifests]
        return f"{what} differ: {' | '.join(str(v) for v in values)}" if any(v != values[0] for v in values) else None

    def hashes(manifest: Mapping[str, Any]) -> str:
        return ", ".join(str(d.get("sha256", ""))[:12] for d in manifest.get("data") or []) or "none"

    def commit(manifest: Mapping[str, Any]) -> str:
        git = manifest.get("git") or {}
        return f"{str(git.get('commit', 'none'))[:12]}{' (changed)' if git.get('dirty') else ''}"

    found = (
        differ("kinds", lambda m: m.get("kind")),
        differ("data hashes", hashes),
        differ("devices", lambda m: (m.get("device") or {}).get("name") or (m.get("device") or {}).get("type")),
        differ("commits", commit),
        differ("guards that are off", lambda m: ", ".join((m.get("guards") or {}).get("off", [])) or "none"),
    )
    return [note for note in found if note is not None]


def _tail(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The last lines of a metrics file: enough for the last values, however long the run is."""
    try:
        size = path.stat().st_size
    except OSError:
        return [], 0
    return files.read_lines(path, start=max(0, size - _TAIL_BYTES))


def _age(summary: RunSummary) -> tuple[str, float]:
    try:
        changed = Path(summary.path).stat().st_ctime
    except OSError:  # removed while we look
        changed = 0.0
    return str(summary.started or ""), changed
