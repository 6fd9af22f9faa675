"""The directory that a run leaves behind.

::

    config.yaml     what ran, every default filled in
    manifest.json   versions, seeds, data hashes, device, guards, command, status (see :mod:`rlctl.manifest`)
    metrics.jsonl   one flat object a step
    samples.jsonl   rollouts: step, split, prompt, completion, answer, score, components, num_tokens, finish_reason
    tensorboard/    checkpoints/step_00000020/    export/    best/    warm_start/    report.html    report.png
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlctl import files
from rlctl.errors import CheckpointError
from rlctl.manifest import now, process_is_alive, process_record, seconds_since, typed_command
from rlctl.tracking.reader import STEP, TIME, last_values

STATUSES = ("running", "done", "failed", "interrupted")


def default_root() -> Path:
    """``$RLCTL_RUNS_DIR``, or ``runs`` in the current directory."""
    return Path(os.environ.get("RLCTL_RUNS_DIR") or "runs").expanduser()


class RunDirectory:
    """One run on disk. Make it with :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---- making -----------------------------------------------------------------------------------------------
    @classmethod
    def create(
        cls, root: Path | None, name: str, resolved_yaml: str, manifest: Mapping[str, Any], *, exact: bool = False
    ) -> RunDirectory:
        """Make a new directory; an existing one is never touched.

        Args:
            root: parent directory; None takes :func:`default_root`.
            name: recipe or experiment name; with ``exact`` the directory's own name.
            resolved_yaml: text of ``config.yaml``.
            manifest: what :func:`rlctl.manifest.build_manifest` returns; ``status`` becomes ``running``.
            exact: take ``name`` as it is; else what no file name should hold becomes ``-``, and ``-YYYYmmdd-HHMMSS``
                (local time) is appended. Either way a name that is taken gets ``-2``, ``-3`` and so on.

        Raises:
            CheckpointError: the directory cannot be made or written.
        """
        root = default_root() if root is None else Path(root).expanduser()
        safe = "run" if name in ("", ".", "..") else name.replace(os.sep, "-")
        if not exact:
            safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip(".-") or "run"
            safe += time.strftime("-%Y%m%d-%H%M%S")
        try:
            root.mkdir(parents=True, exist_ok=True)
            run = cls(_make_unique(root / safe).resolve())
            files.write_text(run.config_path, resolved_yaml)
            files.write_json(run.manifest_path, {**manifest, "name": run.name, "status": "running"})
        except OSError as error:
            raise CheckpointError(
                f"the run directory {root / safe} cannot be made",
                found=f"{type(error).__name__}: {error}",
                wanted="a directory that can be written",
                next="set --run-dir, or RLCTL_RUNS_DIR",
            ) from error
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """An existing run.

        Raises:
            CheckpointError: ``path`` is no run directory.
        """
        run = cls(Path(path).expanduser().resolve())
        if not run.manifest_path.is_file():
            raise CheckpointError(
                f"{path} is not a run directory",
                found="no manifest.json" if run.path.is_dir() else "no such directory",
                wanted="a directory that rlctl train made",
                next="rlctl runs list",
            )
        return run

    # ---- places -----------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The final weights as a Hugging Face directory."""
        return self.path / "export"

    @property
    def critic(self) -> Path:
        """The last weights of a critic as a Hugging Face directory."""
        return self.path / "critic"

    @property
    def best(self) -> Path:
        """The weights with the best validation score as a Hugging Face directory."""
        return self.path / "best"

    def adapters_of(self, export: Path) -> Path:
        """Beside an export of a model with adapters: the adapters alone, as peft reads them."""
        return export.with_name(f"{export.name}_adapter")

    @property
    def warm_start(self) -> Path:
        return self.path / "warm_start"

    # ---- manifest ---------------------------------------------------------------------------------------------
    def manifest(self) -> dict[str, Any]:
        """The manifest as it is now.

        Raises:
            CheckpointError: it is no JSON object.
        """
        try:
            value = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.manifest_path} cannot be read", found=str(error)) from error
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{self.manifest_path} cannot be read", found=type(value).__name__, wanted="an object"
            )
        return value

    def update_manifest(self, **values: Any) -> None:
        """Set top-level keys, atomically: a reader sees the old manifest or the new one."""
        files.write_json(self.manifest_path, {**self.manifest(), **values})

    def finish(self, status: str, **values: Any) -> None:
        """Write the end of the run: status, time, and the last value of each metric (unless ``metrics`` is given)."""
        assert status in STATUSES, status
        values.setdefault("metrics", last_values(self.metrics_path))
        self.update_manifest(status=status, ended=now(), duration_s=self.worked_s(), **values)

    def worked_s(self, until: float | None = None) -> float | None:
        """Seconds that processes of this run worked until the unix time ``until`` (default: now); pauses do not count."""
        manifest = self.manifest()
        resumes = manifest.get("resumes") or [{"time": manifest.get("started"), "duration_before_s": 0.0}]
        elapsed = seconds_since(resumes[-1].get("time"), until)
        return None if elapsed is None else round((resumes[-1].get("duration_before_s") or 0.0) + elapsed, 3)

    def status(self) -> str:
        """Status in the manifest; ``died`` for a run that says ``running`` but whose process on this host is gone."""
        manifest = self.manifest()
        status = str(manifest.get("status", "unknown"))
        if status == "running" and process_is_alive(manifest.get("process")) is False:
            return "died"
        return status

    # ---- samples and rewinding --------------------------------------------------------------------------------
    def write_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append rollouts to ``samples.jsonl`` (see the module's head for their keys)."""
        files.append_lines(self.samples_path, samples)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a process trains in this directory.

        Raises:
            CheckpointError: another process does already.
        """
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                process = self.manifest().get("process")
                raise CheckpointError(
                    f"another process trains in {self.path}",
                    found=f"process {process.get('pid')}" if isinstance(process, dict) else None,
                    wanted="one process a run directory",
                    next="wait for it or end it, then resume; or take another --run-dir",
                ) from None
            except OSError:
                pass  # a file system without locks
            yield
        finally:
            os.close(handle)

    def rewind(self, step: int, resolved_yaml: str | None = None) -> list[Path]:
        """Prepare a resume at ``step``: what later steps left is renamed to ``*.bak-<n>``, never deleted.

        Touches metrics, samples and checkpoints past ``step`` and marks the run as running again.

        Args:
            step: the last step that stays.
            resolved_yaml: the configuration from here on; where it differs, ``config.yaml`` becomes it.

        Returns:
            The files and directories that hold what was moved.
        """
        manifest = self.manifest()
        kept = _keep_config(self.config_path, resolved_yaml)
        before = manifest.get("duration_s")
        if before is None:  # its process died: it worked until the last line that it wrote
            before = self.worked_s(last_values(self.metrics_path).get(TIME, time.time()))
        moved = [
            kept,
            files.move_lines_after(self.metrics_path, STEP, step),
            files.move_lines_after(self.samples_path, "step", step),
        ]
        for path in sorted(self.checkpoints.glob("step_*")):
            if path.name[5:].isdigit() and int(path.name[5:]) > step:
                aside = files.free_name(path, ".bak-", 1)
                os.rename(path, aside)
                moved.append(aside)
        record = {
            "step": step,
            "time": now(),
            "duration_before_s": before,
            "command_line": shlex.join(typed_command()),
        }
        self.update_manifest(
            status="running",
            ended=None,
            duration_s=None,
            metrics={},
            error=None,
            process=process_record(),
            resumes=[*manifest.get("resumes", []), record],
        )
        return [path for path in moved if path is not None]


def _make_unique(path: Path) -> Path:
    """mkdir is the lock: of two runs that start in the same second, one gets the name and the other the next."""
    n = 1
    while True:
        candidate = path if n == 1 else path.with_name(f"{path.name}-{n}")
        try:
            candidate.mkdir()
        except FileExistsError:
            n += 1
        else:
            return candidate


def _keep_config(path: Path, text: str | None) -> Path | None:
    """Replace ``config.yaml`` by ``text`` where they differ. Returns where the old one is kept."""
    if text is None or (path.is_file() and path.read_text(encoding="utf-8") == text):
        return None
    old: Path | None = None
    if path.is_file():
        old = files.free_name(path, ".bak-", 1)
        os.rename(path, old)
    files.write_text(path, text)
    return old
