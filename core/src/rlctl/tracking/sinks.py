"""The metrics sinks that come with core. Each takes (run_dir, config) and has ``log(metrics, step)`` and ``close()``."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl import files
from rlctl.tracking.headline import headline_text
from rlctl.tracking.reader import STEP, TIME


class JsonlTracker:
    """``metrics.jsonl``: one flat object a call, on disk when ``log`` returns. NaN and infinity are null."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._path = run_dir / "metrics.jsonl"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row = {STEP: step, **metrics, TIME: round(time.time(), 3)}
        files.append_lines(self._path, [row | {STEP: step}])

    def close(self) -> None:
        return None


class ConsoleTracker:
    """One line a step on stderr, for runs that have no reporter."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        return None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        print(f"step {step}  {headline_text(metrics)}".rstrip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        return None


class TensorboardTracker:
    """Scalars under ``tensorboard/``, through tensorboard's own event writer (which needs neither torch nor TensorFlow).

    Args:
        resume_step: the step a resumed run goes on from; TensorBoard then hides what the earlier process wrote past it.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None = None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # The generated protobuf modules make their classes at import, where a type checker cannot see them.
        event_pb2: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._event = event_pb2.Event
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=k, simple_value=float(v)) for k, v in metrics.items() if v is not None]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases, with the run's name and configuration."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found]

        trainer = config.get("trainer", {})
        self._run = wandb.init(
            project=trainer.get("project_name") or "rlctl",
            name=trainer.get("experiment_name") or run_dir.name,
            id=run_dir.name,
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
