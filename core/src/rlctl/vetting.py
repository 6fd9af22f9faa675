"""How ``train`` stays safe from a light module that would take the process down, at the cost of a few stat calls.

Stage 2 imports light modules in this process. One that aborts, crashes or hangs would end a command that has nothing to
do with it. So a third-party light module is imported in a child first, once for each version of its files; what passed
is remembered in the user's cache, and later commands import it right away. A module that fails in the child is never
imported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl import __version__
from rlctl.causes import AT, Cause
from rlctl.discovery import Candidate
from rlctl.records import API_VERSION
from rlctl.userdirs import user_cache_dir

if TYPE_CHECKING:
    from rlctl.probing import Outcome, Task

TIMEOUT_S = 15.0
"""A light module imports in milliseconds; this is for a machine that is very busy."""


def vet(candidates: Iterable[Candidate]) -> dict[Candidate, Outcome]:
    """Import the light modules that were never imported on this machine, each in a child.

    Returns:
        The outcomes of those that failed. First-party modules are not tried: their own tests keep them light.
    """
    unknown: list[tuple[Candidate, Path | None]] = []
    for candidate in candidates:
        mark = None if candidate.first_party else _mark(candidate)
        if not candidate.first_party and (mark is None or not mark.exists()):
            unknown.append((candidate, mark))
    if not unknown:
        return {}
    from rlctl.probing import run_probes

    failed: dict[Candidate, Outcome] = {}
    outcomes = run_probes([declare_task(c) for c, _ in unknown], TIMEOUT_S)
    for (candidate, mark), outcome in zip(unknown, outcomes, strict=True):
        if outcome.result is None or "error" in outcome.result:
            failed[candidate] = outcome
        elif mark is not None:
            with contextlib.suppress(OSError):  # without a cache it is tried again next time
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
    return failed


def declare_task(candidate: Candidate, checks: bool = False, quick: bool = True) -> Task:
    """The probe of a plugin's stage 2.

    Args:
        checks: run its ``rlctl_checks`` too; with ``quick`` only the quick ones.
    """
    from rlctl.probing import Task

    arguments = {"candidate": asdict(candidate), "checks": checks, "quick": quick}
    return Task("declare", f"importing {candidate.target} (its light module)", arguments)


def outcome_causes(outcome: Outcome, timeout_s: float) -> tuple[Cause, ...]:
    """Why a probe failed, outermost first; empty when it did not."""
    if outcome.timed_out:
        links = [Cause("TimeLimit", f"no end after {timeout_s:g} s while {outcome.step}")]
        return (*links, *_trace_links(outcome.trace))
    if outcome.result is None:
        links = [Cause("Crash", f"{outcome.died} while {outcome.step}")]
        last = next((line for line in reversed(outcome.stderr.splitlines()) if line.strip()), "")
        said = [Cause("stderr", last.strip()[:500])] if last else []
        return (*links, *_trace_links(outcome.trace), *said)
    links = [Cause(**c) for c in outcome.result.get("error", ())]
    if links and outcome.result.get("step"):
        first = links[0]
        links[0] = Cause(first.type, f"{first.message} [while {outcome.result['step']}]", first.where, first.module)
    return tuple(links)


def _trace_links(trace: Sequence[str]) -> list[Cause]:
    return [Cause(AT, frame) for frame in trace]


def _mark(candidate: Candidate) -> Path | None:
    """The file whose existence says that this very module was imported before; None when its source is not found."""
    files = _source_files(candidate.target)
    if not files:
        return None
    facts = [__version__, API_VERSION, sys.version, asdict(candidate)]
    try:
        facts += [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    except OSError:
        return None
    return user_cache_dir() / "vetted" / hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _source_files(target: str) -> list[Path]:
    """The files of a module, of its parent packages and beside it, found without importing any of them."""
    parts = target.partition(":")[0].strip().split(".")
    files: list[Path] = []
    try:
        spec = importlib.util.find_spec(parts[0])
        for depth in range(1, len(parts) + 1):
            if spec is None or spec.origin is None:
                return []
            origin = Path(spec.origin)
            files += [origin, *origin.parent.glob("*.py")] if depth == len(parts) > 1 else [origin]
            if depth < len(parts):
                places = list(spec.submodule_search_locations or ())
                spec = PathFinder.find_spec(".".join(parts[: depth + 1]), places)
    except (ImportError, AttributeError, ValueError, OSError):
        return []
    return sorted({f for f in files if f.is_file()})
