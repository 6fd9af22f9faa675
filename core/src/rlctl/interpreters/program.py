"""An interpreter as a program: where it is, and the environment in which its processes start. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROLE_PATH = "RLCTL_ROLE_PYTHONPATH"
"""Environment variable: what processes of another interpreter get as PYTHONPATH. Unset: what :func:`passed_path` says."""

_OF_ONE_INTERPRETER = frozenset(
    {
        *("PYTHONHOME", "PYTHONPATH", "PYTHONEXECUTABLE", "PYTHONPLATLIBDIR", "__PYVENV_LAUNCHER__"),
        *("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT"),
    }
)
"""Variables that tell an interpreter where its packages are. The controller's must not reach another one."""

_SITE_NAMES = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class Program:
    """How processes of another interpreter are started.

    Args:
        python: the interpreter, an absolute path. It may be a link: that of a virtual environment is one, and what it
            points to would not know its packages.
        path: entries of PYTHONPATH.
    """

    python: str
    path: tuple[str, ...] = ()

    @classmethod
    def of(cls, python: str) -> Program:
        """With the search path that this process passes on."""
        return cls(python, passed_path())

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` as a process of this interpreter shall see it: as if its environment, and no other, were activated."""
        env = {name: value for name, value in base.items() if name not in _OF_ONE_INTERPRETER}
        commands = str(Path(self.python).parent)
        left = str(Path(base["VIRTUAL_ENV"]) / "bin") if base.get("VIRTUAL_ENV") else None
        others = [entry for entry in base.get("PATH", os.defpath).split(os.pathsep) if entry not in (commands, left)]
        env["PATH"] = os.pathsep.join([commands, *others])
        if (home := _home(self.python)) is not None:
            env["VIRTUAL_ENV"] = str(home)
        if self.path:
            env["PYTHONPATH"] = os.pathsep.join(self.path)
        return env


def locate(path: Path) -> Path | None:
    """The interpreter that ``path`` names: itself, or the one of the virtual environment in that directory; None without
    one. Links are kept."""
    try:
        if path.is_dir():
            inside = (path / "bin" / "python", path / "bin" / "python3", path / "Scripts" / "python.exe")
            return next((found for found in inside if _runs(found)), None)
        return path if _runs(path) else None
    except (OSError, ValueError):
        return None  # a name that no file can have


def short(python: str) -> str:
    """An interpreter in a few words: its virtual environment's directory, from the working directory where it lies below."""
    place = _home(python) or Path(python)
    try:
        return str(place.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(place)


def passed_path() -> tuple[str, ...]:
    """Entries of PYTHONPATH for other interpreters: those of :data:`ROLE_PATH`, else those of this process's own variable
    that hold no installed packages. Sources are passed on; packages belong to one interpreter."""
    given = os.environ.get(ROLE_PATH)
    entries = (os.environ.get("PYTHONPATH", "") if given is None else given).split(os.pathsep)
    absolute = [os.path.abspath(entry) for entry in entries if entry]
    return tuple(dict.fromkeys(entry for entry in absolute if given is not None or not holds_packages(entry)))


def holds_packages(entry: str) -> bool:
    """True for a directory into which packages were installed."""
    if _SITE_NAMES & set(Path(entry).parts):
        return True
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(entry))
    except OSError:  # an archive, or nothing
        return False


def _home(python: str) -> Path | None:
    home = Path(python).parent.parent
    return home if (home / "pyvenv.cfg").is_file() else None


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
