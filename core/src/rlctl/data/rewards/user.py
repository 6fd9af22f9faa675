"""A user's Python function as a reward: ``path/to/file.py:function``.

The function is called with keyword arguments, those of :data:`rlctl.data.rewards.user_job.OFFERED` that its signature
names, plus ``args`` of the configuration. It returns a number, or a dict with ``score`` and further numbers to be logged.
It runs in a process of its own: an endless loop meets ``reward.timeout_s``, a crash takes nothing with it, and what it
prints goes to standard error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.data.faults import listing, nearest, show_path
from rlctl.data.rewards.base import RewardContext, RewardInput
from rlctl.data.rewards.process import (
    JobDiedError,
    JobFailedError,
    JobLoadError,
    JobProcess,
    JobTimeoutError,
    unexpected,
)
from rlctl.errors import DataError


class UserReward:
    """A loaded function."""

    compares = False

    def __init__(self, path: Path, function: str, job: JobProcess, timeout_s: float) -> None:
        self._path = path
        self._function = function
        self._job = job
        self._timeout_s = timeout_s

    def __call__(self, item: RewardInput) -> Mapping[str, float]:
        row = item.row
        place = f"{row.source} (row {row.index})"
        truth = row.ground_truth if row.ground_truth is not None else row.answer
        payload = {
            "data_source": row.data_source,
            "solution_str": item.text,
            "ground_truth": truth,
            "answer": truth,
            "extra_info": row.extra,
            "prompt": row.prompt if isinstance(row.prompt, str) else [dict(message) for message in row.prompt],
            "completion": item.text,
            "finish_reason": item.finish_reason,
        }
        name = f"the reward function {self._function} in {show_path(self._path)}"
        try:
            return self._job.call(payload)
        except JobFailedError as error:
            raise _failed(name, self._path, error, f"failed on {place}") from None
        except JobLoadError as error:
            raise _not_loaded(name, self._path, error) from None
        except JobTimeoutError:
            raise DataError(
                f"{name} took longer than reward.timeout_s on {place}",
                found=f"no value after {self._timeout_s:g} s",
                next=f"make it quicker for this completion, or set reward.timeout_s={self._timeout_s * 4:g}",
            ) from None
        except JobDiedError as error:
            raise DataError(
                f"{name} brought its process down on {place}",
                found=f"the process {error.how}",
                wanted="a function that returns a number",
                next=f"call it by hand with this row: {show_path(self._path)}",
            ) from None

    def close(self) -> None:
        self._job.close()


def user_function(name: str, args: Mapping[str, Any], context: RewardContext) -> UserReward:
    """Load ``path/to/file.py:function``; the path is relative to ``context.base_dir``.

    Raises:
        DataError: no such file or function, the file fails when imported, or its signature asks for something else.
    """
    file, _, function = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
    path = Path(os.path.normpath(context.base_dir / Path(file).expanduser()))
    if not path.is_file():
        siblings = [child.name for child in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        raise DataError(
            f"there is no reward file {show_path(path)}",
            found=f"{near} in the same directory" if near else None,
            wanted="a Python file; its path is relative to the configuration file",
            next=f"write {Path(file).parent / near}:{function or 'FUNCTION'}" if near else "check reward.components",
        )
    job = JobProcess(
        "rlctl.data.rewards.user_job:load",
        {"path": str(path), "function": function, "args": dict(args)},
        context.timeout_s,
    )
    label = f"the reward function {function or '?'} in {show_path(path)}"
    try:
        job.start()
    except JobFailedError as error:
        raise _failed(label, path, error, "cannot be loaded", function) from None
    except JobLoadError as error:
        raise _not_loaded(label, path, error) from None
    return UserReward(path, function, job, context.timeout_s)


def _not_loaded(name: str, path: Path, error: JobLoadError) -> DataError:
    return DataError(
        f"{name} could not be loaded", found=f"its process {error.how}", next=f"try: python {show_path(path)}"
    )


def _failed(name: str, path: Path, error: JobFailedError, what: str, function: str = "") -> DataError:
    fields = error.fields
    kind = fields.get("kind")
    shown = show_path(path)
    if kind in ("raised", "import"):
        line = fields.get("line")
        return DataError(
            f"{name} {what}",
            details=fields["lines"],
            found=fields["error"] + (f" ({shown}, line {line})" if line else ""),
            next=f"correct {shown}" + (f", line {line}" if line else ""),
        )
    if kind == "missing":
        functions = fields["functions"]
        near = nearest(function, functions) if function else None
        return DataError(
            f"the file {shown} has no function {function!r}" if function else f"{shown} is named without a function",
            found=listing(functions),
            wanted=f"did you mean {near!r}?" if near else "path/to/file.py:function",
            next=f"name: {shown}:{near or (functions[0] if functions else 'FUNCTION')}",
        )
    if kind == "signature":
        parts = [f"needs {listing(fields['required'])}, which nobody gives"] if fields["required"] else []
        parts += [f"does not take {listing(fields['unknown'])} of args"] if fields["unknown"] else []
        return DataError(
            f"{name} has a signature that cannot be called",
            found=" and ".join(parts),
            wanted=f"any of {listing(fields['offered'])}, by keyword, and the component's args",
            next=f"rename the arguments in {shown}, or add **kwargs",
        )
    if kind == "value":
        return DataError(
            f"{name} {what}: it returned no finite number",
            found=fields["found"],
            wanted='a float, or a dict with a float "score"',
            next=f"correct {shown}, so that it returns a number for every completion",
        )
    return unexpected(name, error)
