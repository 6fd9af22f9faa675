"""The kinds of rules of ``rlctl config migrate``: what becomes of an old key, or why nothing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.config.schema_paths import describe


@dataclass(frozen=True)
class Left:
    """A key that sets nothing. ``needless``: rlctl does so anyway; otherwise its reader has to decide something."""

    reason: str
    needless: bool = False


Outcome = dict[str, Any] | Left
Rule = Callable[[Any, Mapping[str, Any]], Outcome]
"""(value, every leaf of the file by its path) to what is set."""


class UnclearSwitchError(Exception):
    """A switch that is neither true, false nor null: nobody knows whether it was on. ``reason`` says so."""

    def __init__(self, path: str, value: Any) -> None:
        self.reason = f"{path} is neither true nor false there ({describe(value)}): write true or false, without quotes"
        super().__init__(self.reason)


def on(path: str, leaves: Mapping[str, Any]) -> bool:
    """Whether the switch ``path`` is on in the old file. Every rule that depends on a switch asks here.

    Raises:
        UnclearSwitchError: its value is no switch's; the key that depends on it is then not translated.
    """
    value = leaves.get(path)
    if value is None or isinstance(value, bool):
        return value is True
    raise UnclearSwitchError(path, value)


def to(*paths: str) -> Rule:
    return lambda value, _: dict.fromkeys(paths, value)


def unless(unset: Any, path: str, instead: Any = None) -> Rule:
    """``path``, but the value ``unset`` stands for "not set" there (or for ``instead`` here)."""

    def rule(value: Any, _: Mapping[str, Any]) -> Outcome:
        if value != unset and value is not None:
            return {path: value}
        return {path: instead} if instead is not None else Left("not set there, and so by default here", needless=True)

    return rule


def words(path: str, mapping: Mapping[Any, Any], otherwise: str) -> Rule:
    def rule(value: Any, _: Mapping[str, Any]) -> Outcome:
        try:
            return {path: mapping[value]} if value in mapping else Left(otherwise)
        except TypeError:  # a list or mapping where a word was expected
            return Left(otherwise)

    return rule


def needless(reason: str) -> Rule:
    return lambda value, _: Left(reason, needless=True)


def left(reason: str) -> Rule:
    return lambda value, _: Left(reason)


def as_list(path: str) -> Rule:
    return lambda value, _: {path: list(value) if isinstance(value, list) else [value]}


def off_is_needless(reason: str, unsupported: str) -> Rule:
    return lambda value, _: Left(reason, needless=True) if not value else Left(unsupported)
