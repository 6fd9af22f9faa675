"""The report as one HTML page: no scripts, no addresses, readable in light and in dark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rlctl import __version__
from rlctl.manifest import now
from rlctl.tracking.headline import write_duration, write_number
from rlctl.tracking.reader import Series
from rlctl.trainer_kinds import PAIR_TRAINERS, watched
from rlctl_cli.report import charts
from rlctl_cli.report.collect import Chart, SamplePair, Story
from rlctl_cli.report.html import Child, Markup, tag
from rlctl_cli.report.style import STYLE

_MAX_CHARACTERS = 2000


def render(story: Story) -> str:
    """The whole page."""
    run, manifest = story.run, story.manifest
    body: list[Child] = [
        _head(story),
        _warnings(story),
        _tiles(story),
        _charts(story),
        _samples(story),
        _reproduce(manifest),
        _config(story.config, manifest.get("origins") or {}),
        _versions(manifest),
        tag("footer", f"rlctl {__version__}, {now()}. Figures: the means of the first and last tenth of the steps."),
    ]
    # Nothing outside this file may be asked for, whatever a model wrote into it.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{run['name']} - rlctl"),
        tag("style", Markup(STYLE)),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", tag("main", body)), lang="en") + "\n"


def _head(story: Story) -> Child:
    run, manifest = story.run, story.manifest
    device = manifest.get("device") or {}
    actor = (manifest.get("engines") or {}).get("actor") or {}
    size = actor.get("num_parameters")
    facts = [
        ("model", _short(run["model"] or "-") + (f" ({write_number(size, 'rate')} parameters)" if size else "")),
        ("task", run["task"]),
        ("algorithm", manifest.get("algorithm")),
        ("backend", " + ".join(str(manifest[k]) for k in ("backend", "rollout") if manifest.get(k))),
        ("device", " ".join(str(device[k]) for k in ("type", "name") if device.get(k))),
        ("ranks", str(((manifest.get("topology") or {}).get("actor") or {}).get("world_size", 1))),
        ("seeds", ", ".join(f"{k} {v}" for k, v in (manifest.get("seeds") or {}).items())),
        ("guards off", ", ".join((manifest.get("guards") or {}).get("off", [])) or "none"),
        ("started", str(run["started"] or "-").replace("T", " ").replace("+00:00", " UTC")),
    ]
    status = tag("span", run["status"], class_=f"chip {run['status'] if run['status'] in _CHIPS else ''}")
    return tag(
        "header",
        tag("h1", run["name"], " ", status),
        tag("dl", [tag("div", tag("dt", k), tag("dd", str(v))) for k, v in facts if v], class_="facts"),
    )


def _short(path: str) -> str:
    """The end of an absolute path; a hub id or a relative path as it is. The configuration has the whole."""
    parts = PurePath(path).parts
    return path if len(parts) < 4 or not PurePath(path).is_absolute() else "/".join(("...", *parts[-2:]))


_CHIPS = ("done", "running", "failed", "died", "interrupted")


def _warnings(story: Story) -> Child:
    run, notes = story.run, []
    if run["error"]:
        notes.append(tag("div", tag("b", "The run failed. "), tag("pre", run["error"]), class_="note bad"))
    if run["status"] == "died":
        notes.append(
            tag("div", "The process ended without saying so: its last state is what is shown.", class_="note bad")
        )
    if run["status"] == "running":
        step = story.metrics.last_step or 0
        notes.append(tag("div", f"The run is going on: this page was made after step {step}.", class_="note"))
    damaged = story.metrics.damaged
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged} lines"
        notes.append(tag("div", f"{lines} of metrics.jsonl could not be read and are left out.", class_="note"))
    return notes


# ---- figures --------------------------------------------------------------------------------------------------------
def _tiles(story: Story) -> Child:
    get, run = story.metrics.series, story.run
    sft = story.manifest.get("kind") == "sft"
    pairs = story.manifest.get("kind") in PAIR_TRAINERS
    main, held_out = watched(story.manifest.get("kind"))
    label = "Training loss" if sft else "Pairs the right way round" if pairs else "Mean reward"
    tiles = [
        _change(label, get(main), "first to last tenth", tenths=True, down=sft),
        _change(
            "Held-out loss" if sft else "Held-out pairs" if pairs else "Held-out score",
            get(held_out),
            "first to last validation",
            tenths=False,
            down=sft,
        ),
        _tile("Steps", f"{run['step'] or 0}", f"of {run['total_steps'] or '?'}"),
        _tile("Time", write_duration(_seconds(story)), _per_step(story)),
        _tile("Throughput", write_number(_mean(get("perf/throughput")), "rate"), "tokens a second and device"),
    ]
    return tag("section", [tile for tile in tiles if tile], class_="tiles")


def _change(label: str, series: Series, how: str, *, tenths: bool, down: bool) -> Child:
    if not series:
        return None
    first = series.tenth(last=False) if tenths else series.first
    last = series.tenth(last=True) if tenths else series.last
    if len(series.values) == 1:
        return _tile(label, write_number(last, "score"), f"at step {series.steps[0]}")
    change = last - first
    good = (change < 0) if down else (change > 0)
    mark = tag("span", f"{change:+.3f}", class_="up" if good else "down" if change else "")
    return _tile(label, write_number(last, "score"), ["from ", write_number(first, "score"), " ", mark, f", {how}"])


def _tile(label: str, value: str, below: Child) -> Child:
    return tag("div", tag("h2", label), tag("p", value, class_="big"), tag("p", below, class_="below"), class_="tile")


def _mean(series: Series) -> float | None:
    return sum(series.values) / len(series.values) if series else None


def _seconds(story: Story) -> float | None:
    """From the manifest; for a run that died, what its steps add up to."""
    if story.run["duration_s"] is not None:
        return story.run["duration_s"]
    steps = story.metrics.series("timing_s/step")
    return sum(steps.values) if steps else None


def _per_step(story: Story) -> str:
    mean = _mean(story.metrics.series("timing_s/step", "perf/time_per_step"))
    return f"{write_number(mean, 'seconds')} s a step" if mean is not None else ""


# ---- pictures -------------------------------------------------------------------------------------------------------
def _charts(story: Story) -> Child:
    if not story.charts:
        return tag("section", tag("p", "No step has ended yet: there is nothing to draw.", class_="empty"))
    return tag("section", [_figure(chart) for chart in story.charts], class_="charts")


def _figure(chart: Chart) -> Child:
    title = tag("h3", chart.title, " ", tag("small", chart.unit))
    return tag("figure", tag("figcaption", title), Markup(charts.svg(chart)), role="img", aria_label=_spoken(chart))


def _spoken(chart: Chart) -> str:
    """The chart in words, for those who cannot see it."""
    parts = [
        f"{c.label} from {write_number(c.series.first, chart.style)} at step {c.series.steps[0]} "
        f"to {write_number(c.series.last, chart.style)} at step {c.series.steps[-1]}"
        for c in chart.curves
    ]
    return f"{chart.title}: {'; '.join(parts)}"


# ---- rollouts -------------------------------------------------------------------------------------------------------
def _samples(story: Story) -> Child:
    if not story.pairs:
        return None
    which = "validation prompts, early and late" if story.split == "val" else "training rollouts, early and late"
    which += "; those whose reward changed come first"
    if all(pair.late is None for pair in story.pairs):
        which = "the only step with samples so far"
    return tag("section", tag("h2", "Rollouts ", tag("small", which)), [_pair(pair) for pair in story.pairs])


def _pair(pair: SamplePair) -> Child:
    first = pair.early or pair.late or {}
    same = pair.late is None or pair.early is None or pair.early.get("prompt") == pair.late.get("prompt")
    sides = [_side(s, not same) for s in (pair.early, pair.late) if s is not None]
    asked = tag("div", _text("Prompt", first.get("prompt")))
    wanted = tag("div", _text("Wanted", first.get("answer"))) if first.get("answer") is not None else None
    head = tag("div", asked, wanted, class_="sides asked") if same else None
    return tag("article", head, tag("div", sides, class_="sides"), class_="pair")


def _side(sample: Mapping[str, Any], own_prompt: bool) -> Child:
    score = sample.get("score")
    good = isinstance(score, (int, float)) and score > 0
    details = [f"step {sample.get('step')}"]
    if sample.get("num_tokens") is not None:
        details.append(f"{sample['num_tokens']} tokens")
    if sample.get("finish_reason") not in (None, "stop"):
        details.append(str(sample["finish_reason"]))
    parts = sample.get("components")
    if isinstance(parts, dict) and len(parts) > 1:
        details += [f"{k} {write_number(v, 'score')}" for k, v in parts.items() if isinstance(v, (int, float))]
    badge = tag("span", f"reward {write_number(score, 'score')}", class_=f"badge {'good' if good else 'bad'}")
    head: list[Child] = (
        [_text("Prompt", sample.get("prompt")), _text("Wanted", sample.get("answer"))] if own_prompt else []
    )
    return tag(
        "div",
        tag("p", badge, " ", ", ".join(details), class_="meta"),
        head,
        _text(None, sample.get("completion")),
        class_="side",
    )


def _text(label: str | None, value: Any) -> Child:
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value)
    shown = text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + f" ... ({len(text)} characters)"
    return [tag("p", label, class_="label") if label else None, tag("pre", shown or "(empty)", tabindex="0")]


# ---- small print ----------------------------------------------------------------------------------------------------
def _reproduce(manifest: Mapping[str, Any]) -> Child:
    git = manifest.get("git") or {}
    lines = []
    if git.get("commit"):
        dirty = "   # with changes that were not committed" if git.get("dirty") else ""
        lines.append(f"git checkout {git['commit'][:12]}{dirty}")
    lines.append(str(manifest.get("command_line") or "(no command was recorded)"))
    lines += [f"{r['command_line']}   # from step {r.get('step')}" for r in _resumes(manifest)]
    data = [
        tag("tr", tag("td", str(d.get("path"))), tag("td", f"{d.get('bytes')} bytes"), tag("td", str(d.get("sha256"))))
        for d in manifest.get("data") or []
    ]
    files = tag("details", tag("summary", f"Data files ({len(data)})"), tag("table", data)) if data else None
    return tag("section", tag("h2", "To run it again"), tag("pre", "\n".join(lines), class_="code"), files)


def _resumes(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [r for r in manifest.get("resumes") or [] if isinstance(r, dict) and r.get("command_line")]


def _config(config: Mapping[str, Any], origins: Mapping[str, str]) -> Child:
    if not config:
        return None
    rows = []
    for key, value in config.items():
        origin = _origin(key, origins)
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        set_here = origin not in ("", "default")
        row = tag("tr", tag("td", key), tag("td", text), tag("td", origin), class_="set" if set_here else None)
        rows.append((not set_here, row))
    rows.sort(key=lambda pair: pair[0])  # what somebody chose first, then the defaults
    head = tag("tr", tag("th", "key"), tag("th", "value"), tag("th", "where it comes from"))
    table = tag("table", head, [row for _, row in rows])
    return tag("details", tag("summary", f"Configuration ({len(rows)} values)"), table)


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """The origin of a key, or of the nearest section above it that has one."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return ""


def _versions(manifest: Mapping[str, Any]) -> Child:
    rows = {"python": manifest.get("python"), "platform": manifest.get("platform"), **(manifest.get("versions") or {})}
    for role, engine in (manifest.get("engines") or {}).items():
        for name, note in ((engine or {}).get("notes") or {}).items():
            rows[f"{role}: {name}"] = note
    cells = [tag("tr", tag("td", str(k)), tag("td", str(v))) for k, v in rows.items() if v]
    return tag("details", tag("summary", "Versions and engines"), tag("table", cells))
