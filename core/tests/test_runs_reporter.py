"""What a run says in a log file."""

from __future__ import annotations

import io

from rlctl.tracking.headline import headline_text, write_duration, write_number
from rlctl.tracking.reporter import NullReporter, PlainReporter, Reporter


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_plain_reporter_writes_single_lines_with_an_eta() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter: Reporter = PlainReporter(stream, clock=clock)
    reporter.message("model: tiny")
    with reporter.phase("start-up"):
        clock.time += 12
    for step in (1, 2):
        with reporter.phase("generation", 32) as phase:
            phase.advance(32)
            clock.time += 0.5
        reporter.step(step, 120, {"critic/score/mean": 0.5, "actor/grad_norm": 0.25, "perf/throughput": 21400.0})
    with reporter.phase("validation", 100) as phase:
        clock.time += 31
        phase.advance(40)
        clock.time += 5
        phase.advance(60)
    reporter.close()
    assert stream.getvalue().splitlines() == [
        "model: tiny",
        "start-up: 12 s",
        "step 1/120  reward 0.500  grad norm 0.2500  21.4k tokens/s",
        "step 2/120  reward 0.500  grad norm 0.2500  21.4k tokens/s  eta 59 s",
        "validation: 40/100, 31 s so far",
        "validation: 100/100, 36 s",
    ]


def test_a_phase_that_fails_says_nothing_of_its_own() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = PlainReporter(stream, clock=clock)
    try:
        with reporter.phase("update"):
            clock.time += 60
            raise ValueError("inner")
    except ValueError:
        pass
    assert stream.getvalue() == ""


def test_null_reporter_is_silent(capsys) -> None:  # type: ignore[no-untyped-def]
    reporter: Reporter = NullReporter()
    reporter.message("x")
    with reporter.phase("p", 3) as phase:
        phase.advance()
    reporter.step(1, 2, {})
    reporter.close()
    assert capsys.readouterr() == ("", "")


def test_numbers_and_durations_for_people() -> None:
    assert [write_number(v, "small") for v in (0.0, 0.00012, 0.25, 12.3456, None)] == [
        "0", "0.00012", "0.2500", "12.3", "-",
    ]  # fmt: skip
    assert [write_number(v, "rate") for v in (12.0, 21_400.0, 3.2e6)] == ["12", "21.4k", "3.2M"]
    assert write_number(float("nan"), "score") == "nan"
    assert write_number(float("-inf"), "score") == "-inf"
    assert [write_duration(v) for v in (0.25, 42, 185, 7450, 400_000, None)] == [
        "0.2 s", "42 s", "3m 05s", "2h 04m", "4d 15h", "-",
    ]  # fmt: skip


def test_an_sft_step_shows_its_losses() -> None:
    text = headline_text({"train/loss": 1.25, "val/loss": 1.5, "train/grad_norm": 0.5, "other": 1.0})
    assert text == "loss 1.2500  val loss 1.5000  grad norm 0.5000"


def test_a_step_shows_what_the_critic_explains_and_how_much_was_sampled() -> None:
    metrics = {"critic/vf_explained_var": -0.0214, "train/num_gen_batches": 3.0}
    assert headline_text(metrics) == "explained -0.021  3 gen batches"
    assert headline_text({**metrics, "critic/vf_explained_var": float("nan")}) == "3 gen batches"
