"""The rows of a run: from files, or made by a procedural task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlctl.data.columns import Columns, Message, Pair, Row, find_columns, source_name, to_row
from rlctl.data.faults import Fault, raise_faults, show_path
from rlctl.data.pair_columns import has_pair
from rlctl.data.procedural import make_rows, with_pair
from rlctl.data.readers import Split, directory_has_split, read_records, split_files

if TYPE_CHECKING:
    from rlctl.config.schema import ColumnsConfig, DataConfig

__all__ = ["Columns", "Message", "Pair", "Row", "collect_rows", "load_rows", "read_file", "val_entries"]

MAX_FAULTS = 1000
"""Faults kept of one split; a file of the wrong kind has one on each line."""


def load_rows(data: DataConfig, split: Split, *, pairs: bool = False) -> list[Row]:
    """The rows of a split, or an empty list for ``val`` where the configuration has no validation data.

    Args:
        pairs: rows are pairs of responses.

    Raises:
        DataError: a file cannot be read, or rows are faulty; the message names each by file and line.
    """
    rows, faults = collect_rows(data, split, pairs=pairs)
    raise_faults(f"{len(faults)} fault{'s' if len(faults) != 1 else ''} in the {split} data", faults)
    return rows


def collect_rows(
    data: DataConfig, split: Split, progress: Callable[[int], None] | None = None, *, pairs: bool | None = False
) -> tuple[list[Row], list[Fault]]:
    """Every readable row of a split and every fault (at most ``MAX_FAULTS``). ``progress`` gets the rows read so far.

    Args:
        pairs: rows are pairs of responses; None: where a file has columns of that name.

    Raises:
        DataError: a file is missing or of an unknown kind, a column of ``data.columns`` is not there.
    """
    limit = data.train_max_samples if split == "train" else data.val_max_samples
    if data.task is not None:
        rows = make_rows(data.task, split)[:limit]
        return [with_pair(row, data.task.seed) for row in rows] if pairs else rows, []
    entries = data.train_files if split == "train" else val_entries(data)
    rows: list[Row] = []
    faults: list[Fault] = []
    for file in split_files(entries, split):
        rest = None if limit is None else limit - len(rows)
        if rest == 0 or len(faults) >= MAX_FAULTS:
            break
        read_file(file, data.columns, rows, faults, rest, progress, pairs=pairs)
    return rows, faults


def read_file(
    file: str,
    mapping: ColumnsConfig,
    rows: list[Row],
    faults: list[Fault],
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    *,
    pairs: bool | None = False,
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
            if columns is None:
                paired = has_pair(item.values, mapping) if pairs is None else pairs
                columns = find_columns(item, mapping, shown, pairs=paired)
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
