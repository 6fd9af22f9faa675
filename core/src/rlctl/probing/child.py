"""The child's side of a probe. Started as a file, so that only the parent's ``sys.path`` decides what is imported.

Argument: a directory with ``task.json``. Writes ``step`` (what it is doing now), ``trace`` (faulthandler's frames) and,
when it gets that far, ``result.json``. The standard library alone is imported until ``sys.path`` is the parent's. A child in
another interpreter comes to :func:`act` by :mod:`rlctl.probing.elsewhere`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(directory: Path) -> None:
    task = json.loads((directory / "task.json").read_text())
    sys.path[:] = task["sys_path"]
    result = act(task, str(directory))
    beside = directory / "result.tmp"
    beside.write_text(json.dumps(result))
    beside.replace(directory / "result.json")


def act(task: dict[str, Any], place: str) -> dict[str, Any]:
    """Do a task; what it does is written to files in ``place``."""
    directory = Path(place)
    trace = (directory / "trace").open("w")  # stays open: faulthandler writes to it from signal handlers
    faulthandler.enable(file=trace, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)  # the parent asks where a hang is
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a probe that dies leaves no core file behind
    step = _Steps(directory / "step")
    step(task["step"])
    return ACTIONS[task["action"]](task, step)


class _Steps:
    """Writes down what is being done, so that a death can be placed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = ""

    def __call__(self, text: str) -> None:
        self.now = text
        self.path.write_text(text)


def _guarded(action: Any, step: _Steps) -> dict[str, Any]:
    from rlctl.causes import cause_chain
    from rlctl.errors import RlctlError

    try:
        return action()
    except BaseException as error:  # the point of a probe: whatever a foreign module raises is its result
        mend = error.next if isinstance(error, RlctlError) else None
        return {"error": [c.to_json() for c in cause_chain(error)], "next": mend, "step": step.now}


def _declare(task: dict[str, Any], step: _Steps) -> dict[str, Any]:
    """Stage 2 and the plugin's own checks."""
    from rlctl.codec import spec_to_json
    from rlctl.declare import captured_output, declare, new_manager, records_of
    from rlctl.discovery import Candidate
    from rlctl.records import Check

    candidate = Candidate(**task["candidate"])
    manager = new_manager()
    before, start = set(sys.modules), time.monotonic()

    def action() -> dict[str, Any]:
        declared = declare(candidate, manager)
        out = {
            "backends": [spec_to_json(s) for s in declared.backends],
            "output": declared.output,
            "seconds": time.monotonic() - start,
            "foreign": _foreign(before, candidate.target),
            "checks": [],
        }
        if task["checks"]:
            with captured_output():
                for check in records_of(manager, declared.plugin, "rlctl_checks", Check):
                    if check.quick or not task["quick"]:
                        step(f"running the check {check.name!r} of {candidate.dist}")
                        out["checks"].append(_run_check(check, step))
        return out

    return _guarded(action, step)


def _run_check(check: Any, step: _Steps) -> dict[str, Any]:
    def action() -> dict[str, Any]:
        result = check.run()
        return {k: str(getattr(result, k)) for k in ("name", "status", "found", "wanted", "next")}

    out = _guarded(action, step)
    if "error" in out:
        last = out["error"][-1]
        found = f"the check itself failed: {last['type']}: {last['message']}"
        return {"name": check.name, "status": "fail", "found": found, "wanted": "a CheckResult", "next": ""}
    return out


def _foreign(before: set[str], target: str) -> list[str]:
    """Top-level packages that the light module brought in beyond the standard library and rlctl."""
    own = {target.partition(":")[0].partition(".")[0].strip(), "rlctl", "pluggy", "packaging"}
    tops = {name.partition(".")[0] for name in set(sys.modules) - before}
    return sorted(t for t in tops - own - set(sys.stdlib_module_names) if not t.startswith("_"))


def _register(task: dict[str, Any], step: _Steps) -> dict[str, Any]:
    """Stage 4: what ``train`` does in every rank before it builds the engine, without building it."""
    import importlib

    from rlctl import extensions
    from rlctl.codec import spec_from_json
    from rlctl.declare import call_one, captured_output, load_object, register
    from rlctl.declare import new_manager as make_manager
    from rlctl.discovery import Candidate

    candidate, spec = Candidate(**task["candidate"]), spec_from_json(task["spec"])
    manager = make_manager()

    def action() -> dict[str, Any]:
        with captured_output():
            plugin = load_object(candidate.target)
            register(manager, plugin, candidate)
        # As in a rank: an extension that is broken is no fault of a backend that does not need it.
        extensions.shield(spared=spec.imports)
        step(f"importing {spec.config} (its config model)")
        settings = _default_settings(load_object(spec.config))
        step(f"preparing the process for {spec.name} (rlctl_prepare_process of {candidate.dist})")
        call_one(manager, plugin, "rlctl_prepare_process", backend=spec.name, config=settings)
        for module in spec.imports:
            step(f"importing {module}")
            importlib.import_module(module)
        step(f"importing {spec.engine} (its engine)")
        load_object(spec.engine)
        return {"versions": _versions(spec.imports)}

    return _guarded(action, step)


def _default_settings(model: Any) -> dict[str, Any]:
    """The config model's defaults; empty when it has required fields."""
    from pydantic import ValidationError

    try:
        return model().model_dump()
    except ValidationError:
        return {}


def _versions(imports: Any) -> dict[str, str]:
    found = {}
    for name in imports:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def _runtime(task: dict[str, Any], step: _Steps) -> dict[str, Any]:
    """What torch says of this machine, and whether its device extensions load."""

    def action() -> dict[str, Any]:
        import torch

        from rlctl import device

        step("asking torch for devices")
        out: dict[str, Any] = {
            "torch": str(torch.__version__),
            "cuda_build": torch.version.cuda,
            "hip_build": getattr(torch.version, "hip", None),
            "threads": torch.get_num_threads(),
            "devices": {},
            "simulated": [],
            "extensions": {},
        }
        # Before anything is asked of them: one that does not load is hidden from then on.
        for point in _backend_extensions():
            step(f"loading the device extension {point.name} of torch")
            out["extensions"][point.name] = _guarded(lambda p=point: {"ok": bool(p.load()() or True)}, step)
        for kind in ("cuda", "npu"):
            if device.is_available(kind):
                names = [device.device_name(f"{kind}:{i}") for i in range(device.device_count(kind))]
                out["devices"][kind] = names
                if device.is_simulated(kind):
                    out["simulated"].append(kind)
        return out

    return _guarded(action, step)


def _backend_extensions() -> list[Any]:
    from importlib import metadata

    return list(metadata.entry_points(group="torch.backends"))


def _plugins(task: dict[str, Any], step: _Steps) -> dict[str, Any]:
    """Stages 1 to 3 of every plugin, for a parent in another interpreter."""

    def action() -> dict[str, Any]:
        from rlctl.interpreters.answers import describe_plugins

        return describe_plugins()

    return _guarded(action, step)


def _section(task: dict[str, Any], step: _Steps) -> dict[str, Any]:
    """A role's ``engine`` section against its backend's config model."""

    def action() -> dict[str, Any]:
        from rlctl.interpreters.answers import check_question

        return check_question(task)

    return _guarded(action, step)


def _doctor(task: dict[str, Any], step: _Steps) -> dict[str, Any]:
    """The whole doctor, for a parent in another interpreter."""

    def action() -> dict[str, Any]:
        from rlctl.doctor.elsewhere import answer

        return answer(task["names"], task["quick"], task["timeout_s"])

    return _guarded(action, step)


ACTIONS = {
    "declare": _declare,
    "register": _register,
    "runtime": _runtime,
    "plugins": _plugins,
    "section": _section,
    "doctor": _doctor,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    # Leave at once: a library's atexit handler that hangs or crashes is not what was asked about.
    os._exit(0)
