"""File names in a configuration, made absolute: those of a file from its directory, those of the command line from the cwd."""

from __future__ import annotations

import glob
import os.path
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from rlctl.config.document import Document, Loc, dotted
from rlctl.config.placement import ROLES
from rlctl.config.problems import Problem
from rlctl.config.suggest import nearest
from rlctl.interpreters.program import locate

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*(?:/[A-Za-z0-9][\w.\-]*)?$")
_SCHEME = re.compile(r"^(?:package|gguf):")
_FUNCTION = re.compile(r"^(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)$", re.S)


def resolve_paths(document: Document, base_dir: Path, notice: Callable[[str], None]) -> list[Problem]:
    """Rewrite every relative path of ``document``; a file that is not there is a problem, a hub id stays as it is.

    ``notice`` gets a line for what is taken as a hub id although a directory has almost the same name.
    """
    problems: list[Problem] = []
    teachers = document.get(("teacher", "models"))
    sections: list[Loc] = [("model",), ("critic", "model"), ("teacher", "model")]
    sections += [("teacher", "models", str(name)) for name in (teachers if isinstance(teachers, dict) else {})]
    for section in sections:
        for key in ("path", "tokenizer"):
            _model(document, (*section, key), base_dir, problems, notice)
    pools = document.get(("runtime", "pools"))
    places: list[Loc] = [(role, "python") for role in (*ROLES, "runtime")]
    places += [("runtime", "pools", str(name), "python") for name in (pools if isinstance(pools, dict) else {})]
    for place in places:
        _interpreter(document, place, base_dir, problems)
    for key in ("train_files", "val_files"):
        _files(document, ("data", key), base_dir, problems)
    components = document.get(("reward", "components"))
    for index in range(len(components) if isinstance(components, list) else 0):
        _function(document, ("reward", "components", index, "name"), base_dir, problems)
    for place in (("algorithm", "adv_estimator"), ("actor", "policy_loss", "loss_mode")):
        _function(document, place, base_dir, problems)
    _function(document, ("rollout", "environment", "name"), base_dir, problems, "Class")
    return problems


def _base(document: Document, loc: Loc, base_dir: Path) -> Path:
    return Path.cwd() if document.origin(loc).on_command_line else base_dir


def _absolute(base: Path, text: str) -> Path:
    """``text`` from ``base``, without touching links, so that a link to a model keeps its name."""
    expanded = Path(text)
    if text.startswith("~"):
        try:
            expanded = expanded.expanduser()
        except RuntimeError:
            expanded = Path(text)  # ~name of a user that does not exist: reported as a missing file
    return Path(os.path.normpath(base / expanded))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False  # too long, or with a NUL: no such file


def _model(
    document: Document, loc: Loc, base_dir: Path, problems: list[Problem], notice: Callable[[str], None]
) -> None:
    text = document.get(loc)
    if not isinstance(text, str) or _SCHEME.match(text):
        return
    base = _base(document, loc, base_dir)
    path = _absolute(base, text)
    if text and _exists(path):
        document.set(loc, str(path), document.origin(loc))
        return
    if _HUB_ID.match(text) and not text.endswith((".yaml", ".json", ".gguf", ".safetensors")):
        near = _near(path)
        if near:
            notice(f"{dotted(loc)}: {text} is taken as a hub id; {near}")
        return
    problems.append(
        Problem(
            dotted(loc),
            str(document.origin(loc)),
            "there is no such model directory" if text else "the model's name is empty",
            found=str(path) if text else "",
            wanted="a directory, a hub id such as org/name, or package:NAME",
            hint=_near(path) or "check the path; it is taken from " + str(base),
        )
    )


def _files(document: Document, loc: Loc, base_dir: Path, problems: list[Problem]) -> None:
    names = document.get(loc)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return
    base = _base(document, loc, base_dir)
    out: list[str] = []
    for index, name in enumerate(names):
        path = _absolute(base, name)
        if name.startswith("hf:"):
            out.append(name)
        elif name and _exists(path):
            out.append(str(path))
        elif matches := _glob(path):
            out += matches
        else:
            place = (*loc, index)
            problems.append(
                Problem(
                    dotted(place),
                    str(document.origin(place)),
                    "there is no such file",
                    found=str(path) if name else "an empty name",
                    wanted="a jsonl or parquet file, or a directory of splits",
                    hint=_near(path) or f"check the path; it is taken from {base}",
                )
            )
            out.append(name)
    if out != names:
        document.set(loc, out, document.origin(loc))


def _interpreter(document: Document, loc: Loc, base_dir: Path, problems: list[Problem]) -> None:
    text = document.get(loc)
    if not isinstance(text, str):
        return
    base = _base(document, loc, base_dir)
    path = _absolute(base, text)
    found = locate(path) if text else None
    # Absolute also where it is none: the message below is the one to read.
    document.set(loc, str(found or path), document.origin(loc))
    if found is None:
        what, hint = _no_interpreter(path)
        problems.append(
            Problem(
                dotted(loc),
                str(document.origin(loc)),
                what if text else "the interpreter's name is empty",
                found=str(path) if text else "",
                wanted="the directory of a virtual environment, or an interpreter",
                hint=hint,
            )
        )


def _no_interpreter(path: Path) -> tuple[str, str]:
    """What is wrong with a place where no interpreter is, and what to do. It may be an interpreter's own path: that is how a
    run's configuration keeps it."""
    inside = path.parent.name in ("bin", "Scripts") and path.name.startswith("python")
    root = path.parent.parent if inside else path
    python = path if inside else root / "bin" / "python"
    typed = shlex.quote(str(root))
    if not os.path.lexists(python):
        if _exists(path):
            return "there is no Python interpreter", f"name an environment or an interpreter: {python} is not there"
        near = _near(path if _exists(root) else root)
        makes = f"python3 -m venv {typed} makes one; {typed}/bin/python -m pip install PLUGIN fills it"
        return "there is no such environment", near or makes
    if not _exists(python):
        gone = f"{python} is a link to {os.path.realpath(python)}, which is gone"
        return gone, f"python3 -m venv --clear {typed} makes the environment anew, empty; then install PLUGIN into it"
    if not python.is_file():
        return f"{python} is no file", "name an environment or an interpreter"
    return f"{python} is no executable file", f"chmod +x {shlex.quote(str(python))}, where it is an interpreter"


def _glob(path: Path) -> list[str]:
    text = str(path)
    if not any(char in text for char in "*?[") or "\0" in text:
        return []
    return sorted(match for match in glob.glob(text) if Path(match).is_file())


def _function(document: Document, loc: Loc, base_dir: Path, problems: list[Problem], kind: str = "function") -> None:
    text = document.get(loc)
    match = _FUNCTION.match(text) if isinstance(text, str) else None
    if match is None:
        return
    base = _base(document, loc, base_dir)
    path = _absolute(base, match["file"])
    if _exists(path):
        document.set(loc, f"{path}:{match['function']}", document.origin(loc))
        return
    problems.append(
        Problem(
            dotted(loc),
            str(document.origin(loc)),
            "there is no such file",
            found=str(path),
            wanted=f"path/to/file.py:{kind}",
            hint=_near(path) or f"check the path; it is taken from {base}",
        )
    )


def _near(path: Path) -> str:
    """A neighbour with almost the same name."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.name != path.name]
    except (OSError, ValueError):
        return ""
    close = nearest(path.name, names)
    return f"did you mean {path.parent / close}?" if close else ""
