"""The environment calculator: arithmetic with a tool. The last turn is right when its last number is the row's answer."""

from __future__ import annotations

from rlctl.data.rewards.number import last_number
from rlctl.environments.arithmetic import calculate
from rlctl.environments.tools import ToolEnvironment


def calc(expression: str) -> str:
    """Compute an arithmetic expression, such as 3*(4+5)."""
    return calculate(expression)


class Calculator(ToolEnvironment):
    """A conversation with the tool ``calc``.

    Args:
        style: ``hermes`` or ``plain`` (``calc[3+4]``).
        show_tools: tell the model of the tool.
        call_reward: of each turn whose calls all succeeded, a help where answers are rarely right at first.
    """

    def __init__(self, style: str = "hermes", show_tools: bool = True, call_reward: float = 0.0) -> None:
        super().__init__([calc], style, show_tools)
        self._call_reward = call_reward

    def finish(self, text: str) -> float:
        wanted = last_number(str(self.row["answer"]))
        return float(wanted is not None and last_number(text) == wanted)

    def step(self, text: str) -> tuple[object, float, bool, dict[str, float]]:
        before = self.errors
        observation, reward, done, numbers = super().step(text)
        if not done and self.errors == before:
            reward += self._call_reward
        return observation, reward, done, numbers
