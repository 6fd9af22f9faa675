"""docs/algorithms.md lists the algorithms that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.algorithms.table import ADVANTAGES, POLICY_LOSSES

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_page_lists_every_algorithm() -> None:
    if not PAGE.is_file():
        pytest.skip("the pages are not here: an installed core without its source tree")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    shown = {row[0].strip("`"): (row[1], row[2]) for row in rows if not row[0].startswith(("`algorithm.", "`actor."))}
    assert shown == {s.name: (s.summary, s.paper) for s in (*ADVANTAGES.values(), *POLICY_LOSSES.values())}
