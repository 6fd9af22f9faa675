"""What a run shows on a terminal and in a pipe."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rlctl.tracking.reporter import NullReporter, PlainReporter
from rlctl.trainers.run import RunResult
from rlctl_cli.live import RichReporter, make_reporter
from rlctl_cli.sparkline import sparkline
from rlctl_cli.summary import print_summary

METRICS = {
    "critic/score/mean": 0.5,
    "actor/ppo_kl": 0.001,
    "actor/entropy": 0.8,
    "actor/grad_norm": 0.3,
    "response_length/mean": 8.9,
    "perf/throughput": 21400.0,
    "timing_s/step": 0.5,
    "timing_s/gen": 0.1,
    "timing_s/update_actor": 0.3,
}


def screen(width: int, height: int = 24, steps: int = 12) -> list[str]:
    """The last picture of a run on a terminal of that size, and the messages above it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    reporter = RichReporter(console)
    reporter.message("a [message] above")
    with reporter.phase("start-up"):
        pass
    for step in range(1, steps + 1):
        with reporter.phase("generate", 512) as phase:
            phase.advance(512)
        metrics = METRICS | {"critic/score/mean": 0.5 + step / 100}
        if step == 5:
            metrics["val/score/mean"] = 0.75
        reporter.step(step, 40, metrics)
    reporter.close()
    reporter.close()
    with console.capture() as capture:
        console.print(reporter._bars, reporter._board)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [30, 44, 60, 80, 120])
def test_the_picture_fits_every_width(width: int) -> None:
    lines = screen(width)
    assert all(len(line.rstrip()) <= width for line in lines)
    text = "\n".join(lines)
    if width >= 44:
        assert "12/40" in text
    assert "reward" in text
    assert "0.620" in text
    assert "val score @5" in text
    if width >= 80:
        assert "21.4k" in text
        assert "▁" in text
        assert "█" in text
        assert "time              update_actor 75%  gen 25%" in text


def test_a_low_terminal_shows_the_first_metrics_only() -> None:
    lines = screen(80, height=10)
    assert len(lines) <= 10
    assert any("reward" in line for line in lines)


def test_close_stops_drawing_and_messages_are_not_markup() -> None:
    out = io.StringIO()
    reporter = RichReporter(Console(file=out, force_terminal=True, width=80, color_system=None))
    with pytest.raises(RuntimeError), reporter.phase("update"):
        reporter.message("see [/tmp/x] [bold]")
        raise RuntimeError
    reporter.close()
    written = out.getvalue()
    assert "see [/tmp/x] [bold]" in written
    assert written.endswith("\x1b[?25h")  # the cursor is back


def test_nan_and_holes_do_not_break_the_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    reporter = RichReporter(console)
    for step, value in enumerate([float("nan"), float("inf"), 1.0], start=1):
        reporter.step(step, 3, {"critic/score/mean": value, "actor/grad_norm": float("nan")})
    reporter.close()
    with console.capture() as capture:
        console.print(reporter._board)
    assert "nan" in capture.get()


def test_make_reporter_follows_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_reporter(quiet=True), NullReporter)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(make_reporter(), PlainReporter)


@pytest.mark.parametrize(("term", "kind"), [("xterm-256color", "RichReporter"), ("dumb", "PlainReporter")])
def test_make_reporter_on_a_real_terminal(term: str, kind: str) -> None:
    controller, terminal = pty.openpty()
    code = "import sys; from rlctl_cli.live import make_reporter; print(type(make_reporter()).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        env=os.environ | {"TERM": term},
    )
    os.close(terminal)
    os.close(controller)
    assert done.stdout.strip() == kind


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 7], 8, ascii_only=True) == "_#"
    assert sparkline(list(range(100)), 4) == "▁▃▆█"
    assert sparkline([1, 1, 1], 3) == "▄▄▄"
    assert sparkline([0, float("nan"), 7], 3) == "▁ █"
    assert sparkline([float("inf")], 3) == " "
    assert sparkline([], 3) == ""


def test_the_last_lines_say_how_to_read_what_the_critic_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "critic/vf_explained_var: 0 is as good as a constant"
    print_summary(RunResult(tmp_path, 1, history=[{"critic/vf_explained_var": -0.4}]))
    assert words in capsys.readouterr().out
    print_summary(RunResult(tmp_path, 1, history=[{"critic/score/mean": 0.5}]))
    assert words not in capsys.readouterr().out
