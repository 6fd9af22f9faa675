"""The doctor in another interpreter: it runs there, in a child, and its report comes back as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.doctor.report import BackendReport, DoctorError, DoctorReport
from rlctl.errors import RlctlError, UsageError
from rlctl.interpreters.answers import entry_from_json, entry_to_json
from rlctl.interpreters.asking import put
from rlctl.interpreters.faults import there, told_there
from rlctl.interpreters.program import locate
from rlctl.plugins import Stage
from rlctl.records import CheckResult, CheckStatus

_PROBES_AFTER_ONE_ANOTHER = 20
"""How many probes' time limits the whole may take; each has its own."""


def run_doctor_there(path: Path, names: Sequence[str], quick: bool, timeout_s: float) -> DoctorReport:
    """As :func:`rlctl.doctor.run_doctor`, in the environment or interpreter at ``path``.

    Raises:
        UsageError: there is no interpreter, or a name is not known there.
        InterpreterError: it does not answer, or has not our rlctl.
        DoctorError: the doctor cannot run there.
    """
    found = locate(path.absolute())
    if found is None:
        raise UsageError(
            f"there is no Python interpreter at {path}",
            found=str(path),
            wanted="the directory of a virtual environment, or an interpreter",
        )
    python = str(found)
    question = {"names": list(names), "quick": quick, "timeout_s": timeout_s}
    said = put(python, "doctor", "running the doctor there", question, _PROBES_AFTER_ONE_ANOTHER * timeout_s)
    if "causes" in said:
        lines = [cause.line for cause in said["causes"]]
        raise DoctorError(f"the doctor cannot run in {python}", found=lines[-1], details=lines)
    answer = said["answer"]
    if "refused" in answer:
        raise _refused(answer["refused"], python)
    return _from_json(answer, python)


def answer(names: Sequence[str], quick: bool, timeout_s: float) -> dict[str, Any]:
    """In the other interpreter: the report as JSON types, or the error that the doctor ended in."""
    from rlctl.doctor.run import run_doctor

    try:
        report = run_doctor(names, quick=quick, timeout_s=timeout_s)
    except RlctlError as error:
        return {"refused": error.to_json()}
    data = report.to_json()
    return {**data, "seconds": report.seconds, "plugins": [entry_to_json(entry) for entry in report.plugins]}


def _from_json(data: Mapping[str, Any], python: str) -> DoctorReport:
    def read(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**row, "status": CheckStatus(row["status"]), "next": there(row["next"], python)}

    return DoctorReport(
        backends=tuple(
            BackendReport(**{**read(row), "stage": Stage(row["stage"]), "cause": tuple(row["cause"])})
            for row in data["backends"]
        ),
        checks=tuple(CheckResult(**read(row)) for row in data["checks"]),
        plugins=tuple(entry_from_json({**row, "next": there(row["next"], python)}) for row in data["plugins"]),
        installable=tuple({**row, "next": there(row["next"], python)} for row in data["installable"]),
        quick=data["quick"],
        seconds=data["seconds"],
        python=python,
    )


def _refused(data: Mapping[str, Any], python: str) -> RlctlError:
    kind = {"UsageError": UsageError, "DoctorError": DoctorError}.get(data["error"], RlctlError)
    error = kind(data["what"], found=data["found"], wanted=data["wanted"], next=data["next"], details=data["details"])
    told_there(error, python)
    return error
