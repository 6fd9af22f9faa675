"""Write core/tests/golden/field_matrix.txt from the catalogue. Run it only after a deliberate change, and read the diff.

Where a released plugin's own records changed, run tools/update_catalogue.py first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlctl import catalogue

TARGET = Path(__file__).parents[1] / "core" / "tests" / "golden" / "field_matrix.txt"


def main() -> int:
    before = TARGET.read_text(encoding="utf-8").splitlines() if TARGET.exists() else []
    lines = catalogue.cell_lines()
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")
    changed = sorted(set(before) ^ set(lines))
    print(f"wrote {len(lines)} cells to {TARGET}; {len(changed)} lines differ from before")
    for line in changed:
        print(("+ " if line in lines else "- ") + line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
