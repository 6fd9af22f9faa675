"""The report: complete, self-contained, safe, and possible in every state of a run."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from rlctl.manifest import now, process_record
from rlctl.rundir import RunDirectory
from rlctl.tracking.reader import Series
from rlctl_cli.commands.report import report
from rlctl_cli.report import write_report
from rlctl_cli.report.collect import collect, pair_samples, smooth, thin
from rlctl_cli.report.html import Markup, join, tag

EVIL = "<script>alert(1)</script><img src=http://evil.example/x.png onerror=alert(2)>\"'&\x00\u202e"


def make(root: Path, name: str = "run", kind: str = "rl", **more: Any) -> RunDirectory:
    config = {"actor": {"optim": {"lr": 1e-4}}, "guards": {"rollout_probs_diff_mean_max": 0.02}, "flag": False}
    manifest: dict[str, Any] = {
        "kind": kind,
        "model": "tiny",
        "task": "sort",
        "algorithm": "grpo",
        "backend": "fsdp2",
        "device": {"type": "cpu", "name": "a processor"},
        "seeds": {"trainer": 7},
        "guards": {"off": ["weight_fingerprint"]},
        "command_line": "rlctl train quickstart actor.optim.lr=1e-4",
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "origins": {"actor.optim.lr": "override actor.optim.lr=1e-4"},
        "versions": {"torch": "2.13.0"},
        "process": process_record(),
        "resumes": [{"step": 20, "command_line": "rlctl train --resume last"}],
        "started": now(),
        "total_training_steps": 40,
    }
    return RunDirectory.create(root, name, yaml.safe_dump(config), manifest | more, exact=True)


def rl_row(step: int) -> dict[str, Any]:
    return {
        "training/global_step": step,
        "critic/score/mean": 0.5 + step / 100,
        "actor/ppo_kl": 0.001 * math.sin(step),
        "actor/entropy": 1 / (1 + step),
        "actor/grad_norm": 0.3,
        "response_length/mean": 8.5,
        "response_length/min": 8,
        "response_length/max": 9,
        "timing_s/step": 1.0,
        "timing_s/gen": 0.3,
        "timing_s/update_actor": 0.6,
        "perf/throughput": 21400.0,
        "training/rollout_probs_diff_mean": 1e-4,
        **({"val/score/mean": 0.5 + step / 80} if step % 20 == 0 else {}),
    }


def write_rows(run: RunDirectory, rows: list[dict[str, Any]]) -> None:
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(step: int, completion: str, split: str = "val", prompt: str = "p", **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "split": split,
        "prompt": prompt,
        "completion": completion,
        "answer": "a",
        "score": 0.0,
        **more,
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = make(tmp_path)
    write_rows(run, [rl_row(step) for step in range(41)])
    run.write_samples([sample(0, "early words"), sample(40, "late words", score=1.0), sample(40, "no", prompt="q")])
    run.finish("done")
    return run


class Page(HTMLParser):
    """Checks nesting and collects what could load or run something."""

    VOID = frozenset({"meta", "br", "img", "hr", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        if name not in self.VOID:
            self.open.append(name)
        self._attributes(attrs)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        self._attributes(attrs)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text += data

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
                self.addresses.append(value or "")
            if key == "id":
                self.ids.append(value or "")
            if key.startswith("on"):
                self.handlers.append(key)


def read(run: RunDirectory) -> tuple[str, Page]:
    (path, *_) = write_report(run, png=False)
    text = path.read_text()
    return text, Page(text)


def test_the_page_tells_the_story(run: RunDirectory) -> None:
    _, page = read(run)
    for words in (
        "tiny", "sort", "fsdp2", "a processor", "trainer 7", "weight_fingerprint", "done", "2.13.0",
        "rlctl train quickstart actor.optim.lr=1e-4", "git checkout 0123456789ab", "not committed",
        "rlctl train --resume last   # from step 20",
        "Reward", "KL", "Entropy", "Response length", "Gradient norm", "Where the time goes", "Throughput",
        "early words", "late words", "override actor.optim.lr=1e-4", "first to last tenth", "the run stops here",
    ):  # fmt: skip
        assert words in page.text, words
    assert page.tags.count("svg") == 8
    assert "+0.370" in page.text  # mean of steps 37..40 less that of steps 0..3
    assert page.text.index("early words") < page.text.index("late words")


def test_the_page_asks_for_nothing_outside(run: RunDirectory) -> None:
    run.write_samples([sample(0, EVIL), sample(40, EVIL)])
    text, page = read(run)
    assert page.addresses
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", text.replace("&quot;", '"').split("<pre")[0])
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text.replace("&#x27;", "'")
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(page.tags)
    assert page.handlers == []


def test_ids_are_unique_and_every_reference_has_one(run: RunDirectory) -> None:
    text, page = read(run)
    assert len(page.ids) == len(set(page.ids))
    wanted = {address[1:] for address in page.addresses} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert wanted <= set(page.ids)


def test_what_a_model_wrote_is_text(tmp_path: Path) -> None:
    run = make(tmp_path, model=EVIL, command_line=EVIL, total_training_steps=EVIL)
    write_rows(
        run, [rl_row(step) | {"timing_s/" + EVIL: 0.5, "reward/" + EVIL: 1.0, "reward/b": 0.5} for step in (1, 2)]
    )
    parts = {EVIL: 1.0, "b": 0.5}
    run.write_samples([sample(s, EVIL, prompt=EVIL, answer=EVIL, finish_reason=EVIL, components=parts) for s in (1, 2)])
    run.update_manifest(engines={"actor": {"notes": {EVIL: EVIL}}}, versions={EVIL: EVIL}, origins={"flag": EVIL})
    run.finish("failed", error=EVIL)
    text, page = read(run)
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert page.text.count("<script>alert(1)</script>") >= 8
    assert page.handlers == []
    assert all(address.startswith("#") for address in page.addresses)


def test_colours_follow_the_page(run: RunDirectory) -> None:
    text, _ = read(run)
    assert "prefers-color-scheme:dark" in text
    assert "stroke: var(--s0)" in text
    assert "#01020" not in text  # no stand-in colour is left
    assert "font-family" not in "".join(re.findall(r"<svg.*?</svg>", text, re.S))


def test_the_picture_is_a_valid_png(run: RunDirectory) -> None:
    page, picture = write_report(run)
    data = picture.read_bytes()
    assert picture.name == "report.png"
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    position, kinds, body = 8, [], b""
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, chunk = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        assert struct.unpack(">I", data[position + 8 + length : position + 12 + length])[0] == zlib.crc32(kind + chunk)
        kinds.append(kind)
        body += chunk if kind == b"IDAT" else b""
        position += 12 + length
    assert kinds[0] == b"IHDR"
    assert kinds[-1] == b"IEND"
    assert len(zlib.decompress(body)) > 1_000_000
    assert page.stat().st_size < 1_000_000


def unfinished(run: RunDirectory) -> None:
    write_rows(run, [rl_row(step) for step in range(1, 8)])
    with run.metrics_path.open("a") as file:
        file.write('{"training/global_step": 8, "critic/sc')


def failed_at_once(run: RunDirectory) -> None:
    run.finish("failed", error="the model was not found\n  next: look again")


def failed_at_step_one(run: RunDirectory) -> None:
    write_rows(run, [rl_row(1)])
    run.finish("failed", error="not finite")


def full_of_holes(run: RunDirectory) -> None:
    rows = [
        {k: (None if (step + i) % 3 == 0 else v) for i, (k, v) in enumerate(rl_row(step).items())} for step in range(30)
    ]
    for step, row in enumerate(rows):
        row["training/global_step"] = step * 7
        row["actor/entropy"] = "text"
        if step % 2:
            row.pop("timing_s/gen")
    write_rows(run, rows)


def only_validation(run: RunDirectory) -> None:
    write_rows(run, [{"training/global_step": 0, "val/score/mean": 0.5}])
    run.write_samples([sample(0, "alone")])


def strange_files(run: RunDirectory) -> None:
    write_rows(run, [{"training/global_step": 1, "critic/score/mean": 0.5}])
    run.samples_path.write_bytes(
        b'\xff\xfe\n{"step": "x"}\n{"step": 1, "completion": 5}\n{"step": 1, "completion": "fine"}\n{"st'
    )
    run.config_path.write_text("a: [")
    run.update_manifest(
        device=None, git=None, guards=None, seeds=None, versions=None, data=None, engines={"actor": None}
    )


STATES = [unfinished, failed_at_once, failed_at_step_one, full_of_holes, only_validation, strange_files]


@pytest.mark.parametrize("state", STATES)
def test_a_report_is_possible_in_every_state(tmp_path: Path, state: Any) -> None:
    run = make(tmp_path)
    state(run)
    few = state in (failed_at_once, failed_at_step_one)
    page, *picture = write_report(run, png=few)
    parsed = Page(page.read_text())
    assert len(picture) == few
    assert all(path.stat().st_size > 1000 for path in picture)
    words = {
        unfinished: ["made after step 7", "1 line of metrics.jsonl"],
        failed_at_once: ["The run failed.", "the model was not found", "nothing to draw"],
        failed_at_step_one: ["The run failed.", "not finite", "at step 1"],
        full_of_holes: ["Reward"],
        only_validation: ["alone", "only step with samples"],
        strange_files: ["fine"],
    }[state]
    for text in words:
        assert text in parsed.text


def test_a_run_whose_process_is_gone_says_so(tmp_path: Path) -> None:
    run = make(tmp_path, process={**process_record(), "start_ticks": 1})
    write_rows(run, [rl_row(step) for step in (1, 2, 3)])
    _, page = read(run)
    assert "ended without saying so" in page.text
    assert "3.0 s" in page.text  # the time that its steps took


def test_an_sft_run_shows_losses(tmp_path: Path) -> None:
    run = make(tmp_path, kind="sft", algorithm="sft")
    rows = [
        {"training/global_step": s, "train/loss": 3 - s / 20, "train/grad_norm": 1.0, "timing_s/step": 0.1}
        for s in range(1, 41)
    ]
    write_rows(
        run, [{"training/global_step": 0, "val/loss": 3.5}, *rows, {"training/global_step": 40, "val/loss": 1.25}]
    )
    _, page = read(run)
    for words in ("Training loss", "Held-out loss", "1.250", "-2.250", "Time of a step"):
        assert words in page.text
    assert "Reward" not in page.text
    assert page.tags.count("svg") == 3


def test_a_run_over_pairs_shows_accuracies(tmp_path: Path) -> None:
    run = make(tmp_path, kind="dpo", algorithm="dpo")
    rows = [
        {
            "training/global_step": s,
            "rewards/accuracies": 0.5 + s / 100,
            "train/loss": 0.7 - s / 100,
            "logps/chosen": -9.0,
        }
        for s in range(1, 41)
    ]
    ends = [{"training/global_step": s, "val/rewards/accuracies": v} for s, v in ((0, 0.5), (40, 0.875))]
    write_rows(run, [ends[0], *rows, ends[1]])
    _, page = read(run)
    for words in ("Pairs the right way round", "Held-out pairs", "0.875", "+0.375", "Log-probs of responses"):
        assert words in page.text
    assert "Mean reward" not in page.text


def test_samples_are_paired_by_prompt_and_changes_come_first() -> None:
    rows = [sample(0, "x", prompt=p) for p in "abc"] + [sample(9, "y", prompt=p, score=float(p == "c")) for p in "cba"]
    pairs, split = pair_samples([sample(1, "t", "train"), sample(2, "t", "train"), *rows])
    assert split == "val"
    assert [(p.early["prompt"], p.late["prompt"]) for p in pairs if p.early and p.late] == [
        ("c", "c"),
        ("a", "a"),
        ("b", "b"),
    ]
    pairs, split = pair_samples([sample(1, "one", "train", "p1"), sample(5, "five", "train", "p5"), sample(5, "val")])
    assert split == "train"
    assert pairs[0].early is not None
    assert pairs[0].late is not None
    assert (pairs[0].early["completion"], pairs[0].late["completion"]) == ("one", "five")
    assert pair_samples([]) == ((), "")


def test_thinning_and_smoothing_keep_the_mean_and_the_ends() -> None:
    series = Series("x", tuple(range(10_000)), tuple(float(i % 100) for i in range(10_000)))
    small = thin(series, 100)
    assert len(small.values) == 100
    assert sum(small.values) / 100 == pytest.approx(49.5)
    assert list(small.steps) == sorted(set(small.steps))
    assert thin(small, 100) is small
    assert smooth(Series("x", tuple(range(19)), (1.0,) * 19)) is None
    flat = smooth(Series("x", tuple(range(40)), (2.0,) * 40))
    assert flat is not None
    assert set(flat.values) == {2.0}


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    run = make(tmp_path)
    write_rows(run, [rl_row(step) for step in range(5000)])
    (page,) = write_report(run, png=False)
    assert page.stat().st_size < 1_500_000


def test_timing_adds_up(run: RunDirectory) -> None:
    (chart,) = (chart for chart in collect(run).charts if chart.key == "timing")
    assert [curve.label for curve in chart.curves] == ["update actor", "gen", "other"]
    assert sum(curve.series.last for curve in chart.curves) == pytest.approx(1.0)


def test_html_escapes_all_but_markup() -> None:
    assert tag("p", "<b>", Markup("<i>x</i>"), class_='a"b', hidden=True, title=None) == (
        '<p class="a&quot;b" hidden>&lt;b&gt;<i>x</i></p>'
    )
    assert join(["a", ["<"], None]) == "a&lt;"
    assert tag("meta", name="x", http_equiv="y") == '<meta name="x" http-equiv="y">'


def test_the_command(run: RunDirectory, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(report, ["run", "--root", str(tmp_path), "--json"], catch_exceptions=False)
    data = json.loads(done.stdout)
    assert data["schema"] == 1
    assert data["files"] == [str(run.path / "report.html"), str(run.path / "report.png")]
    out = tmp_path / "new" / "page.html"
    done = runner.invoke(report, [str(run.path), "-o", str(out), "--no-png"], catch_exceptions=False)
    assert done.stdout.splitlines() == [str(out)]
    assert [p.name for p in out.parent.iterdir()] == ["page.html"]


def test_a_place_that_cannot_be_written_is_a_plain_error(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "blocker").write_text("")
    target = str(tmp_path / "blocker" / "r.html")
    done = subprocess.run(
        [sys.executable, "-m", "rlctl_cli.main", "report", str(run.path), "-o", target], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "the report cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_reports_need_no_torch(run: RunDirectory) -> None:
    code = (
        "import sys; from rlctl_cli.report import write_report; from rlctl.rundir import RunDirectory\n"
        "write_report(RunDirectory.open(sys.argv[1]), png=False)\n"
        "print([m for m in ('torch', 'transformers', 'tensorboard', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
