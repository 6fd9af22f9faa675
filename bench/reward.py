"""The reward that both sides of the benchmark use."""

from __future__ import annotations

import re


def score(completion: str, answer: str, chat: bool) -> float:
    """1.0 for exactly the answer; on the chat work 0.4 when the last number in the text is the answer."""
    if completion.strip() == answer:
        return 1.0
    return 0.4 if chat and re.findall(r"\d+", completion)[-1:] == [answer] else 0.0


def reward(completion: str, ground_truth: str, chat: bool = False) -> float:
    return score(completion, ground_truth, chat)
