"""Where the doubles of Ascend's packages are put."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

DOUBLES = Path(__file__).parent / "doubles"
VERSIONS = {"torch_npu": "2.13.0+double", "mindspeed": "0.12.1+double"}


def install_doubles(site: Path, names: Sequence[str] = tuple(VERSIONS)) -> Path:
    """Make a directory for ``PYTHONPATH`` with the doubles in it, as installed distributions."""
    site.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copytree(DOUBLES / name / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
        points = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n" if name == "torch_npu" else ""
        write_metadata(site, name, VERSIONS[name], points)
    return site


def write_metadata(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """The dist-info of a distribution whose modules lie in ``site``."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def environment(*sites: Path, **more: str) -> dict[str, str]:
    """This process's environment, with directories in front of ``PYTHONPATH`` and nothing of ours forced."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RLCTL_")}
    path = os.pathsep.join([*map(str, sites), os.environ.get("PYTHONPATH", "")])
    return {**inherited, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **more}
