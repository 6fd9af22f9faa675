"""Evidence records from a test suite: a test that has just compared numbers hands them over, and the record is written.

Nothing is written unless ``RLCTL_EVIDENCE_DIR`` names a directory (``make evidence`` sets it to the plugin's package), so
an ordinary test run leaves no files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rlctl.codec import evidence_to_json
from rlctl.device import detect_device, is_simulated
from rlctl.records import EvidenceLevel, EvidenceRecord

DIRECTORY_VARIABLE = "RLCTL_EVIDENCE_DIR"


def record_evidence(
    name: str,
    *,
    backend: str,
    level: EvidenceLevel,
    axes: Mapping[str, int],
    world_size: int,
    device: str,
    model_family: str,
    what: str,
    deltas: Mapping[str, float],
    dists: Sequence[str] = ("torch", "transformers"),
    model_type: str = "language_model",
    simulated: bool = False,
) -> Path | None:
    """Write ``<name>.json`` with today's date and the versions of ``dists``. Call it after the comparison has passed.

    Args:
        axes: parallel axes larger than one.
        deltas: the measured differences, by what was compared.
        simulated: the ranks or the device were not real; such a record never raises a level.

    Returns:
        The file, or None when no directory is set.
    """
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if not folder:
        return None
    record = EvidenceRecord(
        backend=backend,
        model_type=model_type,
        device=device,
        vendor=detect_device(device).vendor,
        axes=dict(axes),
        level=level,
        model_family=model_family,
        what=what,
        versions={dist: metadata.version(dist) for dist in dists},
        world_size=world_size,
        # Three significant digits: more would differ from run to run and prove nothing.
        deltas={k: float(f"{v:.2e}") for k, v in sorted(deltas.items())},
        date=datetime.now(UTC).date().isoformat(),
        simulated=simulated or is_simulated(device),
    )
    path = Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence_to_json(record), indent=2) + "\n", encoding="utf-8")
    return path
