"""Write core/src/rlctl/first_party.json from the records of the installed first-party plugins.

Run it after a change to a plugin's records: python tools/update_catalogue.py
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

from rlctl import catalogue
from rlctl.discovery import FIRST_PARTY_DISTS
from rlctl.plugins import load_plugins
from rlctl.records import BackendSpec

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "core" / "src" / "rlctl" / catalogue.DATA_FILE


def from_sources(installed: set[str]) -> list[tuple[str, BackendSpec]]:
    """(dist, record) of the plugins in this repository that are not installed here: some need an environment of their own.

    Their light modules import nothing but rlctl.
    """
    found: list[tuple[str, BackendSpec]] = []
    for file in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] in installed:
            continue
        sys.path.insert(0, str(file.parent / "src"))
        try:
            for target in project["entry-points"]["rlctl.plugins"].values():
                found += [(project["name"], spec) for spec in importlib.import_module(target).rlctl_backends()]
        finally:
            sys.path.pop(0)
    return found


def first_party_records() -> list[tuple[str, BackendSpec]]:
    """(dist, record) of every plugin of ours, installed or not."""
    owned = [(r.dist, r.spec) for r in load_plugins().backends() if r.dist in FIRST_PARTY_DISTS]
    return owned + from_sources({dist for dist, _ in owned})


def main() -> int:
    plugins = load_plugins()
    broken = [e for e in plugins.failures() if e.dist in FIRST_PARTY_DISTS and not e.backends]
    if broken:
        print(f"{broken[0].label} does not load: {broken[0].cause[-1]}", file=sys.stderr)
        return 1
    owned = first_party_records()
    TARGET.write_text(catalogue.dump(owned), encoding="utf-8")
    print(f"wrote {len(owned)} backends to {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
