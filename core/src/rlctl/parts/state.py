"""What a directory of torch.distributed.checkpoint holds, beside what an engine wants of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from rlctl.errors import CheckpointError

_SAME = "resume with the model and backend that wrote it"


def check_present(path: Path, targets: Mapping[str, Any], wanted: str) -> None:
    """Every one of ``targets`` is there, in its own size. (Loading one of another size ends in an error of torch's own.)

    Args:
        wanted: what the state is made of, in words.

    Raises:
        CheckpointError: the index cannot be read, something is missing, or has another size.
    """
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged index fails in whatever way its bytes lead to
        raise CheckpointError(
            "the checkpoint's index cannot be read",
            found=f"{path}: {in_one_line(error)}",
            next="resume from an earlier checkpoint",
        ) from error
    missing = sorted(set(targets) - set(stored))
    if missing:
        raise CheckpointError(
            "the checkpoint does not hold all of this model's state",
            found=f"{len(missing)} missing, first {missing[0]}",
            wanted=wanted,
            next=_SAME,
        )
    for name, target in targets.items():
        size = getattr(stored[name], "size", None)
        if size is not None and tuple(size) != tuple(target.shape):
            raise CheckpointError(
                "the checkpoint is of a model with other sizes",
                found=f"{name} {list(size)}",
                wanted=f"{list(target.shape)}",
                next=_SAME,
            )


def in_one_line(error: BaseException) -> str:
    """The last line of an error's text, which is where libraries put what happened; at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:200] + " ..."
