"""What the methods of an environment return, checked and made plain. Standard library only: it runs beside the user's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.data.finite import finite
from rlctl.data.rewards.worker import JobError
from rlctl.data.roles import ROLES


def messages(value: object, what: str) -> list[dict[str, Any]]:
    """Messages from None (none), text (one of the user), a message or a list of them.

    Raises:
        JobError: it is none of these.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    given = [value] if isinstance(value, Mapping) else value
    if isinstance(given, tuple) and not all(isinstance(message, Mapping) for message in given):
        raise wrong(
            f"the tuple that {what} gives as messages", value, "messages alone: text, a message, a list, or None"
        )
    if not isinstance(given, (list, tuple)):
        raise wrong(what, value, "text, a message {role, content}, a list of messages, or None")
    return [_message(message, what) for message in given]


def _message(message: object, what: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise wrong(what, message, "a message with a role and text as its content")
    if not isinstance(message.get("content"), str):
        raise wrong(what, message.get("content"), "a message with a role and text as its content")
    if message["role"] not in ROLES:
        raise wrong(f"the role of a message of {what}", message["role"], f"one of {', '.join(ROLES)}")
    return {str(key): value for key, value in message.items()}


def stepped(value: object) -> tuple[list[dict[str, Any]], float, bool, dict[str, float]]:
    """(messages, reward, done, numbers) of what ``step`` returned.

    Raises:
        JobError: it is something else, or the reward is no finite number.
    """
    wanted = "(observation, reward, done), or with a dict of numbers behind them"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) not in (3, 4):
        raise wrong("step", value, wanted)
    observation, reward, done, *rest = value
    number = finite(reward)
    if number is None:
        raise wrong("the reward of step", reward, "a finite number")
    if not isinstance(done, (bool, int)):
        raise wrong("done of step", done, "True or False")
    numbers = rest[0] if rest else {}
    if not isinstance(numbers, Mapping):
        raise wrong("the numbers of step", numbers, "a dict")
    said = messages(observation, "step")
    if not said and not done:
        raise wrong("the observation of step", observation, "something for the policy to answer, or done")
    found: dict[str, float] = {}
    for key, item in numbers.items():
        as_number = finite(item)
        if as_number is None:
            raise wrong(f"{str(key)!r} in the dict of step", item, "a finite number to log, or leave it out")
        found[str(key)] = as_number
    return said, number, bool(done), found


def wrong(what: str, value: object, wanted: str) -> JobError:
    """The error of a value that is not what ``what`` has to be."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return JobError(kind="value", what=what, found=f"{type(value).__name__}: {shown}", wanted=wanted)
