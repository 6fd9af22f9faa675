"""Bytes to records: JSON Lines, parquet, a directory of splits, or the hub. Nothing here knows what a column means.

A reader yields a :class:`Record` for each row and a :class:`~rlctl.data.faults.Fault` for each row it cannot read; it
never raises for the content of a file. What is missing altogether (a path, a library) raises DataError.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlctl.data.faults import Fault, listing, nearest, show_path, type_name
from rlctl.errors import DataError

Split = Literal["train", "val"]

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "eval", "test"),
}
"""File names (without ending) that a directory may hold for each split, the preferred first."""

JSONL = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet", ".pq")
DATA_EXTRA = "pip install 'rlctl-core[data]'"
HUB_EXTRA = "pip install 'rlctl-core[hub]'"


@dataclass(frozen=True)
class Record:
    """One row as it is stored: its place in words, and its columns."""

    where: str
    values: dict[str, Any]


def split_files(entries: Sequence[str], split: Split) -> list[str]:
    """The files of a split: each entry is a file, an ``hf:`` name, or a directory whose file of that split is taken.

    Raises:
        DataError: an entry does not exist, or a directory holds no file of the split.
    """
    return [file for entry in entries for file in _expand(entry, split)]


def directory_has_split(entry: str, split: Split) -> bool:
    """True when ``entry`` is a directory with a file of that split."""
    path = Path(entry)
    return not entry.startswith("hf:") and path.is_dir() and bool(_find_split(path, split))


def read_records(entry: str) -> Iterator[Record | Fault]:
    """Rows of one file or ``hf:DATASET[/CONFIG]:SPLIT``, in order.

    Raises:
        DataError: the path cannot be opened, the ending is unknown, or a library is missing.
    """
    if entry.startswith("hf:"):
        return _read_hub(entry)
    path = Path(entry)
    suffix = path.suffix.lower()
    if suffix in JSONL:
        return _read_jsonl(path)
    if suffix in PARQUET:
        return _read_parquet(path)
    raise DataError(
        f"the ending of {show_path(path)} says nothing about its format",
        found=path.suffix or "no ending",
        wanted=".jsonl (one JSON object a line) or .parquet",
        next="convert the file, or rename it if it already is one of these",
    )


def count_rows(entry: str) -> int | None:
    """How many rows a file will probably give, for a progress bar; None when that is not cheap to know."""
    path = Path(entry)
    try:
        if path.suffix.lower() in JSONL:
            with path.open("rb") as stream:
                return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))
    except OSError:
        return None
    return None


def _expand(entry: str, split: Split) -> list[str]:
    if entry.startswith("hf:"):
        return [entry]
    path = Path(entry)
    if path.is_dir():
        found = _find_split(path, split)
        if found:
            return [str(file) for file in found]
        raise DataError(
            f"the directory {show_path(path)} has no file of the {split} split",
            found=listing(sorted(child.name for child in path.iterdir())),
            wanted=" or ".join(f"{name}.jsonl / {name}.parquet" for name in SPLIT_NAMES[split][:2]),
            next=f"name the file itself: data.{split}_files=[{show_path(path)}/FILE.jsonl]",
        )
    if path.is_file():
        return [entry]
    siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings)
    raise DataError(
        f"there is no data file {show_path(path)}",
        found=f"a file {near!r} in the same directory" if near else None,
        wanted="a .jsonl or .parquet file, a directory with train/test files, or hf:DATASET:SPLIT",
        next=f"data.{split}_files=[{show_path(path.parent / near)}]" if near else f"check data.{split}_files",
    )


def _find_split(path: Path, split: Split) -> list[Path]:
    for base in (path, path / "data"):
        if not base.is_dir():
            continue
        children = sorted(child for child in base.iterdir() if child.suffix.lower() in (*JSONL, *PARQUET))
        for name in SPLIT_NAMES[split]:
            exact = [child for child in children if child.stem.lower() == name and child.is_file()]
            # Sharded exports are called train-00000-of-00004.parquet.
            shards = [child for child in children if child.stem.lower().startswith(f"{name}-0") and child.is_file()]
            if exact or shards:
                return exact[:1] or shards
    return []


# ---- JSON Lines ---------------------------------------------------------------------------------------------------
def _read_jsonl(path: Path) -> Iterator[Record | Fault]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(
            f"{show_path(path)} cannot be opened", found=error.strerror, next=f"ls -l {show_path(path)}"
        ) from error
    with stream:
        number = 0
        while True:
            try:
                raw = stream.readline()
            except OSError as error:
                yield Fault(
                    "io", f"{show_path(path)}:{number + 1}", f"cannot be read: {error.strerror}", "copy the file again"
                )
                return
            if not raw:
                return
            number += 1
            item = _parse_line(raw, f"{show_path(path)}:{number}", first=number == 1)
            if item is not None:
                yield item
                if isinstance(item, Fault) and item.fatal:
                    return


def _parse_line(raw: bytes, where: str, first: bool) -> Record | Fault | None:
    """One line of JSON Lines; None for a blank one."""
    if first:
        if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return Fault(
                "encoding",
                where,
                "the file is UTF-16, not UTF-8",
                "iconv -f UTF-16 -t UTF-8 OLD > NEW.jsonl",
                fatal=True,
            )
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    if not raw.strip():
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Fault(
            "encoding",
            where,
            f"byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8",
            "write the file again as UTF-8, or remove the line",
        )
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return _json_fault(text, where, error, first)
    except RecursionError:
        return Fault("json", where, "the JSON is nested too deeply to be a data row", "remove the line")
    except ValueError as error:  # an integer of more digits than Python converts
        return Fault("json", where, f"a number is too long to be read: {error}", "write such a number as a string")
    if not isinstance(value, dict):
        if first and isinstance(value, list):
            return _array_fault(where)
        return Fault(
            "json", where, f"holds {type_name(value)}, not an object", 'write one {"prompt": ...} object a line'
        )
    return Record(where, value)


def _array_fault(where: str) -> Fault:
    convert = (
        'python -c "import json,sys; [print(json.dumps(r)) for r in json.load(open(sys.argv[1]))]" OLD.json > NEW.jsonl'
    )
    return Fault("json", where, "the file is one JSON array; JSON Lines has one object a line", convert, fatal=True)


def _json_fault(text: str, where: str, error: json.JSONDecodeError, first: bool) -> Fault:
    stripped = text.strip()
    if first and stripped.startswith("[") and not stripped.endswith("]"):
        return _array_fault(where)
    if first and stripped == "{":
        return Fault(
            "json",
            where,
            "an object is spread over several lines; JSON Lines has one object a line",
            "jq -c . OLD.json > NEW.jsonl",
            fatal=True,
        )
    if not stripped.endswith("}"):
        return Fault(
            "json", where, f"the line is cut off ({error.msg} at column {error.colno})", "complete or remove the line"
        )
    return Fault("json", where, f"is not JSON: {error.msg} at column {error.colno}", "correct or remove the line")


# ---- parquet ------------------------------------------------------------------------------------------------------
def _read_parquet(path: Path) -> Iterator[Record | Fault]:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"reading {show_path(path)} needs pyarrow, which is not installed", next=DATA_EXTRA)
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"reading {show_path(path)} needs pyarrow, which is installed but does not load",
            found=error,
            next="pip install --force-reinstall pyarrow",
        ) from error
    # What a damaged file makes pyarrow raise, from a bad footer to text that is no UTF-8 or a length that overflows.
    damaged = (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, MemoryError, KeyError)
    shown = show_path(path)
    row = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    yield Record(f"{shown} row {row}", values)
                    row += 1
    except PermissionError as error:
        raise DataError(f"{shown} cannot be opened", found=error.strerror, next=f"ls -l {shown}") from error
    except damaged as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Fault(
            "parquet",
            f"{shown} row {row}",
            f"the parquet file is damaged or not parquet: {what[:160]}",
            "write or download the file again",
            fatal=True,
        )


# ---- hub ----------------------------------------------------------------------------------------------------------
def _read_hub(entry: str) -> Iterator[Record | Fault]:
    name, _, split = entry.removeprefix("hf:").partition(":")
    if not name or not split:
        raise DataError(f"{entry!r} names no split", wanted="hf:DATASET[/CONFIG]:SPLIT", next=f"{entry}:train")
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"reading {entry} needs the datasets library, which is not installed", next=HUB_EXTRA)
    return _iterate_hub(entry, name.split("/"), split)


def _iterate_hub(entry: str, parts: list[str], split: str) -> Iterator[Record | Fault]:
    import datasets  # pyright: ignore[reportMissingImports]

    # owner/name/config; owner/name; name. A two-part name that is no dataset is read as name/config.
    tries = [("/".join(parts[:2]), parts[2] if len(parts) > 2 else None)]
    if len(parts) == 2:
        tries.append((parts[0], parts[1]))
    failure: Exception | None = None
    for path, config in tries:
        try:
            rows = datasets.load_dataset(path, config, split=split)
            break
        except Exception as error:  # the library raises its own, the network's and the file system's errors
            failure = failure or error
    else:
        assert failure is not None
        raise DataError(
            f"the dataset {entry} could not be loaded",
            found=f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}",
            wanted="a dataset, configuration and split that the hub or the local cache has",
            next="check the name and the network, or save the rows as .jsonl and name that file",
        ) from failure
    for index, values in enumerate(rows):
        yield Record(f"{entry} row {index}", dict(values))
