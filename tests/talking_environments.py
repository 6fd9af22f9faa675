"""Environments for the tests of conversations."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any


class Echo:
    """Counts the turns, and answers each with its number and the row's answer. Says done after ``turns``."""

    def __init__(self, turns: int = 3, role: str = "user") -> None:
        self.turns, self.role = turns, role
        self.count = 0

    def reset(self, row: dict[str, Any]) -> None:
        self.row = row

    def step(self, text: str) -> tuple[Any, float, bool, dict[str, float]]:
        self.count += 1
        words = f"  no. {self.count}\nof {self.row['answer']} "
        done = self.count == self.turns
        # Samples differ in the letters that they write.
        return (
            {"role": self.role, "content": words},
            sum(map(ord, text)) % 7 + self.count / 8,
            done,
            {"letters": len(text)},
        )


class Waiting(Echo):
    """As Echo, async, and notes how many wait at once."""

    now = most = 0

    async def reset(self, row: dict[str, Any]) -> None:
        self.row = row

    async def step(self, text: str) -> tuple[Any, float, bool, dict[str, float]]:
        cls = type(self)
        cls.now += 1
        cls.most = max(cls.most, cls.now)
        for _ in range(5):
            await asyncio.sleep(0)
        cls.now -= 1
        observation, reward, done, _ = super().step(text)
        return observation, reward, done, {"most": cls.most}


class Failing(Echo):
    """Fails as it is told, in the second turn, on rows whose answer begins with 0 to 4."""

    def __init__(self, how: str, always: bool = False) -> None:
        super().__init__(turns=3)
        self.how, self.always = how, always

    def reset(self, row: dict[str, Any]) -> Any:
        super().reset(row)
        if self.how == "reset" and self._here():
            raise KeyError("no such world")
        return self.count if self.how == "reset value" else None

    def _here(self) -> bool:
        return self.always or str(self.row["answer"])[0] in "01234"

    def step(self, text: str) -> tuple[Any, ...]:
        out = super().step(text)
        if self.count < 2 or not self._here():
            return out
        if self.how == "raise":
            raise ValueError("the world is broken")
        if self.how == "slow":
            time.sleep(60)
        if self.how == "die":
            os._exit(3)
        return {"value": ("only two", 1.0), "reward": ("x", float("nan"), False), "nothing": (None, 0.0, False)}.get(
            self.how, out
        )


class Sleepy(Failing):
    """As Failing, async."""

    async def step(self, text: str) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.how == "slow" and self.count >= 1 and self._here():
            await asyncio.sleep(60)
        return super().step(text)


class Random(Echo):
    """Begins each sample differently."""

    def reset(self, row: dict[str, Any]) -> str:
        super().reset(row)
        return f"begin {id(self)}"


class Long(Echo):
    """Begins with more than fits."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().reset(row)
        return [{"role": "user", "content": "x" * 500}]
