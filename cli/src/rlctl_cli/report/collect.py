"""From a run directory to what its report shows. Reads files only, whatever state the run is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl import files
from rlctl.rundir import RunDirectory
from rlctl.runs import describe, flat_config
from rlctl.tracking.reader import Metrics, Series, read_metrics
from rlctl.trainer_kinds import PAIR_TRAINERS

MAX_POINTS = 500
"""A curve with more points is thinned: a screen shows no more, and the page stays small."""
PAIRS = 4


@dataclass(frozen=True)
class Curve:
    """One line of a chart. ``points``: few, so drawn with marks. ``low`` and ``high``: a band around it."""

    label: str
    series: Series
    points: bool = False
    low: Series | None = None
    high: Series | None = None


@dataclass(frozen=True)
class Chart:
    """One picture. ``stacked`` lays the curves on each other; ``limit`` is a (value, label) line, ``span`` the steps shown."""

    key: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    style: str = "small"
    stacked: bool = False
    log: bool = False
    limit: tuple[float, str] | None = None
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class SamplePair:
    """Rollouts of an early and a late step; of the same prompt where the run has one."""

    early: Mapping[str, Any] | None
    late: Mapping[str, Any] | None


@dataclass(frozen=True)
class Story:
    """Everything a report shows."""

    described: dict[str, Any]
    metrics: Metrics
    charts: tuple[Chart, ...]
    pairs: tuple[SamplePair, ...]
    split: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def manifest(self) -> dict[str, Any]:
        return self.described["manifest"]

    @property
    def run(self) -> dict[str, Any]:
        return self.described["run"]


def collect(run: RunDirectory) -> Story:
    """Read a run.

    Raises:
        CheckpointError: its manifest cannot be read.
    """
    described = describe(run)
    metrics = read_metrics(run.metrics_path)
    config = flat_config(run)
    samples, _ = files.read_lines(run.samples_path)
    pairs, split = pair_samples(samples)
    kind = described["manifest"].get("kind")
    if kind in PAIR_TRAINERS:
        charts = pair_charts(metrics)
    else:
        charts = sft_charts(metrics) if kind == "sft" else rl_charts(metrics, config)
    return Story(described, metrics, charts, pairs, split, config)


def rl_charts(metrics: Metrics, config: Mapping[str, Any]) -> tuple[Chart, ...]:
    """The pictures of an RL run; one without data is left out."""
    get = metrics.series
    gap_limit = config.get("guards.rollout_probs_diff_mean_max")
    components = [name for name in metrics.names() if name.startswith("reward/")]
    charts = [
        Chart(
            "reward",
            "Reward",
            "mean of a step",
            (
                Curve("training", get("critic/score/mean")),
                Curve("validation", get("val/score/mean"), points=True),
            ),
            "score",
        ),
        Chart(
            "kl",
            "KL",
            "nats a token",
            (
                Curve("to the policy that sampled", get("actor/ppo_kl")),
                Curve("to the reference", get("actor/kl_loss")),
            ),
        ),
        Chart("entropy", "Entropy", "nats a token", (Curve("policy", get("actor/entropy")),)),
        Chart(
            "length",
            "Response length",
            "tokens",
            (
                Curve(
                    "mean",
                    get("response_length/mean"),
                    low=get("response_length/min"),
                    high=get("response_length/max"),
                ),
            ),
            "count",
        ),
        Chart(
            "grad_norm",
            "Gradient norm",
            "before clipping",
            (Curve("actor", get("actor/grad_norm")), Curve("critic", get("critic/grad_norm"))),
        ),
        Chart(
            "explained",
            "What the critic explains",
            "share of the variance of the returns; 1 is all",
            (Curve("explained variance", get("critic/vf_explained_var")),),
            "score",
        ),
        _timing(metrics),
        _throughput(metrics),
        Chart(
            "gap",
            "Rollout against trainer",
            "mean |difference of probabilities|",
            (Curve("gap", get("training/rollout_probs_diff_mean")),),
            log=True,
            limit=(float(gap_limit), "the run stops here") if isinstance(gap_limit, (int, float)) else None,
        ),
    ]
    if len(components) > 1:
        curves = tuple(Curve(name[7:], get(name)) for name in components[:6])
        charts.insert(1, Chart("components", "Reward components", "mean of a step", curves, "score"))
    return _with_data(charts, metrics)


def sft_charts(metrics: Metrics) -> tuple[Chart, ...]:
    """The pictures of an SFT run."""
    get = metrics.series
    return _with_data(
        [
            Chart(
                "loss",
                "Loss",
                "nats a token",
                (Curve("training", get("train/loss")), Curve("validation", get("val/loss"), points=True)),
            ),
            Chart("grad_norm", "Gradient norm", "before clipping", (Curve("model", get("train/grad_norm")),)),
            Chart("lr", "Learning rate", "", (Curve("lr", get("train/lr")),)),
            _timing(metrics),
            _throughput(metrics),
        ],
        metrics,
    )


def pair_charts(metrics: Metrics) -> tuple[Chart, ...]:
    """The pictures of a run over pairs of responses."""
    get = metrics.series
    accuracy = (
        Curve("training", get("rewards/accuracies")),
        Curve("validation", get("val/rewards/accuracies"), points=True),
    )
    loss = (Curve("training", get("train/loss")), Curve("validation", get("val/loss"), points=True))
    rewards = (Curve("chosen", get("rewards/chosen")), Curve("rejected", get("rewards/rejected")))
    log_probs = (Curve("chosen", get("logps/chosen")), Curve("rejected", get("logps/rejected")))
    return _with_data(
        [
            Chart("accuracy", "Pairs the right way round", "share", accuracy, "score"),
            Chart("loss", "Loss", "a pair", loss),
            Chart("rewards", "Rewards", "mean of a step", rewards),
            Chart("logps", "Log-probs of responses", "nats, the sum over tokens", log_probs),
            Chart("grad_norm", "Gradient norm", "before clipping", (Curve("model", get("train/grad_norm")),)),
            _timing(metrics),
            _throughput(metrics),
        ],
        metrics,
    )


def _throughput(metrics: Metrics) -> Chart:
    curves = (
        Curve("all", metrics.series("perf/throughput")),
        Curve("generation", metrics.series("perf/gen_throughput")),
    )
    return Chart("throughput", "Throughput", "tokens a second and device", curves, "rate")


def _timing(metrics: Metrics) -> Chart:
    """Seconds of a step by phase, and what no phase accounts for; phases under one per cent are summed up."""
    steps = metrics.series("timing_s/step")
    names = [n for n in metrics.names() if n.startswith("timing_s/") and n not in ("timing_s/step", "timing_s/testing")]
    rows = [metrics.rows[step] for step in steps.steps]

    def number(row: Mapping[str, Any], name: str) -> float:
        value = row.get(name)
        return float(value) if isinstance(value, (int, float)) and value == value else 0.0

    totals = {name: sum(number(row, name) for row in rows) for name in names}
    whole = sum(steps.values) or 1.0
    major = sorted((n for n in names if totals[n] / whole >= 0.01), key=lambda n: -totals[n])[:6]
    curves = [
        Curve(name[9:].replace("_", " "), Series(name, steps.steps, tuple(number(row, name) for row in rows)))
        for name in major
    ]
    if rows and major:
        left = tuple(
            max(0.0, total - sum(number(r, n) for n in major)) for total, r in zip(steps.values, rows, strict=True)
        )
        if sum(left) / whole >= 0.01:
            curves.append(Curve("other", Series("other", steps.steps, left)))
    if not curves:
        return Chart("timing", "Time of a step", "seconds", (Curve("step", steps),), "seconds")
    return Chart("timing", "Where the time goes", "seconds a step", tuple(curves), "seconds", stacked=True)


def _with_data(charts: Sequence[Chart], metrics: Metrics) -> tuple[Chart, ...]:
    """The charts that have anything to show, over the same steps."""
    out = []
    span = (min(metrics.rows), max(metrics.rows)) if metrics.rows else None
    for chart in charts:
        curves = tuple(curve for curve in chart.curves if curve.series)
        if curves:
            out.append(Chart(**{**vars(chart), "curves": curves, "span": span}))
    return tuple(out)


def pair_samples(samples: Sequence[Mapping[str, Any]]) -> tuple[tuple[SamplePair, ...], str]:
    """Early and late rollouts side by side.

    Validation prompts come again, so the same prompt is shown twice where there is one; else the first and the last
    training step. Pairs whose score changed come first: they show what was learned.

    Returns:
        (pairs, split they come from)
    """
    usable = [s for s in samples if isinstance(s.get("step"), int) and isinstance(s.get("completion"), str)]
    for split in ("val", "train"):
        rows = [s for s in usable if s.get("split", "train") == split]
        steps = sorted({s["step"] for s in rows})
        if len(steps) >= 2:
            early = [s for s in rows if s["step"] == steps[0]]
            late = [s for s in rows if s["step"] == steps[-1]]
            by_prompt = {s.get("prompt"): s for s in reversed(late)}
            same = [SamplePair(s, by_prompt[s.get("prompt")]) for s in early if s.get("prompt") in by_prompt]
            pairs = same or [SamplePair(a, b) for a, b in zip(early, late, strict=False)]
            pairs.sort(key=lambda pair: not _changed(pair))
            return tuple(pairs[:PAIRS]), split
    only = usable[:PAIRS]
    return tuple(SamplePair(s, None) for s in only), str(only[0].get("split", "train")) if only else ""


def _changed(pair: SamplePair) -> bool:
    return pair.early is not None and pair.late is not None and pair.early.get("score") != pair.late.get("score")


def thin(series: Series, limit: int = MAX_POINTS) -> Series:
    """At most ``limit`` points, each the mean of neighbours."""
    count = len(series.values)
    if count <= limit:
        return series
    steps, values = [], []
    for i in range(limit):
        start, end = i * count // limit, (i + 1) * count // limit
        steps.append(series.steps[(start + end - 1) // 2])
        values.append(sum(series.values[start:end]) / (end - start))
    return Series(series.name, tuple(steps), tuple(values))


def smooth(series: Series) -> Series | None:
    """A moving mean over a tenth of the run; None where there are too few points for one to mean anything."""
    count = len(series.values)
    half = count // 20
    if half < 1:
        return None
    values = []
    for i in range(count):
        part = series.values[max(0, i - half) : i + half + 1]
        values.append(sum(part) / len(part))
    return Series(series.name, series.steps, tuple(values))
