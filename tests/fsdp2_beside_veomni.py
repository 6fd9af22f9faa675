"""fsdp2 beside veomni in one environment, for comparisons: it asks for a newer transformers than VeOmni, and is declared again
without that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIGHT = '''
"""fsdp2 and its rollout, as they are but for the version of transformers that they ask for."""
import dataclasses

from rlctl.hookspecs import hookimpl
from rlctl_fsdp import plugin


@hookimpl
def rlctl_backends():
    relaxed = tuple("transformers>=5.9" if r.startswith("transformers") else r for r in plugin.REQUIREMENTS)
    return [dataclasses.replace(spec, requirements=relaxed) for spec in plugin.rlctl_backends()]
'''


@contextmanager
def fsdp2_beside(site: Path) -> Iterator[None]:
    """A distribution beside the installed ones, in the empty folder ``site``, that declares fsdp2 to this process and its ranks."""
    info = site / "fsdp2_for_comparison-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdp2-for-comparison\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[rlctl.plugins]\nfsdp2_for_comparison = fsdp2_for_comparison\n")
    (site / "fsdp2_for_comparison.py").write_text(LIGHT)
    added = [str(site), str(ROOT / "plugins" / "fsdp" / "src")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(added))
        patch.setattr(sys, "path", [*added, *sys.path])
        yield
