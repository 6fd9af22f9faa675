"""What one interpreter tells another, as JSON types, and back: plugins with their backends, problems of a configuration."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import rlctl
from rlctl.codec import spec_from_json, spec_to_json
from rlctl.config.document import Document, Origin
from rlctl.config.problems import Problem
from rlctl.interpreters.program import holds_packages
from rlctl.plugins import BackendRecord, PluginEntry, PluginSet, Stage, load_plugins
from rlctl.records import BackendKind, CheckStatus

DISTS = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "triton", "flash-attn", "torch-npu")
"""Whose versions are told beside those of the plugins and what they require: they can change a run's numbers."""


# ---- in the interpreter that is asked -------------------------------------------------------------------------------
def describe_plugins() -> dict[str, Any]:
    """Every plugin of this interpreter after stage 3, its versions, and the places on which that answer rests."""
    plugins = load_plugins()
    return {
        "entries": [entry_to_json(entry) for entry in plugins.entries],
        "records": [_record_to_json(record) for record in plugins.backends()],
        "versions": _versions(plugins.entries),
        "places": _places(plugins.entries),
    }


def check_question(question: Mapping[str, Any]) -> dict[str, Any]:
    """A role's ``engine`` section, checked with the config model of its backend here.

    Raises:
        RlctlError: the model is not sound.
    """
    from rlctl.config.engine_sections import checked_section, find_backend

    document = document_from_json(question["document"])
    plugins = load_plugins()
    kind = BackendKind(question["kind"])
    record = find_backend(plugins, question["backend"], kind, question["device"])
    assert record is not None, "it was among the plugins' backends"
    values, problems = checked_section(document, question["role"], record.spec, plugins)
    return {"values": values, "problems": [_problem_to_json(problem) for problem in problems]}


def _versions(entries: Sequence[PluginEntry]) -> dict[str, str]:
    found: dict[str, str] = {}
    from rlctl.requirements import required_dist

    required = [required_dist(text) for entry in entries for spec in entry.backends for text in spec.requirements]
    for name in dict.fromkeys(["rlctl-core", *(entry.dist for entry in entries), *filter(None, required), *DISTS]):
        try:
            found[name] = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, KeyError):
            continue
    return found


def _places(entries: Sequence[PluginEntry]) -> dict[str, list[str]]:
    """``sites``: directories of installed packages. ``sources``: files and packages of rlctl and its plugins."""
    sources = {str(Path(rlctl.__file__).parent)}
    targets = [target for entry in entries for spec in entry.backends for target in (spec.engine, spec.config)]
    for target in {*(entry.target for entry in entries), *targets}:
        with contextlib.suppress(ImportError, ValueError, AttributeError):  # it is found when it is imported, or not
            found = importlib.util.find_spec(target.partition(":")[0].partition(".")[0].strip())
            if found is not None and found.origin is not None:
                file = Path(found.origin)
                sources.add(str(file.parent if file.name == "__init__.py" else file))
    sites = {path for path in sys.path if os.path.isdir(path) and holds_packages(path)}
    return {"sites": sorted(sites), "sources": sorted(sources)}


# ---- records to JSON and back ---------------------------------------------------------------------------------------
def plugins_from_json(data: Mapping[str, Any]) -> PluginSet:
    """The plugins of the interpreter that :func:`describe_plugins` ran in. Only its records can be used here."""
    return PluginSet(
        [entry_from_json(entry) for entry in data["entries"]],
        records=[_record_from_json(record) for record in data["records"]],
    )


def entry_to_json(entry: PluginEntry) -> dict[str, Any]:
    """A plugin with the whole records of its backends."""
    return {**asdict(replace(entry, backends=())), "backends": [spec_to_json(spec) for spec in entry.backends]}


def entry_from_json(data: Mapping[str, Any]) -> PluginEntry:
    """The inverse of :func:`entry_to_json`."""
    return PluginEntry(
        **{
            **data,
            "stage": Stage(data["stage"]),
            "status": CheckStatus(data["status"]),
            "cause": tuple(data["cause"]),
            "backends": tuple(spec_from_json(spec) for spec in data["backends"]),
        }
    )


def _record_to_json(record: BackendRecord) -> dict[str, Any]:
    return {
        "spec": spec_to_json(record.spec),
        "dist": record.dist,
        "version": record.version,
        "problems": list(record.problems),
        "next": record.next,
    }


def _record_from_json(data: Mapping[str, Any]) -> BackendRecord:
    return BackendRecord(**{**data, "spec": spec_from_json(data["spec"]), "problems": tuple(data["problems"])})


def document_to_json(document: Document, role: str) -> dict[str, Any]:
    """What a role's ``engine`` section is checked with: the section, its backend, and where each value came from."""
    data = {role: {key: document.get((role, key)) for key in ("backend", "engine") if document.has((role, key))}}
    places = [(), (role,), (role, "backend")]
    origins = [
        [list(loc), origin.kind, origin.text, origin.line]
        for loc, origin in document.origins.items()
        if loc in places or loc[:2] == (role, "engine")
    ]
    return {"data": data, "origins": origins}


def document_from_json(data: Mapping[str, Any]) -> Document:
    return Document(data["data"], {tuple(loc): Origin(kind, text, line) for loc, kind, text, line in data["origins"]})


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    return {key: getattr(problem, key) for key in ("path", "origin", "what", "found", "wanted", "hint")}


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    return Problem(**data)
