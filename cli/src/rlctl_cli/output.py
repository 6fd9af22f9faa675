"""Output for people and for programs. `--json` puts one object alone on stdout; everything else goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from rlctl.errors import RlctlError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1


def emit_json(payload: Mapping[str, Any]) -> None:
    """Print one JSON object with the schema version, alone on stdout. NaN and infinity become null (they are no JSON)."""
    click.echo(json.dumps(_plain({"schema": SCHEMA, **payload}), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)


def console(stderr: bool = False) -> Console:
    """A rich console on stdout (or stderr); wide and plain when it is not a terminal, so that nothing is cut."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; the command group knows better

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 160
    return PipedConsole(file=stream, width=width, highlight=False, soft_wrap=not stream.isatty())


def print_error(error: RlctlError) -> None:
    """The error's lines on stderr, without a traceback."""
    head, *rest = str(error).splitlines()
    click.echo(click.style("error: ", fg="red", bold=True) + head, err=True)
    for line in rest:
        click.echo(line, err=True)
