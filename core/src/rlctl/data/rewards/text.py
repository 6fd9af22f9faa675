"""Rewards that compare text: exact_match, contains, regex, format, length."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlctl.data.rewards.base import RewardInput
from rlctl.errors import ConfigError


@dataclass(frozen=True)
class FunctionReward:
    """A reward that is one pure function."""

    function: Callable[[RewardInput], float]
    compares: bool = False

    def __call__(self, item: RewardInput) -> float:
        return self.function(item)


def exact_match(*, strip: bool = True, ignore_case: bool = False) -> FunctionReward:
    """1.0 when the completion is the answer, else 0.0.

    Args:
        strip: leave out white space around both.
        ignore_case: compare without regard to case.
    """

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    return FunctionReward(lambda item: float(normal(item.text) == normal(item.answer)), compares=True)


def contains(
    *, text: str | Sequence[str] | None = None, ignore_case: bool = False, words: bool = False
) -> FunctionReward:
    """1.0 when the completion contains the answer, or every one of ``text``.

    Args:
        text: what to look for; default: the row's answer.
        ignore_case: compare without regard to case.
        words: it must not be part of a longer word or number.
    """
    wanted = None if text is None else ([text] if isinstance(text, str) else list(text))
    if wanted is not None and (not wanted or not all(wanted)):
        raise ConfigError("the reward contains has an empty text to look for", next="remove args.text, or fill it")

    def found(needle: str, haystack: str) -> bool:
        if ignore_case:
            needle, haystack = needle.casefold(), haystack.casefold()
        if not words:
            return needle in haystack
        return re.search(rf"(?<!\w){re.escape(needle)}(?!\w)", haystack) is not None

    def score(item: RewardInput) -> float:
        needles = [item.answer.strip()] if wanted is None else wanted
        return float(all(found(needle, item.text) for needle in needles))

    return FunctionReward(score, compares=wanted is None)


def regex(
    *, pattern: str, group: int | str | None = None, ignore_case: bool = False, dotall: bool = False
) -> FunctionReward:
    """1.0 when ``pattern`` is found in the completion; with ``group``, when that group of the last match is the answer.

    Args:
        pattern: a Python regular expression.
        group: number or name of the group that holds the answer; both sides are stripped.
        ignore_case: flag of the expression, and of the comparison.
        dotall: a dot also matches a line break.
    """
    compiled = _compile(pattern, (re.IGNORECASE if ignore_case else 0) | (re.DOTALL if dotall else 0), "regex")
    if group is not None and group not in (*range(compiled.groups + 1), *compiled.groupindex):
        raise ConfigError(
            f"the pattern of the reward regex has no group {group!r}",
            found=f"{compiled.groups} groups" + "".join(f", {name}" for name in compiled.groupindex),
            next="write args.group as the number or name of a group in args.pattern",
        )

    def score(item: RewardInput) -> float:
        last = None
        for match in compiled.finditer(item.text):
            last = match
            if group is None:
                return 1.0
        if last is None or group is None:
            return 0.0
        got, wanted = (last[group] or "").strip(), item.answer.strip()
        return float(got.casefold() == wanted.casefold() if ignore_case else got == wanted)

    return FunctionReward(score)


def format_reward(*, pattern: str | None = None, tags: Sequence[str] = ()) -> FunctionReward:
    """1.0 when the stripped completion has the wanted form.

    Args:
        pattern: a regular expression that must match all of it; a dot also matches a line break.
        tags: names that must each appear once as ``<name>...</name>``, in this order, not inside one another.
    """
    if (pattern is None) == (not tags):
        raise ConfigError(
            "the reward format takes exactly one of pattern and tags", next="set args.pattern or args.tags"
        )
    if pattern is not None:
        compiled = _compile(pattern, re.DOTALL, "format")
        return FunctionReward(lambda item: float(compiled.fullmatch(item.text.strip()) is not None))
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]

    def score(item: RewardInput) -> float:
        if any(item.text.count(mark) != 1 for mark in marks):
            return 0.0
        places = [item.text.index(mark) for mark in marks]
        return float(places == sorted(places))

    return FunctionReward(score)


def length(
    *, target: int | None = None, limit: int | None = None, buffer: int = 0, unit: str = "tokens"
) -> FunctionReward:
    """A value for the length n of a completion.

    Args:
        target: ``max(0, 1 - |n - target| / target)``.
        limit: 0 up to ``limit - buffer``, then falling evenly to -1 at ``limit`` and beyond: the soft overlong
            punishment of DAPO (arXiv 2503.14476, equation 13).
        buffer: width of the fall.
        unit: ``tokens`` or ``characters``.
    """
    if (target is None) == (limit is None):
        raise ConfigError(
            "the reward length takes exactly one of target and limit", next="set args.target or args.limit"
        )
    if unit not in ("tokens", "characters"):
        raise ConfigError(
            f"the reward length knows no unit {unit!r}", wanted="tokens or characters", next="args.unit=tokens"
        )
    bound = target if target is not None else limit
    assert bound is not None
    if bound < 1 or buffer < 0 or buffer > bound:
        raise ConfigError(
            "the reward length has an impossible bound",
            found=f"{'target' if target is not None else 'limit'}={bound}, buffer={buffer}",
            wanted="at least 1, and 0 <= buffer <= limit",
        )

    def size(item: RewardInput) -> int:
        return item.num_tokens if unit == "tokens" else len(item.text)

    if target is not None:
        return FunctionReward(lambda item: max(0.0, 1.0 - abs(size(item) - target) / target))

    def penalty(item: RewardInput) -> float:
        over = size(item) - (bound - buffer)
        if over <= 0:
            return 0.0
        return -min(1.0, over / buffer) if buffer else -1.0

    return FunctionReward(penalty)


def _compile(pattern: str, flags: int, reward: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"the pattern of the reward {reward} is no regular expression",
            found=f"{pattern!r}: {error}",
            next="correct args.pattern",
        ) from error
