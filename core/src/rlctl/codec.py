"""Backend and evidence records to JSON and back: for the catalogue, for shipped evidence, and for probes' children."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from rlctl.records import Axis, BackendKind, BackendSpec, Capability, EvidenceLevel, EvidenceRecord, ModelType, Support


def spec_to_json(spec: BackendSpec) -> dict[str, Any]:
    """A BackendSpec as JSON types, its capabilities one compact object each (empty fields left out)."""
    data = asdict(spec)
    data["capabilities"] = [{k: v for k, v in asdict(c).items() if v not in ("", None)} for c in spec.capabilities]
    return {k: _plain(v) for k, v in data.items()}


def spec_from_json(data: Mapping[str, Any]) -> BackendSpec:
    """The inverse of :func:`spec_to_json`.

    Raises:
        TypeError, ValueError, KeyError: the data is of another shape.
    """
    return BackendSpec(
        **{
            **data,
            "kind": BackendKind(data["kind"]),
            "api_version": tuple(data["api_version"]),
            "model_types": tuple(ModelType(m) for m in data["model_types"]),
            "devices": tuple((d, v) for d, v in data["devices"]),
            "capabilities": tuple(_capability(c) for c in data["capabilities"]),
            "requirements": tuple(data["requirements"]),
            "imports": tuple(data["imports"]),
            "aliases": tuple(data.get("aliases", ())),
        }
    )


def _capability(data: Mapping[str, Any]) -> Capability:
    model_type = ModelType(data.get("model_type", ModelType.LANGUAGE_MODEL))
    return Capability(
        **{**data, "axis": Axis(data["axis"]), "support": Support(data["support"]), "model_type": model_type}
    )


def evidence_to_json(record: EvidenceRecord) -> dict[str, Any]:
    """An EvidenceRecord as JSON types."""
    return {k: _plain(v) for k, v in asdict(record).items()}


def evidence_from_json(data: Mapping[str, Any]) -> EvidenceRecord:
    """The inverse of :func:`evidence_to_json`.

    Raises:
        TypeError, ValueError, KeyError: a field is missing, unknown or of another type.
    """
    unknown = sorted(set(data) - {f.name for f in fields(EvidenceRecord)})
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}")
    for name in ("axes", "versions", "deltas"):
        if not isinstance(data[name], Mapping):
            raise TypeError(f"{name!r} is no mapping")
    axes = {Axis(name).value: int(size) for name, size in data["axes"].items()}
    return EvidenceRecord(**{**data, "axes": axes, "level": EvidenceLevel(data["level"])})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, str) else value
