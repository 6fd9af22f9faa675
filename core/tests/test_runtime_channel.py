"""Frames over a socket: shared memory for what is large, and no way to block each other."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.runtime.channel import SHARED_FROM, Frame, FrameReader, FrameWriter, pack
from rlctl.runtime.phases import Status, beat, current, install_sink, phase
from rlctl.runtime.status_board import StatusBoard, new_board

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


def one(reader: FrameReader) -> Frame:
    while True:
        for frame in reader.read():
            return frame


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


SIZES = [0, 1, SHARED_FROM // 8 - 200, SHARED_FROM // 8, 1 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_a_frame_arrives_as_it_was(pair: Pair, size: int) -> None:
    before = descriptors()
    tensors = [torch.arange(size), torch.tensor(True), torch.zeros(0, 3), torch.randn(2, 3).bfloat16()]
    FrameWriter(pair[0]).send(pack(b"header", tensors))
    header, got = one(FrameReader(pair[1])).open()
    assert header == b"header"
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in tensors]
    assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in got)
    del got
    assert descriptors() == before


def test_a_large_header_alone(pair: Pair) -> None:
    header = random.Random(0).randbytes(3_000_000)
    FrameWriter(pair[0]).send(pack(header))
    assert one(FrameReader(pair[1])).open() == (header, [])


def test_what_is_large_is_mapped_and_private_to_each_receiver() -> None:
    first, second = socket.socketpair(), socket.socketpair()
    sent = torch.zeros(1 << 18)
    parcel = pack(b"", [sent])
    assert len(parcel.inline) < 100
    got = []
    for a, b in (first, second):
        FrameWriter(a).send(parcel)
        got.append(one(FrameReader(b)).open()[1][0])
    with open("/proc/self/maps") as maps:
        assert sum("memfd:rlctl" in line for line in maps) >= 2
    got[0] += 1
    assert got[0].sum() == 1 << 18
    assert got[1].sum() == 0
    assert sent.sum() == 0
    # Whoever holds the descriptor cannot change what was sent either.
    assert parcel.shared is not None
    with pytest.raises(OSError):
        os.pwrite(parcel.shared.number, b"x", 0)
    for sock in (*first, *second):
        sock.close()


def test_both_sides_send_much_and_neither_waits_for_the_other(pair: Pair) -> None:
    """Far more than a socket buffers, inline: the controller's side never blocks, the other side has a reader thread."""
    ours, theirs = pair
    ours.setblocking(False)
    frames = [bytes([i % 256]) * (SHARED_FROM - 1000 - i) for i in range(200)]
    parcels = [pack(f) for f in frames]
    got_there: list[bytes] = []

    def read_there() -> None:
        reader = FrameReader(theirs)
        while len(got_there) < len(frames):
            got_there.extend(f.open()[0] for f in reader.read())

    def write_there() -> None:
        writer = FrameWriter(theirs)
        for parcel in parcels:
            writer.send(parcel)

    threads = [threading.Thread(target=read_there, daemon=True), threading.Thread(target=write_there, daemon=True)]
    for thread in threads:
        thread.start()
    writer, reader = FrameWriter(ours), FrameReader(ours)
    for parcel in parcels:
        writer.send(parcel)
    assert writer.pending  # it came back although the other side had not read everything
    got_here: list[bytes] = []
    deadline = time.monotonic() + 60
    while (writer.pending or len(got_here) < len(frames)) and time.monotonic() < deadline:
        writer.flush()
        got_here.extend(f.open()[0] for f in reader.read())
    for thread in threads:
        thread.join(timeout=60)
    assert got_here == frames
    assert got_there == frames


def test_shared_and_inline_frames_keep_their_order(pair: Pair) -> None:
    before = descriptors()
    pair[0].setblocking(False)
    pair[1].setblocking(False)
    order = random.Random(1)
    sizes = [order.choice([0, 10, 1000, 7000, 9000, 50_000]) for _ in range(300)]
    writer, reader = FrameWriter(pair[0]), FrameReader(pair[1])
    got: list[Frame] = []
    for i, size in enumerate(sizes):
        writer.send(pack(str(i).encode(), [torch.full((size,), i)]))
        if i % 7 == 0:
            got += reader.read()
    while writer.pending:
        writer.flush()
        got += reader.drain()
    got += reader.drain()
    assert [f.open()[0] for f in got] == [str(i).encode() for i in range(300)]
    for i, (frame, size) in enumerate(zip(got, sizes, strict=True)):
        (tensor,) = frame.open()[1]
        assert tensor.shape == (size,)
        assert bool((tensor == i).all())
    del got, frame, tensor
    assert descriptors() == before


def test_the_end_of_the_other_side_shows_after_what_it_sent(pair: Pair) -> None:
    FrameWriter(pair[0]).send(pack(b"last words"))
    pair[0].close()
    pair[1].setblocking(False)
    reader = FrameReader(pair[1])
    assert [f.open()[0] for f in reader.drain()] == [b"last words"]
    assert reader.closed
    with pytest.raises(ConnectionError):
        FrameWriter(pair[1]).send(pack(b"x"))


# ---- the status board -------------------------------------------------------------------------------------------------
def test_the_board_shows_the_newest_whole_status() -> None:
    board = StatusBoard(new_board())
    assert board.read() is None
    for i in range(5):
        board.write(Status("backward", {"micro_batch": i, "note": "ä"}, i, 1.5))
        assert board.read() == Status("backward", {"micro_batch": i, "note": "ä"}, i, 1.5)
    memory = board._memory
    newest = max((0, 4096), key=lambda slot: int.from_bytes(memory[slot + 8 : slot + 16], "little"))
    memory[newest + 20] ^= 1  # torn: the rank was killed while it wrote
    assert board.read() == Status("backward", {"micro_batch": 3, "note": "ä"}, 3, 1.5)
    board.write(Status("x" * 9000, {"a": "y" * 9000}, 9, 0.0))
    assert board.read() == Status("x" * 200, {}, 9, 0.0)


WRITER = """
import sys
from rlctl.runtime.phases import Status
from rlctl.runtime.status_board import open_board
board = open_board(int(sys.argv[1]))
i = 0
print("ready", flush=True)
while True:
    i += 1
    board.write(Status("phase", {"n": i, "pad": "x" * (i % 500)}, i, 0.0))
"""


def test_a_writer_killed_at_any_moment_leaves_a_readable_board() -> None:
    for delay in (0.0, 0.011, 0.023):
        number = new_board()
        board = StatusBoard(number)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(number)], pass_fds=(number,), stdout=subprocess.PIPE
        )
        os.close(number)
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 10
        while board.read() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        seen = [board.read() for _ in range(300)]
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert None not in seen
        last = board.read()
        for status in (*seen, last):
            assert status is not None
            assert status.detail == {"n": status.beats, "pad": "x" * (status.beats % 500)}


# ---- phases -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def heard() -> Iterator[list[Status]]:
    found: list[Status] = []
    install_sink(found.append)
    yield found
    install_sink(None)


def test_phases_nest_and_numbers_of_outer_ones_stay(heard: list[Status]) -> None:
    first = heard[0]
    with phase("train_batch"):
        beat(rows=3, tokens=120)
        with phase("backward", micro_batch=2, micro_batches=3, micro_rows=1, micro_tokens=40):
            assert (
                current()
                .words()
                .startswith(
                    "backward (micro-batch 2 of 3: 1 row, 40 tokens; mini-batch of this rank: 3 rows, 120 tokens) for 0 s"
                )
            )
        assert (current().phase, dict(current().detail)) == ("train_batch", {"rows": 3, "tokens": 120})
    assert (current().phase, dict(current().detail)) == (first.phase, dict(first.detail))
    assert [s.phase for s in heard[1:]] == ["train_batch", "train_batch", "backward", "train_batch", first.phase]
    beats = [s.beats for s in heard]
    assert beats == list(range(beats[0], beats[0] + len(beats)))


def test_an_error_keeps_the_innermost_phase() -> None:
    error = ValueError("x")
    with pytest.raises(ValueError), phase("outer", a=1), phase("inner", b=2):
        raise error
    assert error.rlctl_status.phase == "inner"  # type: ignore[attr-defined]
    assert error.rlctl_status.detail == {"a": 1, "b": 2}  # type: ignore[attr-defined]


def test_other_threads_count_as_progress_and_change_nothing_that_is_shown(heard: list[Status]) -> None:
    with phase("load_next"):
        before = current()

        def load() -> None:
            with phase("loading weights"):
                beat()

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        after = current()
        assert after.phase == before.phase == "load_next"
        assert after.beats == before.beats + 3
    assert "loading weights" not in {s.phase for s in heard}


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        ({}, "x"),
        ({"micro_batches": 3}, "x (3 micro-batches)"),
        ({"micro_batch": 1}, "x (micro-batch 1)"),
        ({"rows": 1}, "x (mini-batch of this rank: 1 row)"),
        ({"prompts": 2, "samples": 4}, "x (prompts 2; samples 4)"),
    ],
)
def test_words_of_a_status(detail: dict[str, int], words: str) -> None:
    assert Status("x", detail).words() == words


def test_a_dtype_that_only_the_other_side_knows_is_said_in_words() -> None:
    frame = Frame(bytearray(b'[["float3_new",[2]]]' + b"{}" + bytes(64)), 20, 2)
    with pytest.raises(RlctlError) as caught:
        frame.open()
    assert "float3_new" in str(caught.value.found)
    assert "both environments" in str(caught.value.wanted)
