"""Interpreters that are not this one: shell scripts that stand for what a path may lead to, and one with plugins of its own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import rlctl

SOURCES = Path(rlctl.__file__).parents[1]


def script(file: Path, text: str) -> str:
    """An executable file; what it runs as Python stands for ``$PYTHON``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\nPYTHON={shlex.quote(sys.executable)}\n{text}\n")
    file.chmod(0o755)
    return str(file)


def with_packages(file: Path, *folders: Path, env: str = "") -> str:
    """This interpreter with other packages before its own: what another environment has that this one has not."""
    path = ":".join(map(str, (*folders, SOURCES)))
    return script(file, f'{env} PYTHONPATH={shlex.quote(path)} exec "$PYTHON" "$@"')


def answering(file: Path, result: str) -> str:
    """Writes ``result`` as the answer to whatever it is asked."""
    return script(file, f'for place; do :; done\necho {shlex.quote(result)} > "$place/result.json"')


def another_rlctl(folder: Path, version: str, api: tuple[int, int]) -> Path:
    """A package that calls itself rlctl."""
    package = folder / "rlctl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "records.py").write_text(f"API_VERSION = {api!r}\n")
    return folder
