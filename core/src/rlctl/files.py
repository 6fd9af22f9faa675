"""Files that survive a crash: written beside, synced, then renamed into place. Imports no library."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlctl.causes import links


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: NaN and infinity become None, number-like objects (a 0-d tensor) become floats.

    Raises:
        TypeError: a value that is neither JSON nor convertible to a number.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    number = float(value)
    return number if number == number and abs(number) != float("inf") else None


def write_text(path: Path, text: str) -> None:
    """Write ``path`` so that a reader sees the old text or the new one, never a part."""
    write_bytes(path, encoded(text))


def encoded(text: str) -> bytes:
    """UTF-8; bytes of a command line or a path that Python could not decode come back as they were, and half characters
    (a lone surrogate in a data row) become escapes, as JSON writes them."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def write_bytes(path: Path, content: bytes) -> None:
    """:func:`write_text` for bytes."""
    beside = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with :func:`write_text`."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON object a line. A torn last line (a process that died while writing) is closed first."""
    text = "".join(json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    if not text:
        return
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(encoded(text))


def read_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of ``path`` and the number of lines that are none (torn or damaged); a missing file is empty.

    Args:
        start: byte to start at; the line it falls into is left out.
    """
    rows: list[dict[str, Any]] = []
    damaged = 0
    for line in _raw_lines(path, start):
        row = _object(line)
        if row is None:
            damaged += bool(line.strip())
        else:
            rows.append(row)
    return rows, damaged


def move_lines_after(path: Path, key: str, step: int) -> Path | None:
    """Move the lines of ``path`` whose ``key`` is past ``step``, and damaged ones, to ``<name>.bak-<n>``.

    Returns:
        The new file, or None when every line stays.
    """
    keep: list[bytes] = []
    move: list[bytes] = []
    for line in _raw_lines(path):
        row = _object(line)
        value = None if row is None else row.get(key)
        (keep if isinstance(value, (int, float)) and value <= step else move).append(line.rstrip(b"\n") + b"\n")
    if not move:
        return None
    backup = free_name(path, ".bak-", 1)
    backup.write_bytes(b"".join(move))
    write_bytes(path, b"".join(keep))
    return backup


def free_name(path: Path, separator: str, first: int) -> Path:
    """The first of ``<path><separator><n>`` that does not exist, n counting from ``first``."""
    n = first
    while (candidate := path.with_name(f"{path.name}{separator}{n}")).exists():
        n += 1
    return candidate


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make names inside ``path`` durable, where the system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):  # systems that cannot open a directory need no such sync
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(root: Path) -> None:
    """fsync every file and directory below ``root``, and ``root``."""
    for folder, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))


def publish_directory(beside: Path, target: Path) -> None:
    """Rename a finished directory to ``target``. An older ``target`` is put back when the rename fails."""
    sync_tree(beside)
    old: Path | None = None
    if target.exists():
        old = target.with_name(f".old-{target.name}-{os.getpid()}")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    try:
        os.rename(beside, target)
    except BaseException:
        if old is not None:
            os.rename(old, target)
        raise
    sync_directory(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def disk_fault(error: BaseException) -> str | None:
    """What mends an error that says, or was caused by one that says, that a disk is full or may not be written; None for
    any other error."""
    for part in links(error):
        number = getattr(part, "errno", None)
        # torch's own writer of archives notices a full disk only by its position in the file.
        full = ("No space left", "File too large", "PytorchStreamWriter", "inline_container.cc")
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(words in str(part) for words in full):
            return "free disk space (df -h), or lower trainer.max_ckpt_to_keep"
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return "make the run directory writable"
        if number in (errno.EIO, errno.ESTALE):
            return "check the disk (dmesg)"
    return None


def _raw_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        if start:
            file.seek(start)
            file.readline()
        yield from file


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return row if isinstance(row, dict) else None


def is_disk_error(error: BaseException) -> bool:
    """True for what writing raises when the disk refuses. safetensors has an error of its own, known by name: it is no
    dependency of core."""
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
