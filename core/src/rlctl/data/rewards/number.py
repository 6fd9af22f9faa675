"""The reward number: is the last number of the completion the answer?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation

from rlctl.data.faults import excerpt
from rlctl.data.rewards.base import RewardInput
from rlctl.data.rewards.text import FunctionReward
from rlctl.errors import ConfigError, DataError

# A sign counts unless it stands between two terms (3-2); a currency may stand before or after it.
NUMBER = re.compile(
    r"""(?:(?<![\w.)\]])(?P<sign>[-+\u2212]))?[$\u20ac\u00a3]?(?P<inner>(?<=[$\u20ac\u00a3])[-\u2212])?
        (?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?P<exponent>[eE][-+]?\d{1,4}(?!\w))?""",
    re.VERBOSE,
)


def number(*, tolerance: float = 0.0, hashes_only: bool = False) -> FunctionReward:
    """1.0 when the last number of the completion equals the answer's, else 0.0.

    A number after the last ``####`` (GSM8K's form) goes before any other. Thousands separators, currency signs, ``%`` and
    a minus sign of either kind are understood: ``$1,234.50`` is 1234.5, ``50%`` is 50.

    Args:
        tolerance: largest absolute difference that still counts as equal.
        hashes_only: only a number after ``####`` counts.
    """
    if not 0 <= tolerance < float("inf"):
        raise ConfigError("the reward number takes a tolerance of at least 0", found=tolerance, next="args.tolerance=0")

    def score(item: RewardInput) -> float:
        wanted = last_number(item.answer)
        if wanted is None:
            raise DataError(
                f"the answer of {item.row.source} (row {item.row.index}) holds no number",
                found=repr(excerpt(item.answer)),
                wanted="a number, as the reward number compares nothing else",
                next="correct the row, or use the reward exact_match or math",
            )
        got = last_number(item.text, hashes_only)
        if got is None:
            return 0.0
        return float(got == wanted or (tolerance > 0 and abs(float(got) - float(wanted)) <= tolerance))

    return FunctionReward(score, compares=True)


def last_number(text: str, hashes_only: bool = False) -> Decimal | None:
    """The number after the last ``####``, else the last one of the text, else None."""
    _, marker, tail = text.rpartition("####")
    if marker:
        first = next(_numbers(tail), None)
        if first is not None or hashes_only:
            return first
    elif hashes_only:
        return None
    found = list(_numbers(text))
    return found[-1] if found else None


def _numbers(text: str) -> Iterator[Decimal]:
    for match in NUMBER.finditer(text):
        sign = "-" if (match["sign"] or match["inner"] or "+") in "-\u2212" else ""
        try:
            yield Decimal(sign + match["digits"].replace(",", "") + (match["exponent"] or ""))
        except InvalidOperation:  # other scripts' digits mixed with ours
            continue
