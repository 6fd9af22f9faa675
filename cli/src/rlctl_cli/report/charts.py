"""Charts as inline SVG that follows a page's colours, and as PNG. One drawing function for both.

For SVG every colour is drawn as a stand-in that no chart uses otherwise, then replaced by a CSS variable: so one page
is readable in light and in dark, without scripts.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.tracking.headline import write_number
from rlctl_cli.report.collect import Chart, Curve, smooth, thin

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Palette:
    """Colours of a chart."""

    ink: str
    muted: str
    grid: str
    surface: str
    series: tuple[str, ...]


LIGHT = Palette(
    "#1c2330", "#5b6675", "#e4e8ee", "#ffffff",
    ("#2f6fed", "#e0762f", "#1f9d72", "#a24bd1", "#c9973a", "#d4447c", "#7a8797"),
)  # fmt: skip
DARK = Palette(
    "#e8ecf3", "#9aa6b6", "#2c3543", "#171d27",
    ("#6f9dff", "#f0975a", "#4fc79b", "#c384ea", "#e0b865", "#ee7aa6", "#98a4b3"),
)  # fmt: skip
_STAND_IN = Palette("#010201", "#010202", "#010203", "#010204", tuple(f"#01020{5 + i:x}" for i in range(7)))
_VARIABLES = {
    _STAND_IN.ink: "ink",
    _STAND_IN.muted: "muted",
    _STAND_IN.grid: "grid",
    _STAND_IN.surface: "surface",
    **{colour: f"s{i}" for i, colour in enumerate(_STAND_IN.series)},
}


def css_variables(palette: Palette) -> str:
    """The palette as CSS custom properties, as :func:`svg` refers to them."""
    named = {"ink": palette.ink, "muted": palette.muted, "grid": palette.grid, "surface": palette.surface}
    named |= {f"s{i}": colour for i, colour in enumerate(palette.series)}
    return ";".join(f"--{name}:{colour}" for name, colour in named.items())


def svg(chart: Chart) -> str:
    """One chart as an ``<svg>`` element without ids, scripts or addresses that could meet others on a page."""
    from matplotlib.figure import Figure

    with _settings():
        figure = Figure(figsize=(5.4, 2.7))
        axes = figure.subplots()
        draw(axes, chart, _STAND_IN)
        figure.subplots_adjust(left=0.115, right=0.975, top=0.95, bottom=0.11)
        buffer = io.StringIO()
        bare = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=bare)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\s(xmlns(:\w+)?)="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    for colour, name in _VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    # Ids are unique within a page only if each chart brings its own name.
    text = re.sub(r'\bid="', f'id="{chart.key}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{chart.key}-", text)
    return re.sub(r">\s+<", "><", text).strip()


def png(charts: Sequence[Chart], title: str, path: Path) -> None:
    """All charts on one sheet, in light colours."""
    from matplotlib.figure import Figure

    columns = 2 if len(charts) > 1 else 1
    rows = max(1, -(-len(charts) // columns))
    with _settings():
        figure = Figure(figsize=(6.0 * columns, 2.9 * rows + 0.6), facecolor=LIGHT.surface)
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, chart in zip(grid, charts, strict=False):
            draw(axes, chart, LIGHT)
            axes.set_title(f"{chart.title}, {chart.unit}" if chart.unit else chart.title, loc="left", fontsize=10)
        for axes in grid[len(charts) :]:
            axes.set_axis_off()
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold", color=LIGHT.ink)
        figure.tight_layout(rect=(0, 0, 1, 0.985))
        figure.savefig(path, format="png", dpi=130)


def draw(axes: Axes, chart: Chart, palette: Palette) -> None:
    """Draw one chart."""
    if chart.log and all(value > 0 for curve in chart.curves for value in curve.series.values):
        axes.set_yscale("log")
    if chart.limit is not None:
        value, label = chart.limit
        axes.axhline(value, color=palette.series[5], linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            label, (0.99, value), xycoords=("axes fraction", "data"), xytext=(0, -3), textcoords="offset points",
            ha="right", va="top", fontsize=8, color=palette.muted,
        )  # fmt: skip
    if chart.stacked:
        _draw_stacked(axes, chart, palette)
    else:
        for curve, colour in zip(chart.curves, palette.series, strict=False):
            _draw_curve(axes, curve, colour)
    _dress(axes, chart, palette)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    if curve.low and curve.high and curve.low.steps == curve.high.steps:
        low, high = thin(curve.low), thin(curve.high)
        axes.fill_between(low.steps, low.values, high.values, color=colour, alpha=0.13, linewidth=0)
    shown = thin(curve.series)
    mean = None if curve.points else smooth(shown)
    marker = "o" if curve.points or len(shown.values) < 3 else None
    if mean is None:
        axes.plot(
            shown.steps, shown.values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=curve.label
        )
        return
    axes.plot(shown.steps, shown.values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(mean.steps, mean.values, color=colour, linewidth=1.8, label=curve.label)


def _draw_stacked(axes: Axes, chart: Chart, palette: Palette) -> None:
    thinned = [thin(curve.series, 60) for curve in chart.curves]  # a stack is for shares, not for single steps
    labels = [curve.label for curve in chart.curves]
    colours = [palette.series[6] if label == "other" else palette.series[i % 6] for i, label in enumerate(labels)]
    if len(thinned[0].steps) == 1:
        bottom = 0.0
        for series, label, colour in zip(thinned, labels, colours, strict=True):
            axes.bar(series.steps, series.values, bottom=bottom, color=colour, label=label, width=0.3, alpha=0.85)
            bottom += series.values[0]
        return
    axes.stackplot(
        thinned[0].steps, [s.values for s in thinned], labels=labels, colors=colours, alpha=0.85, linewidth=0
    )


def _dress(axes: Axes, chart: Chart, palette: Palette) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette.grid)
    axes.grid(axis="y", color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=palette.muted, labelsize=8.5, length=0, which="both")
    axes.title.set_color(palette.ink)
    axes.annotate(
        "step", (0, 0), xycoords="axes fraction", xytext=(-8, -3.5), textcoords="offset points", ha="right", va="top",
        fontsize=8.5, color=palette.muted,
    )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    if chart.span is not None:  # one scale for all charts of a page
        first, last = chart.span
        room = max(0.02 * (last - first), 0.25)
        axes.set_xlim(first - room, last + room)
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, chart.style)))
        axes.margins(y=0.12)
        if chart.stacked or chart.style in ("rate", "seconds"):
            axes.set_ylim(bottom=0)
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if len(chart.curves) > 1:
        handles, labels = axes.get_legend_handles_labels()
        columns = 3 if chart.stacked else 2
        axes.legend(
            handles, labels, loc="upper left" if chart.stacked else "best", fontsize=8.5, frameon=False, ncols=columns,
            labelcolor=palette.ink, handlelength=1.2, columnspacing=1.2,
        )  # fmt: skip
        if chart.stacked:
            axes.set_ylim(0, axes.get_ylim()[1] * (1.1 + 0.13 * -(-len(labels) // columns)))


def _tick(value: float, style: str) -> str:
    if style == "rate":
        return write_number(value, "rate")
    return f"{value:.6g}"


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    # Text stays text (small, selectable, in the page's font) and a dollar sign in a metric's name is one; ids are the
    # same each time the page is made.
    chosen: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "rlctl", "font.size": 9, "text.parse_math": False}
    with matplotlib.rc_context(chosen), warnings.catch_warnings():
        # A name in a script that the measuring font lacks: the browser has a font for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
