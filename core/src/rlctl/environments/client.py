"""The parent side of an environment: its process, and its failures in words. Imports no torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.data.columns import Row
from rlctl.data.faults import listing, nearest, show_path
from rlctl.data.rewards.process import JobDiedError, JobFailedError, JobLoadError, JobProcess, JobTimeoutError
from rlctl.environments.host import Outcome
from rlctl.errors import DataError

GRACE_S = 5.0
"""How long a call may outlive its limit before its process is ended: an alarm cannot interrupt native code."""


@dataclass(frozen=True)
class Target:
    """Where the class is, and what messages call it.

    Args:
        where: ``path/to/file.py:Class`` or ``module:Class``.
        name: as the configuration has it.
        meant: what may have been meant where there is no such module: the file of that name.
    """

    where: str
    name: str
    meant: str | None = None

    @property
    def file(self) -> str:
        """What its author mends."""
        place = self.where.rpartition(":")[0]
        return show_path(Path(place)) if place.endswith(".py") else place


class EnvironmentClient:
    """One environment in its process. Close it at the end.

    Raises:
        DataError: it does not load, or refuses its arguments.
    """

    def __init__(self, target: Target, args: Mapping[str, Any], timeout_s: float, max_concurrency: int) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._width = max_concurrency
        arguments = {
            "target": target.where,
            "args": dict(args),
            "timeout_s": timeout_s,
            "max_concurrency": max_concurrency,
        }
        self._job = JobProcess("rlctl.environments.host:load", arguments, timeout_s + GRACE_S)
        try:
            self._job.start()
            about = self._job.call(("describe", ()))
        except JobFailedError as error:
            raise self._refused(error.fields) from None
        except (JobLoadError, JobDiedError) as error:
            raise DataError(
                f"{self.label} could not be loaded",
                found=f"its process {error.how}",
                next=f"import it by hand: {target.file}",
            ) from None
        self.is_async: bool = about["async"]
        self.tools: list[dict[str, Any]] = about["tools"]

    @property
    def label(self) -> str:
        return f"the environment {self.target.name}"

    def reset(self, calls: Sequence[tuple[int, Row]]) -> list[Outcome]:
        """Begin conversations: (number, row) each. The value of an outcome is a list of messages."""
        rows = dict(calls)
        return self._call("reset", [(number, _observed(row)) for number, row in calls], rows)

    def step(self, calls: Sequence[tuple[int, str]], rows: Mapping[int, Row]) -> list[Outcome]:
        """Answer turns: (number, text) each. The value of an outcome is (messages, reward, done, numbers)."""
        return self._call("step", calls, rows)

    def end(self, numbers: Sequence[int]) -> None:
        """Forget conversations that are over."""
        # A process that is gone has forgotten them.
        if numbers and self._job.pid is not None:
            with contextlib.suppress(JobFailedError, JobTimeoutError, JobDiedError):
                self._job.call(("close", list(numbers)))

    def close(self) -> None:
        """End the process."""
        self._job.close()

    def __enter__(self) -> EnvironmentClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(self, method: str, calls: Sequence[tuple[int, Any]], rows: Mapping[int, Row]) -> list[Outcome]:
        if not self.is_async:
            return [out for call in calls for out in self._asked(method, [call], rows, self._timeout_s)]
        rounds = math.ceil(len(calls) / self._width)
        return self._asked(method, calls, rows, rounds * self._timeout_s)

    def _asked(
        self, method: str, calls: Sequence[tuple[int, Any]], rows: Mapping[int, Row], limit_s: float
    ) -> list[Outcome]:
        """Raises DataError when the process is gone: the state of every open conversation is gone with it."""
        try:
            return self._job.call((method, list(calls)), limit_s + GRACE_S)
        except JobTimeoutError:
            how = (
                f"gave no answer within rollout.environment.timeout_s={self._timeout_s:g} and could not be interrupted"
            )
        except JobDiedError as error:
            how = error.how
        numbers = [number for number, _ in calls]
        row = rows[numbers[0]]
        more = f" or one of {len(numbers) - 1} others" if len(numbers) > 1 else ""
        raise DataError(
            f"{self.label} brought its process down in {method} on {row.source} (row {row.index}){more}",
            found=f"the process {how}",
            wanted=f"a {method} that returns or raises",
            next=f"call it by hand with this row: {self.target.file}",
        ) from None

    # ---- words ----------------------------------------------------------------------------------------------------
    def fault(self, method: str, row: Row, fields: Mapping[str, Any]) -> DataError:
        """The error of a failed call on ``row``."""
        place = f"{row.source} (row {row.index})"
        kind = fields.get("kind")
        file = self.target.file
        hint = "rollout.environment.on_error=zero ends such a conversation with a reward of 0"
        if kind == "timeout":
            return DataError(
                f"{self.label} took longer than rollout.environment.timeout_s in {method} on {place}",
                found=f"no answer after {self._timeout_s:g} s",
                next=f"make {method} quicker, or set rollout.environment.timeout_s={self._timeout_s * 4:g}; {hint}",
            )
        if kind == "value":
            return DataError(
                f"{self.label} returned something else in {method} on {place}",
                details=(f"{fields['what']} is not what it has to be",),
                found=fields["found"],
                wanted=fields["wanted"],
                next=f"correct {file}",
            )
        line = fields.get("line")
        return DataError(
            f"{self.label} failed in {method} on {place}",
            details=fields.get("lines", ()),
            found=str(fields.get("error", fields)) + (f" ({file}, line {line})" if line else ""),
            next=f"correct {file}; {hint}",
        )

    def _refused(self, fields: Mapping[str, Any]) -> DataError:
        kind, file = fields.get("kind"), self.target.file
        name = self.target.where.rpartition(":")[2]
        if kind == "missing":
            near = nearest(name, fields["functions"])
            return DataError(
                f"{file} has no class {name!r}",
                found=listing(fields["functions"]) or "no class at all",
                wanted=f"did you mean {near!r}?" if near else "the class of an environment",
                next=f"rollout.environment.name={self.target.where.rpartition(':')[0]}:{near or 'CLASS'}",
            )
        if kind == "methods":
            return DataError(
                f"{self.label} is no environment",
                found=f"without {listing(fields['missing'])}",
                wanted="a class with reset(row) and step(text)",
                next=f"add {fields['missing'][0]} to {file}",
            )
        if kind == "value":
            return DataError(
                f"{self.label} cannot be used: {fields['what']}",
                found=fields["found"],
                wanted=fields["wanted"],
                next=f"correct {file}",
            )
        line = fields.get("line")
        if kind == "function":
            return DataError(
                f"{self.label} is a function",
                found=f"{name} ({file}, line {line})" if line else name,
                wanted="a class with reset(row) and step(text)",
                next=f"make {name} a class, or name the one that is meant: rollout.environment.name="
                f"{self.target.where.rpartition(':')[0]}:CLASS",
            )
        if kind == "tool":
            place = file if fields["file"] is None else show_path(fields["file"])
            line = fields["line"]
            return DataError(
                f"{self.label} has no tools that can be used",
                found=fields["what"] + (f" ({place}, line {line})" if line else ""),
                wanted=fields["wanted"],
                next=f"correct {place}" + (f", line {line}" if line else ""),
            )
        if kind == "arguments":
            return DataError(
                f"{self.label} refuses rollout.environment.args",
                found=fields["error"],
                wanted=listing(fields["takes"]) or "no arguments",
                next=f"correct rollout.environment.args, or __init__ of {name} in {file}",
            )
        if kind == "import" and self.target.meant is not None and "ModuleNotFoundError" in fields["error"]:
            return DataError(
                f"{self.label} does not load",
                found=fields["error"],
                wanted=f"did you mean the file, {self.target.meant}?",
                next=f"rollout.environment.name={self.target.meant}",
            )
        what = "cannot be made" if kind == "construct" else "does not load"
        return DataError(
            f"{self.label} {what}",
            details=fields.get("lines", ()),
            found=str(fields.get("error", fields.get("message", ""))) + (f" ({file}, line {line})" if line else ""),
            next=str(
                fields.get("next") or f"correct {'rollout.environment.args, or ' if kind == 'construct' else ''}{file}"
            ),
        )


def _observed(row: Row) -> dict[str, Any]:
    prompt = row.prompt if isinstance(row.prompt, str) else [dict(message) for message in row.prompt]
    return {
        "index": row.index,
        "source": row.source,
        "prompt": prompt,
        "answer": row.answer,
        "ground_truth": row.ground_truth if row.ground_truth is not None else row.answer,
        "data_source": row.data_source,
        "extra_info": row.extra,
    }
