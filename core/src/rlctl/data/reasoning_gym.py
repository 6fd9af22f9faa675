"""Procedural tasks of the reasoning-gym library (extra ``reasoning-gym``), scored by the library's own functions.

A row keeps the library's entry (question, answer, metadata) in ``extra["entry"]``, which its scorer needs.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from rlctl.data.columns import Row
from rlctl.data.faults import listing, nearest
from rlctl.data.readers import Split
from rlctl.errors import DataError

if TYPE_CHECKING:
    from rlctl.config.schema import TaskConfig

EXTRA = "pip install 'rlctl-core[reasoning-gym]'"
SEED_STRIDE = 1_000_003
"""The library makes entry i of a data set from (seed + i): the seeds of the two splits lie far apart."""


def require_reasoning_gym() -> None:
    """Raise DataError with the install command when the library is not there."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError("reasoning_gym:NAME tasks need the reasoning-gym library, which is not installed", next=EXTRA)


def make_reasoning_rows(task: TaskConfig, split: Split) -> list[Row]:
    """The rows of a split of ``reasoning_gym:NAME``; the splits share no question.

    Raises:
        DataError: the library is missing, the name or an argument is refused, or a split runs short of questions.
    """
    require_reasoning_gym()
    val = _entries(task, "val", task.val_size, frozenset())
    chosen = val if split == "val" else _entries(task, "train", task.train_size, frozenset(val))
    return [
        Row(
            index=index,
            source=f"{task.name} {split} row {index}",
            prompt=entry["question"],
            answer=None if entry["answer"] is None else str(entry["answer"]),
            response=None,
            data_source=task.name,
            extra={"entry": entry},
            ground_truth=entry["answer"],
        )
        for index, entry in enumerate(chosen.values())
    ]


def _entries(task: TaskConfig, split: Split, size: int, excluded: frozenset[str]) -> dict[Any, dict[str, Any]]:
    """``size`` entries by question (validation) or by number (training, where a question may come again)."""
    made: dict[Any, dict[str, Any]] = {}
    tries = 20 * size + 200
    dataset = _create(task, seed=task.seed * SEED_STRIDE + (0 if split == "val" else 500_000_000), size=tries)
    for number in range(tries):
        entry = _entry(task, dataset, number)
        question = entry["question"]
        if question in excluded:
            continue
        made.setdefault(question if split == "val" else number, entry)
        if len(made) == size:
            return made
    raise DataError(
        f"the task {task.name} has too few different questions",
        found=f"{len(made)} for the {split} split in {tries} tries",
        wanted=f"data.task.{split}_size={size}",
        next=f"data.task.val_size={max(1, len(made) // 2)}, or data.task.args that make harder questions",
    )


def _create(task: TaskConfig, seed: int, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = task.name.partition(":")[2]
    if name not in DATASETS:
        near = nearest(name, DATASETS)
        raise DataError(
            f"reasoning-gym has no task {name!r}",
            found=f"did you mean {near!r}?" if near else None,
            wanted=listing(sorted(DATASETS), limit=12),
            next=f"data.task.name=reasoning_gym:{near or 'chain_sum'}",
        )
    taken = {"seed", "size"} & set(task.args)
    if taken:
        raise DataError(
            f"data.task.args holds {listing(taken)}", next="set data.task.seed, train_size and val_size instead"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **task.args)
    except Exception as error:  # a third-party task checks its arguments with assert, TypeError or ValueError
        raise DataError(
            f"reasoning-gym refuses the arguments of {name!r}",
            found=f"{type(error).__name__}: {error}",
            next="change data.task.args",
        ) from error


def _entry(task: TaskConfig, dataset: Any, number: int) -> dict[str, Any]:
    try:
        return dataset[number]
    except Exception as error:  # third-party code that makes a row
        raise DataError(
            f"reasoning-gym could not make entry {number} of {task.name}",
            found=f"{type(error).__name__}: {error}",
            next="change data.task.args or data.task.seed",
        ) from error
