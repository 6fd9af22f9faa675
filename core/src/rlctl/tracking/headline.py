"""The few metrics that people watch: their names, short labels and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Headline:
    """One watched number.

    Args:
        key: stable short name.
        label: what people read.
        names: metric names, the first present wins.
        style: ``score`` (3 decimals), ``small`` (4 significant digits), ``count``, ``rate`` or ``seconds``.
        better: ``up``, ``down`` or empty when neither is better.
    """

    key: str
    label: str
    names: tuple[str, ...]
    style: str
    better: str = ""


HEADLINES: tuple[Headline, ...] = (
    Headline("reward", "reward", ("critic/score/mean", "critic/rewards/mean"), "score", "up"),
    Headline("val_score", "val score", ("val/score/mean",), "score", "up"),
    Headline("accuracy", "accuracy", ("rewards/accuracies",), "score", "up"),
    Headline("val_accuracy", "val accuracy", ("val/rewards/accuracies",), "score", "up"),
    Headline("margin", "margin", ("rewards/margins",), "small", "up"),
    Headline("loss", "loss", ("train/loss", "distillation/loss"), "small", "down"),
    Headline("val_loss", "val loss", ("val/loss",), "small", "down"),
    Headline("val_kl", "val KL", ("val/distillation/kl",), "small", "down"),
    Headline("kl", "KL", ("actor/kl_loss", "actor/ppo_kl"), "small"),
    Headline("entropy", "entropy", ("actor/entropy",), "small"),
    Headline("explained", "explained", ("critic/vf_explained_var",), "score", "up"),
    Headline("grad_norm", "grad norm", ("actor/grad_norm", "train/grad_norm"), "small"),
    Headline("length", "response tokens", ("response_length/mean",), "count"),
    Headline("gen_batches", "gen batches", ("train/num_gen_batches",), "rate"),
    Headline("throughput", "tokens/s", ("perf/throughput",), "rate", "up"),
    Headline("step_time", "s/step", ("timing_s/step", "perf/time_per_step"), "seconds", "down"),
)


def style_of(name: str) -> str:
    """How the values of a metric are written: as its headline says, durations as seconds, anything else as a small number."""
    for headline in HEADLINES:
        if name in headline.names:
            return headline.style
    return "seconds" if name.startswith("timing_s/") else "small"


def pick(metrics: Mapping[str, float], headline: Headline) -> float | None:
    """The headline's value in ``metrics``, or None."""
    for name in headline.names:
        value = metrics.get(name)
        if value is not None:
            # Exactly on policy and without a reference there is no KL to watch, and of equal returns nothing to explain.
            absent = (headline.key == "kl" and value == 0.0) or (headline.key == "explained" and value != value)
            return None if absent else float(value)
    return None


def write_number(value: float | None, style: str) -> str:
    """A number as people read it; a missing one is a dash."""
    if value is None:
        return "-"
    if value != value or abs(value) == float("inf"):
        return f"{value:.0f}"
    if style == "score":
        return f"{value:.3f}"
    if style == "count":
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"
    if style == "rate":
        for limit, unit in ((1e6, "M"), (1e3, "k")):
            if abs(value) >= limit:
                return f"{value / limit:.1f}{unit}"
        return f"{value:.0f}"
    if style == "seconds":
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 10 else f"{value:.3g}"


def write_duration(seconds: float | None) -> str:
    """``42 s``, ``3m 05s``, ``2h 04m``; a missing one is a dash."""
    if seconds is None or seconds != seconds:
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours < 48 else f"{hours // 24}d {hours % 24:02d}h"


def headline_text(metrics: Mapping[str, float]) -> str:
    """One line: every watched number that is present."""
    parts = []
    for headline in HEADLINES:
        value = pick(metrics, headline)
        if value is None:
            continue
        text = write_number(value, headline.style)
        parts.append(
            f"{text} {headline.label}" if headline.style in ("rate", "seconds") else f"{headline.label} {text}"
        )
    return "  ".join(parts)
