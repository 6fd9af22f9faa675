"""Write core/src/rlctl/first_party.json from the records of the installed first-party plugins.

Run it after a change to a plugin's records: python tools/update_catalogue.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlctl import catalogue
from rlctl.discovery import FIRST_PARTY_DISTS
from rlctl.plugins import load_plugins

TARGET = Path(__file__).parents[1] / "core" / "src" / "rlctl" / catalogue.DATA_FILE


def main() -> int:
    plugins = load_plugins()
    broken = [e for e in plugins.failures() if e.dist in FIRST_PARTY_DISTS and not e.backends]
    if broken:
        print(f"{broken[0].label} does not load: {broken[0].cause[-1]}", file=sys.stderr)
        return 1
    owned = [(r.dist, r.spec) for r in plugins.backends() if r.dist in FIRST_PARTY_DISTS]
    TARGET.write_text(catalogue.dump(owned), encoding="utf-8")
    print(f"wrote {len(owned)} backends to {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
