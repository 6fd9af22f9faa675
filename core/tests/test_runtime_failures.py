"""A rank dies, raises or hangs: how the call ends, and what is said."""

from __future__ import annotations

import time

import pytest
import runtime_toys
from runtime_toys import BrokenAtStart, PlainFailure, SlowToStart, ToyError, gone, toy_group

from rlctl.errors import BatchError, EngineError, RlctlError, UsageError
from rlctl.runtime.failures import (
    Ranks,
    WorkerError,
    error_record,
    failure_error,
    hang_error,
    is_consequence,
    primary,
    waits_for_others,
)
from rlctl.runtime.group import Limits, WorkerGroup
from rlctl.runtime.phases import Status
from rlctl.runtime.records import Death, ErrorRecord, Raised, RankPlace
from rlctl.runtime.transports.stacks import tidy

ENDS_WITHIN_S = 30.0
LIMITS = Limits(start_s=60, hang_s=60, grace_s=2, close_s=2)


def failing(what: str, limits: Limits = LIMITS, count: int = 2) -> tuple[RlctlError, WorkerGroup, float]:
    """Let rank 1 do something bad; the error, its group, and the seconds that it took."""
    group = toy_group(count, limits=limits)
    group.start()
    begun = time.monotonic()
    with pytest.raises(RlctlError) as caught:
        group.call("at", 1, what)
    took = time.monotonic() - begun
    assert group.closed
    assert [h.pid for h in group.hellos if not gone(h.pid)] == []
    return caught.value, group, took


BACKWARD = "backward (micro-batch 2 of 3: 1 row, 40 tokens; mini-batch of this rank: 3 rows, 120 tokens)"


@pytest.mark.parametrize(
    ("what", "cause"), [("kill", "killed by SIGKILL"), ("segfault", "killed by SIGSEGV"), ("exit", "exit code 3")]
)
def test_a_death_ends_the_call_with_rank_phase_and_output(what: str, cause: str) -> None:
    error, group, took = failing(what)
    assert type(error) is WorkerError
    assert error.what.startswith(f"rank 1 of pool main died during {BACKWARD}")
    assert error.found == cause
    text = str(error)
    assert "the call: at" in text
    assert "rank 0: waiting (mini-batch of this rank: 3 rows, 120 tokens)" in text
    assert f"about to {what}" in text
    if what == "segfault":
        assert "Fatal Python error: Segmentation fault" in text
        assert "runtime_toys.py" in text
    assert ("out-of-memory killer" in text) == (what == "kill")
    assert took < ENDS_WITHIN_S
    with pytest.raises(WorkerError, match="the ranks of pool main have ended already, so there is no hello"):
        group.call("hello")


def test_an_error_is_told_from_its_consequence_and_keeps_its_traceback() -> None:
    error, _, took = failing("raise")
    assert error.what.startswith(f"rank 1 of pool main failed during {BACKWARD}")
    assert "ValueError: no such luck" in error.what
    text = str(error)
    assert "then rank 0: RuntimeError: [gloo/" in text
    assert "second line" in text
    assert "runtime_toys.py" in text
    assert took < ENDS_WITHIN_S


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("refuse", BatchError, ("a bad row", "row 7", "a good one", "mend row 7", "why")),
        ("usage", UsageError, ("bad usage",)),
        ("toy", ToyError, ("toy number 5 broke", "a toy", "a tool", "buy another")),
        ("memory", EngineError, ("out of memory during backward", "lower actor.max_tokens_per_device")),
        ("slotted", WorkerError, ("SlottedError: slots",)),
        ("interrupt", WorkerError, ("KeyboardInterrupt",)),
        ("system exit", WorkerError, ("SystemExit: 7",)),
    ],
)
def test_an_error_comes_back_as_its_own_class(what: str, kind: type, words: tuple[str, ...]) -> None:
    error, _, _ = failing(what)
    assert type(error) is kind
    text = str(error)
    assert [w for w in words if w not in text] == []
    assert "rank 1 of pool main" in text
    assert BACKWARD in text or what == "slotted"
    assert error.exit_code == kind("").exit_code if kind is not ToyError else True


def test_a_hang_ends_by_its_limit_with_every_stack() -> None:
    error, _, took = failing("hang", Limits(60, hang_s=3, grace_s=1, close_s=1))
    assert 3 <= took < ENDS_WITHIN_S
    text = str(error)
    assert error.what == "rank 0, rank 1 of pool main hang during waiting: no progress for 3 s"
    assert f"rank 1: {BACKWARD}" in text
    assert "rank 0: waiting (mini-batch of this rank: 3 rows, 120 tokens)" in text
    assert "stack of rank 1:" in text
    assert text.count("runtime_toys.py") >= 2
    assert "_read" not in text


def test_a_hang_that_holds_the_interpreter_shows_its_stack_too() -> None:
    error, _, took = failing("hold", Limits(60, hang_s=3, grace_s=1, close_s=1))
    assert took < ENDS_WITHIN_S
    assert "stack of rank 1:" in str(error)
    assert "in at" in str(error)
    assert BACKWARD in str(error)


def test_one_rank_that_goes_on_is_no_hang() -> None:
    group = toy_group(2, limits=Limits(60, hang_s=1.5, grace_s=1, close_s=5))
    group.start()
    assert group.call("long_with_beats", 3.0) == [None, None]
    group.close()


def test_a_death_between_calls_shows_at_the_next() -> None:
    group = toy_group(2, limits=LIMITS)
    group.start()
    assert group.call("lag", 1) == [1, 1]
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not gone(group.hellos[1].pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(WorkerError, match="rank 1 of pool main died during idle") as error:
        group.call("at", 0, "hang")
    assert error.value.found == "killed by SIGKILL"
    assert gone(group.hellos[0].pid)


@pytest.mark.parametrize(
    ("worker", "kind", "words"),
    [
        (BrokenAtStart, UsageError, ("rank 1 cannot start", "a broken toy", "raised on rank 1 of pool main")),
        (PlainFailure, WorkerError, ("failed during start-up", "no_such_library_anywhere", "runtime_toys.py")),
        (
            SlowToStart,
            WorkerError,
            ("rank 1 of pool main hangs during start-up", "no progress for 5 s", "runtime_toys.py"),
        ),
    ],
)
def test_a_rank_that_does_not_start_says_why(worker: type, kind: type, words: tuple[str, ...]) -> None:
    group = toy_group(2, worker, Limits(start_s=5 if worker is SlowToStart else 60, grace_s=2, close_s=2))
    with pytest.raises(RlctlError) as caught:
        group.start()
    assert type(caught.value) is kind
    assert [w for w in words if w not in str(caught.value)] == []
    assert "resume" not in str(caught.value)


def test_a_worker_that_cannot_be_imported_says_so() -> None:
    class Nowhere(runtime_toys.ToyWorker):
        pass

    Nowhere.__module__ = "runtime_toys_that_are_not_there"
    Nowhere.__qualname__ = "Nowhere"
    with pytest.raises(RlctlError, match="a message names a class that is not here") as error:
        toy_group(1, Nowhere).start()
    assert "No module named 'runtime_toys_that_are_not_there'" in str(error.value)


# ---- without processes ------------------------------------------------------------------------------------------------
def raised(rank: int, type_: str, what: str, mendable: bool = False) -> Raised:
    return Raised(rank, 1, ErrorRecord(type_, what, mendable=mendable))


GLOO = raised(0, "RuntimeError", "[gloo/transport/tcp/pair.cc:537] Connection closed by peer")
NCCL = raised(0, "DistBackendError", "NCCL communicator was aborted on rank 0.")
WATCHDOG = Death(0, "killed by SIGABRT")


@pytest.mark.parametrize("consequence", [GLOO, NCCL, WATCHDOG], ids=["gloo", "nccl", "watchdog"])
@pytest.mark.parametrize(
    "cause",
    [
        Death(1, "killed by SIGKILL"),
        Death(1, "exit code 1"),
        raised(1, "ValueError", "bad"),
        raised(1, "BatchError", "a row is too long", mendable=True),
    ],
    ids=["killed", "exit", "error", "refusal"],
)
def test_the_cause_is_found_in_any_order(consequence: Raised | Death, cause: Raised | Death) -> None:
    assert is_consequence(consequence)
    assert not is_consequence(cause)
    assert primary([consequence, cause]) is cause
    assert primary([cause, consequence]) is cause
    assert primary([consequence]) is consequence


def test_the_death_of_a_rank_that_has_spoken_is_no_failure_of_its_own() -> None:
    said = raised(1, "ImportError", "no module")
    ranks = Ranks("main", {}, [None, None])
    error = failure_error(ranks, [said, Death(1, "exit code 1")], "start-up")
    assert "ImportError: no module" in error.what
    assert "exit code 1" not in str(error)


def places(count: int) -> dict[int, RankPlace]:
    return {
        r: RankPlace(r, r // 2, count // 2, r % 2 == 0, {"pp": 0, "dp_shard": r // 2, "usp": r % 2})
        for r in range(count)
    }


def test_ranks_are_named_by_the_axes_that_tell_them_apart() -> None:
    ranks = Ranks("main", places(4), [Status("forward", {"rows": 1}), None, None, None])
    assert ranks.name(3) == "rank 3 (dp_shard 1, usp 1)"
    assert ranks.states()[0] == "rank 0 (dp_shard 0, usp 0), dp rank 0 of 2: forward (mini-batch of this rank: 1 row)"
    assert ranks.states()[3] == "rank 3 (dp_shard 1, usp 1), dp rank 1 of 2: has said nothing yet"


def test_an_error_that_all_ranks_raise_is_said_once() -> None:
    failures = [raised(r, "ConfigError", "heads do not divide", mendable=True) for r in range(4)]
    error = failure_error(Ranks("main", places(4), [Status("init")] * 4), failures, "build")
    assert error.details == ("raised on all 4 ranks during idle",)


def test_the_rank_outside_the_collective_is_the_one_that_hangs() -> None:
    collective = (
        'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 1 in f'
    )
    alone = 'Current thread 0x1 (most recent call first):\n  File "/x/model.py", line 1 in step'
    assert waits_for_others(collective)
    assert not waits_for_others(alone)
    statuses = [Status("reduce"), Status("forward"), Status("reduce")]
    error = hang_error(
        Ranks("main", {}, statuses), [0, 1, 2], 5, {0: collective, 1: alone, 2: collective}, "train_batch"
    )
    assert error.what == (
        "rank 1 of pool main hangs during forward: no progress for 5 s; ranks 0, 2 wait in a collective"
    )
    every = hang_error(Ranks("main", {}, statuses), [0, 1, 2], 5, dict.fromkeys(range(3), collective), "train_batch")
    assert every.what.startswith("rank 0, rank 1, rank 2 of pool main hang during reduce")


def test_where_collectives_run_beside_the_program_the_rank_behind_is_the_one_that_hangs() -> None:
    statuses = [Status("forward and backward", {"micro_batch": 3}), Status("backward", {"micro_batch": 2})]
    error = hang_error(Ranks("main", {}, statuses), [0, 1], 8, dict.fromkeys((0, 1), ""), "train_batch")
    assert error.what == "rank 1 of pool main hangs during backward: no progress for 8 s; rank 0 is further on"
    alike = hang_error(Ranks("main", {}, [statuses[0]] * 2), [0, 1], 8, {}, "train_batch")
    assert alike.what.startswith("rank 0, rank 1 of pool main hang during forward and backward: no progress")


def test_an_error_record_keeps_what_the_phase_was() -> None:
    error = ValueError("x")
    error.rlctl_status = Status("backward", {"micro_batch": 2})  # type: ignore[attr-defined]
    record = error_record(error, "traceback", Status("idle"))
    assert (record.type, record.what, record.mendable, record.status.phase) == ("ValueError", "x", False, "backward")
    assert record.kinds[0] == "builtins:ValueError"
    assert error_record(ValueError(), "", Status()).what == "ValueError"


def test_stacks_are_told_from_what_else_was_printed() -> None:
    frames = [f'  File "model.py", line {i} in f{i}' for i in range(30)]
    text = "\n".join(
        [
            "Thread 0x01 (most recent call first):", '  File "/x/worker_main.py", line 3 in _read', "a line between",
            "Thread 0x02 (most recent call first):", '  File "loader.py", line 1 in load',
            "Current thread 0x03 (most recent call first):", *frames, "step 3/9",
        ]
    )  # fmt: skip
    lines = tidy(text).splitlines()
    assert lines[0] == "Current thread 0x03 (most recent call first):"
    assert lines[1:25] == frames[:24]
    assert lines[25:] == ["  ... 6 more", "Thread 0x02 (most recent call first):", '  File "loader.py", line 1 in load']
