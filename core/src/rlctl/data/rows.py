"""The rows of a run: from files, or made by a procedural task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlctl.data.columns import Columns, Message, Row, find_columns, source_name, to_row
from rlctl.data.faults import Fault, raise_faults, show_path
from rlctl.data.procedural import make_rows
from rlctl.data.readers import Split, directory_has_split, read_records, split_files

if TYPE_CHECKING:
    from rlctl.config.schema import ColumnsConfig, DataConfig

__all__ = ["Columns", "Message", "Row", "collect_rows", "load_rows", "read_file", "val_entries"]

MAX_FAULTS = 1000
"""Faults kept of one split; a file of the wrong kind has one on each line."""


def load_rows(data: DataConfig, split: Split) -> list[Row]:
    """The rows of a split, or an empty list for ``val`` where the configuration has no validation data.

    Raises:
        DataError: a file cannot be read, or rows are faulty; the message names each by file and line.
    """
    rows, faults = collect_rows(data, split)
    raise_faults(f"{len(faults)} fault{'s' if len(faults) != 1 else ''} in the {split} data", faults)
    return rows


def collect_rows(
    data: DataConfig, split: Split, progress: Callable[[int], None] | None = None
) -> tuple[list[Row], list[Fault]]:
    """Every readable row of a split and every fault (at most ``MAX_FAULTS``). ``progress`` gets the rows read so far.

    Raises:
        DataError: a file is missing or of an unknown kind, a column of ``data.columns`` is not there.
    """
    limit = data.train_max_samples if split == "train" else data.val_max_samples
    if data.task is not None:
        return make_rows(data.task, split)[:limit], []
    entries = data.train_files if split == "train" else val_entries(data)
    rows: list[Row] = []
    faults: list[Fault] = []
    for file in split_files(entries, split):
        rest = None if limit is None else limit - len(rows)
        if rest == 0 or len(faults) >= MAX_FAULTS:
            break
        read_file(file, data.columns, rows, faults, rest, progress)
    return rows, faults


def read_file(
    file: str,
    mapping: ColumnsConfig,
    rows: list[Row],
    faults: list[Fault],
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Append the rows and faults of one file to ``rows`` and ``faults``.

    Raises:
        DataError: see :func:`rlctl.data.readers.read_records` and :func:`rlctl.data.columns.find_columns`.
    """
    shown = file if file.startswith("hf:") else show_path(file)
    name = source_name(file)
    columns: Columns | None = None
    first, bad = len(rows), len(faults)
    for item in read_records(file):
        if isinstance(item, Fault):
            faults.append(item)
        else:
            columns = columns or find_columns(item, mapping, shown)
            made = to_row(item, len(rows) + len(faults), columns, name)
            (faults if isinstance(made, Fault) else rows).append(made)  # pyright: ignore[reportArgumentType]
        if progress is not None and (len(rows) + len(faults)) % 256 == 0:
            progress(len(rows) + len(faults))
        if (limit is not None and len(rows) - first >= limit) or len(faults) >= MAX_FAULTS:
            break
    if len(faults) >= MAX_FAULTS:
        what = f"reading stopped after {MAX_FAULTS} faults; is this a file of another kind?"
        faults.append(Fault("too_many", shown, what, "mend these first", fatal=True))
    if len(rows) == first and len(faults) == bad:
        faults.append(
            Fault("empty", shown, "the file has no rows", "fill it, or take it out of the data files", fatal=True)
        )


def val_entries(data: DataConfig) -> Sequence[str]:
    """``data.val_files``, or those directories of ``data.train_files`` that hold a validation or test file too."""
    return data.val_files or tuple(entry for entry in data.train_files if directory_has_split(entry, "val"))
