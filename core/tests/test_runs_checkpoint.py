"""Checkpoints: published whole or not at all, damage is found, the newest N are kept."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.checkpoint import find_damage, latest_checkpoint, load_checkpoint, save_checkpoint
from rlctl.errors import CheckpointError
from rlctl.rundir import RunDirectory


class FileEngine:
    """An engine whose state is one file of bytes: the part of the facade that checkpoints use."""

    def __init__(self, content: bytes = b"weights", rank: int = 0, world_size: int = 1) -> None:
        self.content = content
        self.mesh = SimpleNamespace(rank=rank, world_size=world_size)
        self.peers_fail = False

    def save_state(self, path: Path) -> None:
        assert not list(path.iterdir())
        (path / "ranks").mkdir()
        (path / "ranks" / f"rank{self.mesh.rank}.bin").write_bytes(self.content)

    def load_state(self, path: Path) -> None:
        self.content = (path / "ranks" / f"rank{self.mesh.rank}.bin").read_bytes()

    def reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        return [1.0] if self.peers_fail else list(values)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "r", "", {})


def save(run: RunDirectory, step: int, engine: Any = None, keep: int = 2, **state: Any) -> None:
    save_checkpoint(run, step, engine or FileEngine(b"w%d" % step), {"step": step, **state}, keep)


def names(run: RunDirectory) -> list[str]:
    return sorted(p.name for p in run.checkpoints.iterdir())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The operating system itself refuses to write more than ``size`` bytes to one file, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_saved_state_comes_back(run: RunDirectory) -> None:
    save(run, 20, FileEngine(b"abc"), sampler={"epoch": 1, "order": [3, 1, 2]}, best=float("nan"))
    found = latest_checkpoint(run.path)
    assert found is not None
    assert (found.step, found.path.name) == (20, "step_00000020")
    engine: Any = FileEngine(b"")
    assert load_checkpoint(found, engine) == {"step": 20, "sampler": {"epoch": 1, "order": [3, 1, 2]}, "best": None}
    assert engine.content == b"abc"
    assert set(found.manifest["files"]) == {"engine/ranks/rank0.bin", "trainer.json"}
    assert latest_checkpoint(run.checkpoints) == latest_checkpoint(found.path) == found


def test_only_the_newest_are_kept(run: RunDirectory) -> None:
    for step in (10, 20, 30, 40):
        save(run, step, keep=2)
    assert names(run) == ["step_00000030", "step_00000040"]


def test_damaged_ones_do_not_count_as_kept(run: RunDirectory) -> None:
    for step in (10, 20):
        save(run, step, keep=3)
    (run.checkpoints / "step_00000020" / "engine" / "ranks" / "rank0.bin").unlink()
    save(run, 30, keep=2)
    assert "step_00000010" in names(run)  # the only complete one besides step 30


@pytest.mark.parametrize("limit", [0, 4096])
def test_a_full_disk_leaves_the_previous_checkpoint(run: RunDirectory, limit: int) -> None:
    save(run, 10)
    with largest_file(limit), pytest.raises(CheckpointError, match="step 20 was not written") as caught:
        save(run, 20, FileEngine(b"x" * 100_000))
    assert "disk space" in (caught.value.next or "")
    assert names(run) == ["step_00000010"]
    found = latest_checkpoint(run.path)
    assert found is not None
    assert found.step == 10
    save(run, 20)  # and the next attempt works
    assert names(run) == ["step_00000010", "step_00000020"]


def test_a_failing_sync_publishes_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 10)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError):
        save(run, 20)
    assert names(run) == ["step_00000010"]


def test_a_failing_rename_puts_the_older_one_of_that_step_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 10, FileEngine(b"first"))
    rename = os.rename

    def fail_publishing(source: Any, target: Any) -> None:
        if ".tmp-" in str(source):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_publishing)
    with pytest.raises(CheckpointError, match="was not written"):
        save(run, 10, FileEngine(b"second"))
    monkeypatch.setattr(os, "rename", rename)
    assert names(run) == ["step_00000010"]
    assert (run.checkpoints / "step_00000010/engine/ranks/rank0.bin").read_bytes() == b"first"
    save(run, 10, FileEngine(b"third"))
    assert names(run) == ["step_00000010"]
    assert (run.checkpoints / "step_00000010/engine/ranks/rank0.bin").read_bytes() == b"third"


def test_an_interrupt_leaves_no_part(run: RunDirectory) -> None:
    class Interrupted(FileEngine):
        def save_state(self, path: Path) -> None:
            super().save_state(path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(run, 10, Interrupted())
    assert names(run) == []


def test_damage_is_found_and_named(run: RunDirectory) -> None:
    for step in (10, 20, 30, 40, 50):
        save(run, step, keep=9)
    file = "engine/ranks/rank0.bin"
    (run.checkpoints / "step_00000050" / "manifest.json").unlink()
    (run.checkpoints / "step_00000040" / file).write_bytes(b"W40")  # same size, other bytes
    (run.checkpoints / "step_00000030" / file).write_bytes(b"w")
    (run.checkpoints / "step_00000020" / "manifest.json").write_text('{"step": 20')
    (run.checkpoints / ".tmp-step_00000060").mkdir()
    told: list[str] = []
    found = latest_checkpoint(run.path, notice=told.append)
    assert found is not None
    assert found.step == 10
    assert [text.split(":")[0] for text in found.skipped] == [f"step_000000{n}" for n in (50, 40, 30, 20)]
    for text, word in zip(told, ("no manifest.json", "sha256", "1 bytes, 3 were", "manifest.json"), strict=True):
        assert word in text
    assert find_damage(run.checkpoints / "step_00000040", deep=False) is None


def test_no_checkpoint_is_none(run: RunDirectory, tmp_path: Path) -> None:
    assert latest_checkpoint(run.path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_another_world_size_is_refused(run: RunDirectory) -> None:
    save(run, 10)
    found = latest_checkpoint(run.path)
    assert found is not None
    engine: Any = FileEngine(world_size=2)
    with pytest.raises(CheckpointError, match="another number of ranks") as caught:
        load_checkpoint(found, engine)
    assert caught.value.next == "resume with --nproc 1"


def test_a_rank_hears_of_another_ranks_failure(run: RunDirectory) -> None:
    save(run, 10)
    engine = FileEngine()
    engine.peers_fail = True
    with pytest.raises(CheckpointError, match="step 20 was not written") as caught:
        save(run, 20, engine)
    assert caught.value.found == "another rank could not save"
    assert names(run) == ["step_00000010"]


def test_only_the_first_rank_publishes(run: RunDirectory) -> None:
    (run.checkpoints / ".tmp-step_00000010" / "engine").mkdir(parents=True)
    other: Any = FileEngine(rank=1, world_size=2)
    with pytest.raises(CheckpointError, match="incomplete"):  # nothing under the final name: the first rank did not run
        save_checkpoint(run, 10, other, {}, 2)
    assert names(run) == [".tmp-step_00000010"]
