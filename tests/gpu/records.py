"""Evidence records of a summary of run_two_gpus.sh: python tests/gpu/records.py OUT/summary.json BACKEND DIRECTORY.

Only what passed becomes a record, with the figures that were measured, the versions and the device's name.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.codec import evidence_to_json
from rlctl.records import EvidenceLevel, EvidenceRecord

VERSIONS = {
    "fsdp2": ("torch", "transformers"),
    "megatron": ("torch", "transformers", "megatron-core", "transformer-engine"),
    "veomni": ("torch", "transformers", "veomni"),
}
VENDORS = {"cuda": "nvidia"}


def record_of(case: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, EvidenceRecord]:
    """(file name, record) of a case that passed."""
    assert case["passed"], "what failed proves nothing"
    axes = {k: int(v) for k, v in case["topology"].items()}
    versions = {n: v for n, v in summary["versions"].items() if n in VERSIONS[case["backend"]] and v != "absent"}
    engine = "-".join(setting.partition("=")[2] for setting in case["engine"])
    name = "-".join(
        [f"{k}{v}" for k, v in axes.items()]
        + [case["device"], case["model_family"], case["model_type"], case["dtype"], *([engine] if engine else [])]
    )
    extra: dict[str, Any] = {"dtype": case["dtype"], "device_name": summary["device_name"]}
    if engine:
        extra["engine"] = list(case["engine"])
    record = EvidenceRecord(
        backend=case["backend"],
        model_type=case["model_type"],
        device=case["device"],
        vendor=VENDORS.get(case["device"]),
        axes=axes,
        level=EvidenceLevel.PARITY,
        model_family=case["model_family"],
        what=f"rlctl verify: equal to one process of plain Hugging Face code, {case['dtype']}; "
        "SFT, GRPO or value loss, three steps",
        versions=versions,
        world_size=case["world_size"],
        deltas={k: float(f"{v:.2e}") for k, v in case["deltas"].items()},
        date=str(summary["date"]),
        simulated=False,
        extra=extra,
    )
    return f"{name}.json", record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("summary", type=Path)
    parser.add_argument("backend", choices=sorted(VERSIONS))
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    summary = json.loads(args.summary.read_text())
    summary.setdefault("date", datetime.date.fromtimestamp(args.summary.stat().st_mtime).isoformat())
    for case in summary["stages"]["verify"]["cases"]:
        if case["passed"] and case["backend"] == args.backend:
            name, record = record_of(case, summary)
            (args.directory / name).write_text(json.dumps(evidence_to_json(record), indent=2) + "\n")
            print(name)


if __name__ == "__main__":
    main()
