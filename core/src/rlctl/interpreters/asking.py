"""Questions to another interpreter. Each is put to it in a child of its own; a good answer is kept, and stands until a file on
which it rests is another: the interpreter, what is installed beside it, the sources of rlctl and of its plugins.

What failed is asked again every time: it may have been mended in a way that no file shows.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl import __version__, remedy
from rlctl.causes import Cause
from rlctl.codec import spec_to_json
from rlctl.config.document import Document
from rlctl.config.problems import Problem
from rlctl.discovery import Candidate
from rlctl.errors import BackendUnavailableError, RlctlError
from rlctl.interpreters import answers, faults
from rlctl.interpreters.program import Program, short
from rlctl.plugins import BackendRecord, PluginSet
from rlctl.records import API_VERSION, BackendKind, BackendSpec
from rlctl.userdirs import user_cache_dir
from rlctl.vetting import outcome_causes

if TYPE_CHECKING:
    from rlctl.probing import Outcome

LIGHT_S = 120.0
"""Limit of a question that imports no backend's libraries; it takes about a second, on a machine that is not busy."""
IMPORT_S = 300.0
"""Limit of the import of a backend's libraries, where nothing else is said."""
_METADATA = (".dist-info", ".egg-info", ".egg-link", ".pth")
_VARIABLES = ("RLCTL_DISABLE_PLUGINS", "RLCTL_ALLOW_VERSIONS", "RLCTL_DEVICE", "RLCTL_VENDOR")
"""What answers may depend on beside files."""


@dataclass(frozen=True)
class There:
    """An interpreter that answered, with our rlctl.

    Args:
        python: as the configuration names it.
        version: ``3.12.1``.
        prefix: of its environment.
        plugins: its plugins; only their records can be used here.
        versions: of the distributions that matter there.
        places: the files on which this rests, see :func:`_facts`.
    """

    python: str
    version: str
    prefix: str
    plugins: PluginSet
    versions: Mapping[str, str]
    places: Mapping[str, list[str]]


def look(python: str, backend: tuple[str, BackendKind] | None = None) -> There:
    """What an interpreter is, and what plugins it has.

    Args:
        backend: what it is wanted for, for the words of an error.

    Raises:
        InterpreterError: it does not answer, is too old, or has not our rlctl, whole.
    """
    said = _ask(python, "plugins", "reading its plugins", {}, LIGHT_S, backend=backend)
    if "causes" in said:
        raise faults.broken_rlctl(python, said["causes"])
    answer = said["answer"]
    version = ".".join(map(str, said["python"]))
    return There(
        python, version, said["prefix"], answers.plugins_from_json(answer), answer["versions"], answer["places"]
    )


def check_section(
    python: str, document: Document, role: str, spec: BackendSpec
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """As :func:`rlctl.config.engines.checked_section`, with the config model that the backend has there.

    Raises:
        RlctlError: the model is not sound.
    """
    question = {
        "document": answers.document_to_json(document, role),
        "role": role,
        "backend": spec.name,
        "kind": str(spec.kind),
        "device": next((device for device, _ in spec.devices), None),
    }
    step = f"checking {role}.engine with {spec.config}"
    said = _ask(python, "section", step, question, LIGHT_S, places=look(python).places)
    if "causes" in said:
        what = f"the config model of backend {spec.name!r} cannot be asked in {python}"
        raise RlctlError(
            what,
            details=faults.chain(said["causes"]),
            found=said["causes"][-1].line,
            wanted="a pydantic model that imports without the backend's libraries",
            next=faults.there(f"rlctl doctor {spec.name}", python),
        )
    answer = copy.deepcopy(said["answer"])  # a configuration is changed as it is read; what is kept is not
    return answer["values"], [answers.problem_from_json(problem) for problem in answer["problems"]]


def require_import(
    python: str, record: BackendRecord, timeout_s: float = IMPORT_S, notice: Callable[[str], None] | None = None
) -> Mapping[str, str]:
    """Import the libraries and the engine of a backend there, as each rank will. Returns the libraries' versions.

    Args:
        notice: told where it was never tried before, since it takes its time.

    Raises:
        BackendUnavailableError: they do not import; carries the whole chain.
    """
    there, spec = look(python), record.spec
    entry = next(e for e in there.plugins.entries if (e.dist, e.version) == (record.dist, record.version))
    candidate = Candidate(entry.name, entry.dist, entry.version, entry.target)
    question = {"candidate": asdict(candidate), "spec": spec_to_json(spec)}
    step = f"importing {candidate.target} (its light module)"
    words = f"importing the libraries of {spec.name} in {short(python)}, to see whether they load"
    tell = None if notice is None else lambda: notice(words)
    said = _ask(python, "register", step, question, timeout_s, env=spec.env, places=there.places, first=tell)
    if "causes" not in said:
        return said["answer"]["versions"]
    causes: tuple[Cause, ...] = said["causes"]
    mend = said.get("answer", {}).get("next") or remedy.for_import(candidate, causes, spec.requirements)
    raise BackendUnavailableError(
        f"backend {spec.name!r} of {record.label} does not load in {python}",
        details=faults.chain(causes),
        found=causes[-1].line,
        wanted=f"an importable {spec.engine}",
        next=faults.there(mend, python),
    )


# ---- asking ---------------------------------------------------------------------------------------------------------
def _ask(
    python: str,
    action: str,
    step: str,
    question: Mapping[str, Any],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    backend: tuple[str, BackendKind] | None = None,
    places: Mapping[str, list[str]] | None = None,
    first: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """As :func:`put`, from what is kept where that still holds.

    Args:
        places: the files on which the answer rests; None where the answer brings them.
        first: called where the answer is not known yet.

    Raises:
        InterpreterError: it did not come as far as the task.
    """
    key = _key(Program.of(python), action, question)
    if (known := _known(key, python)) is not None:
        return known
    if first is not None:
        first()
    said = put(python, action, step, question, timeout_s, env=env, backend=backend, answered=places is not None)
    if "causes" not in said:
        _keep(key, python, said["answer"]["places"] if places is None else places, said)
    return said


def put(
    python: str,
    action: str,
    step: str,
    question: Mapping[str, Any],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    backend: tuple[str, BackendKind] | None = None,
    answered: bool = False,
) -> dict[str, Any]:
    """Put a question to an interpreter now, and keep nothing of it.

    Args:
        answered: it has answered before, so what ends it is the task.

    Returns:
        What the child said, see :mod:`rlctl.probing.elsewhere`; with ``causes`` where the task failed.

    Raises:
        InterpreterError: it did not come as far as the task.
    """
    from rlctl.probing import Task, run_probes

    (outcome,) = run_probes([Task(action, step, question, env or {}, Program.of(python))], timeout_s)
    if outcome.result is None and answered:
        return {"causes": outcome_causes(outcome, timeout_s)}
    said = _sound(python, outcome, timeout_s, backend)
    causes = outcome_causes(replace(outcome, result=said["answer"]), timeout_s)
    return {**said, "causes": causes} if causes else said


def _sound(python: str, outcome: Outcome, timeout_s: float, backend: tuple[str, BackendKind] | None) -> dict[str, Any]:
    """What the child said, where it is a Python with our rlctl."""
    said = outcome.result
    if said is None:
        raise faults.no_python(python, "; ".join(c.line for c in outcome_causes(outcome, timeout_s)))
    if not isinstance(said.get("python"), list):
        raise faults.no_python(python, f"an answer that says nothing of its version: {json.dumps(said)[:200]}")
    if tuple(said["python"]) < faults.OLDEST:
        raise faults.too_old(python, said["python"])
    if "rlctl" not in said:
        raise faults.no_rlctl(python, said.get("missing", ()), backend)
    if (said["rlctl"], said["api"]) != (__version__, list(API_VERSION)):
        raise faults.other_version(python, said["rlctl"], said["api"])
    if "answer" not in said:
        raise faults.no_python(python, f"no answer; {outcome.stderr.strip()[-500:]}")
    return said


# ---- what is kept ---------------------------------------------------------------------------------------------------
_kept: dict[str, dict[str, Any]] = {}
"""As the files of the cache, for a home where none can be written."""


def _key(program: Program, action: str, question: Mapping[str, Any]) -> str:
    own = [__version__, API_VERSION, asdict(program), action, question]
    return _digest([*own, {name: os.environ.get(name) for name in _VARIABLES}])


def _known(key: str, python: str) -> dict[str, Any] | None:
    entry = _kept.get(key)
    if entry is None:
        with contextlib.suppress(OSError, ValueError):
            entry = json.loads(_file(key).read_text(encoding="utf-8"))
    if not isinstance(entry, dict) or entry.get("facts") != _facts(python, entry.get("places") or {}):
        return None
    _kept[key] = entry
    return entry["said"]


def _keep(key: str, python: str, places: Mapping[str, list[str]], said: Mapping[str, Any]) -> None:
    _kept[key] = {"facts": _facts(python, places), "places": dict(places), "said": dict(said)}
    with contextlib.suppress(OSError):  # without a cache it is asked again next time
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(_kept[key]), encoding="utf-8")
        beside.replace(file)


def _file(key: str) -> Path:
    return user_cache_dir() / "interpreters" / f"{key}.json"


def _facts(python: str, places: Mapping[str, list[str]]) -> str:
    """Sizes and times of the files on which an answer rests: the interpreter's, those of the ``sources``, and what lies in the
    ``sites``, where each distribution has a directory that its installation makes anew."""
    facts: list[Any] = [os.path.realpath(python), *_stat(python), *_stat(Path(python).parent.parent / "pyvenv.cfg")]
    for site in places.get("sites", ()):
        with contextlib.suppress(OSError):
            found = [entry for entry in os.scandir(site) if entry.name.endswith(_METADATA)]
            facts += [[entry.path, *_stat(entry.path)] for entry in sorted(found, key=lambda entry: entry.name)]
    for source in places.get("sources", ()):
        files = sorted(Path(source).rglob("*.py")) if os.path.isdir(source) else [Path(source)]
        facts += [[str(file), *_stat(file)] for file in files]
    return _digest(facts)


def _stat(file: str | Path) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
