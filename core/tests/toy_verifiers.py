"""A taskset of the verifiers library and an environment that talks back, for the adapter's test."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]


class GuessData(vf.TaskData):
    wanted: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def found(self, trace: vf.Trace) -> bool:
        return trace.last_reply == str(self.data.wanted)

    @vf.reward(weight=2.0)
    async def right(self, task: GuessData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.wanted))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for wanted in (3, 5, 7):
            yield GuessTask(
                GuessData(prompt=f"Guess the number of row {wanted}.", system_prompt="Digits only.", wanted=wanted),
                self.config.task,
            )


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Three guesses, told after each whether it is too small."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(2):
                small = int(segment.last_reply) < task.data.wanted
                segment = await talk.turn("too small" if small else "too large")
                if segment.terminated:
                    return


__all__ = ["GuessEnv", "GuessTaskset"]
