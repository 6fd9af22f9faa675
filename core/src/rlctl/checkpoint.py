"""Save and load a run's state so that a crash at any moment costs at most the checkpoint being written.

A checkpoint is written to ``checkpoints/.tmp-step_XXXXXXXX``, synced, described by a manifest with the size and sha256
of every file, and only then renamed to ``step_XXXXXXXX``. Imports no torch: the engine writes its own part.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlctl import files
from rlctl.errors import CheckpointError, RlctlError
from rlctl.manifest import now, versions

if TYPE_CHECKING:
    from rlctl.engine_records import MeshInfo
    from rlctl.rundir import RunDirectory


class Saves(Protocol):
    """What a checkpoint asks of an engine: one rank's own, or the controller's view of all ranks."""

    mesh: MeshInfo | None

    def reduce(self, values: Sequence[float], op: str = "sum") -> list[float]: ...
    def save_state(self, path: Path) -> None: ...
    def load_state(self, path: Path) -> None: ...


SCHEMA = 1
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Args:
        path: its directory.
        step: the step after which it was written.
        manifest: its description (``files``, ``world_size``, ``versions``, ``created``).
        skipped: newer checkpoints that are damaged or incomplete, each with its reason.
    """

    path: Path
    step: int
    manifest: Mapping[str, Any]
    skipped: tuple[str, ...] = ()

    @property
    def engine_path(self) -> Path:
        return self.path / "engine"

    @property
    def parts(self) -> dict[str, int]:
        """Name of each further engine whose state is here, in a directory of its own, and the ranks that wrote it."""
        return dict(self.manifest.get("parts") or {})

    def state(self) -> dict[str, Any]:
        """The trainer's own part."""
        return json.loads((self.path / "trainer.json").read_text(encoding="utf-8"))


def save_checkpoint(
    run: RunDirectory,
    step: int,
    engine: Saves,
    state: Mapping[str, Any],
    keep: int,
    parts: Mapping[str, Saves] | None = None,
) -> Checkpoint:
    """Write the state after ``step`` and delete all but the newest ``keep`` checkpoints.

    The controller calls it, or every rank does with an engine of its own; the first rank publishes. ``state`` is JSON
    data (counters, sampler state, best score).

    Args:
        parts: further engines that learn (``critic``), by the name of the directory of their state.

    Raises:
        CheckpointError: on every rank when any rank could not write; earlier checkpoints are untouched.
    """
    assert keep >= 1, keep
    first = engine.mesh is None or engine.mesh.rank == 0
    target = run.checkpoints / f"step_{step:08d}"
    beside = run.checkpoints / f".tmp-{target.name}"
    others = dict(parts or {})
    assert "engine" not in others, "that is the first engine's directory"

    def prepare() -> None:
        if first:
            shutil.rmtree(beside, ignore_errors=True)
            for name in ("engine", *others):
                (beside / name).mkdir(parents=True)

    def publish() -> None:
        if not first:
            return
        body = json.dumps(files.plain(state), indent=2, allow_nan=False)
        (beside / "trainer.json").write_text(body, encoding="utf-8")
        listed = {
            path.relative_to(beside).as_posix(): {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
            for path in sorted(beside.rglob("*"))
            if path.is_file()
        }
        head = {"schema": SCHEMA, "step": step, "world_size": _ranks(engine), "created": now(), "versions": versions()}
        if others:
            head["parts"] = {name: _ranks(other) for name, other in others.items()}
        files.write_json(beside / "manifest.json", {**head, "files": listed})
        files.publish_directory(beside, target)

    # Each part ends by agreeing on success, so that no rank goes on to wait for one that failed.
    saves = [partial(saved.save_state, beside / name) for name, saved in {"engine": engine, **others}.items()]
    for part in (prepare, *saves, publish):
        _together(engine, part, step, beside if first else None)
    if first:
        _prune(run.checkpoints, step, keep)
    return Checkpoint(target, step, _read_manifest(target))


def latest_checkpoint(
    path: Path, *, deep: bool = True, notice: Callable[[str], None] | None = None
) -> Checkpoint | None:
    """The newest complete checkpoint, or None when there is none.

    Args:
        path: a run directory, its ``checkpoints`` directory, or one checkpoint.
        deep: compare sha256 as well as sizes. It reads every byte, as loading will.
        notice: told of each damaged checkpoint that is passed over; default: a log warning.
    """
    notice = notice or logging.getLogger("rlctl").warning
    skipped: list[str] = []
    for step, candidate in reversed(list_checkpoints(path)):
        problem = find_damage(candidate, deep=deep)
        if problem is None:
            return Checkpoint(candidate, step, _read_manifest(candidate), tuple(skipped))
        skipped.append(f"{candidate.name}: {problem}")
        notice(f"checkpoint {candidate} is not used: {problem}")
    return None


def load_checkpoint(checkpoint: Checkpoint, engine: Saves, parts: Mapping[str, Saves] | None = None) -> dict[str, Any]:
    """Load the engines' parts and return the trainer's.

    Args:
        parts: as :func:`save_checkpoint` was given.

    Raises:
        CheckpointError: an engine refuses its part, or it was written by another number of ranks, or it is not there.
    """
    others = dict(parts or {})
    require_world_size(checkpoint, _ranks(engine), {name: _ranks(other) for name, other in others.items()})
    engine.load_state(checkpoint.engine_path)
    for name, other in others.items():
        other.load_state(checkpoint.path / name)
    return checkpoint.state()


def require_world_size(checkpoint: Checkpoint, world_size: int, parts: Mapping[str, int] | None = None) -> None:
    """Compare the ranks that wrote a checkpoint with those that would read it.

    Args:
        parts: ranks of each further engine.

    Raises:
        CheckpointError: they are not as many, or an engine has no state there.
    """
    saved = checkpoint.manifest.get("world_size", 1)
    if saved != world_size:
        raise CheckpointError(
            f"{checkpoint.path} was written by another number of ranks",
            found=f"{world_size} ranks now",
            wanted=f"{saved} ranks",
            next=f"resume with --nproc {saved}",
        )
    for name, ranks in (parts or {}).items():
        if name not in checkpoint.parts:
            raise CheckpointError(
                f"{checkpoint.path} has no {name}",
                found=", ".join(["engine", *checkpoint.parts]),
                wanted=f"the state of the {name} that this run trains",
                next="resume with the settings that the run had, or start a new run",
            )
        if checkpoint.parts[name] != ranks:
            raise CheckpointError(
                f"the {name} of {checkpoint.path} was written by another number of ranks",
                found=f"{ranks} ranks now",
                wanted=f"{checkpoint.parts[name]} ranks",
                next=f"give the pool of the {name} {checkpoint.parts[name]} ranks",
            )


def _ranks(engine: Saves) -> int:
    return 1 if engine.mesh is None else engine.mesh.world_size


def find_damage(checkpoint: Path, *, deep: bool = True) -> str | None:
    """Why a checkpoint cannot be used, or None when it is complete."""
    try:
        listed = _read_manifest(checkpoint).get("files")
    except CheckpointError as error:
        return error.found or error.what
    if not isinstance(listed, dict) or "trainer.json" not in listed:
        return "its manifest lists no files"
    for name, wanted in listed.items():
        file = checkpoint / name
        if not isinstance(wanted, dict) or not {"bytes", "sha256"} <= set(wanted):
            return f"its manifest has no size and sha256 of {name}"
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != wanted["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, {wanted['bytes']} were written"
        if deep and files.sha256(file) != wanted["sha256"]:
            return f"{name} has changed since it was written (sha256 differs)"
    return None


def list_checkpoints(path: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint, complete or not, oldest first; ``path`` as for :func:`latest_checkpoint`."""
    if match := _NAME.fullmatch(path.name):
        return [(int(match[1]), path)] if path.is_dir() else []
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not root.is_dir():
        return []
    return sorted((int(m[1]), p) for p in root.iterdir() if (m := _NAME.fullmatch(p.name)) and p.is_dir())


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "manifest.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is incomplete", found="it has no manifest.json") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is damaged", found=f"manifest.json: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{checkpoint} is damaged", found="manifest.json is no object")
    return value


def _prune(root: Path, step: int, keep: int) -> None:
    """Delete checkpoints older than the ``keep`` newest complete ones up to ``step``. Damaged ones count for nothing."""
    older = [(s, p) for s, p in list_checkpoints(root) if s < step]
    kept = 1
    for _, path in reversed(older):
        if kept < keep and find_damage(path, deep=False) is None:
            kept += 1
        elif kept >= keep:
            shutil.rmtree(path, ignore_errors=True)


def _together(engine: Saves, part: Callable[[], None], step: int, beside: Path | None) -> None:
    failure: BaseException | None = None
    try:
        part()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):  # leave no half-written directory behind
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    except BaseException as error:
        # An engine may raise anything when a disk is full (torch's CheckpointException is no Exception), and all ranks
        # must hear of it.
        failure = error
    failed = engine.reduce([1.0 if failure is not None else 0.0], "max")[0] if engine.mesh is not None else 0.0
    if failure is None and not failed:
        return
    if beside is not None:
        shutil.rmtree(beside, ignore_errors=True)
    if failure is None:
        raise CheckpointError(f"the checkpoint of step {step} was not written", found="another rank could not save")
    if isinstance(failure, RlctlError):
        raise failure
    raise CheckpointError(
        f"the checkpoint of step {step} was not written; earlier ones are intact",
        found=_summary(failure),
        next=_remedy(failure),
    ) from failure


def _summary(error: BaseException) -> str:
    """The error in one line; of a message that quotes a traceback, the line that the traceback ends with."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):
        return lines[-1].strip()
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _remedy(error: BaseException) -> str:
    cause = files.disk_fault(error)
    return f"{cause}, then resume" if cause else "see the cause above; rlctl --debug shows where"
