"""The environment verifiers: environments of the ``verifiers`` library (its v1 interface, 0.4) with one agent.

What is used of the library are the parts that authors of environments write against: ``load_environment``, a task's data, its
``@stop`` and ``score``, and the hooks ``setup``, ``run`` and ``finalize`` of an environment. Its own agents call a model over HTTP;
here the agent is the policy, so an object in the agent's place hands each request for a turn out, and the turn in. The library is
imported when an object is made.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rlctl.data.finite import finite
from rlctl.data.rewards.worker import JobError

EXTRA = "pip install 'rlctl-core[verifiers]'"
_OVER = object()


class Verifiers:
    """A conversation with one task of a taskset.

    The row says which: its column ``task`` is the number of the task in the taskset, else the row's own number is.

    Args:
        id: the taskset's package or module, as verifiers names it.
        config: further settings of the environment's configuration.
    """

    def __init__(self, id: str, config: dict[str, Any] | None = None) -> None:
        if importlib.util.find_spec("verifiers") is None:
            raise JobError(kind="construct", error="the verifiers library is not installed", next=EXTRA)
        self._env, self._seat = _environment(id, json.dumps(config or {}, sort_keys=True))
        self._asked: asyncio.Queue[Any] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._episode: asyncio.Task[None] | None = None
        self._traces: list[Any] = []

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        number = int(row["extra_info"].get("task", row["index"]))
        task = _task(self._env, number)
        _require_plain(self._env, task)
        self._episode = asyncio.create_task(self._play(task))
        messages = await self._next()
        if messages is _OVER:
            raise RuntimeError("the environment ended before it asked for a turn")
        return messages

    async def step(self, text: str) -> tuple[Any, float, bool, dict[str, float]]:
        self._said.put_nowait(text)
        messages = await self._next()
        if messages is not _OVER:
            return messages, 0.0, False, {}
        numbers = {
            name: value for trace in self._traces for name, value in trace.metrics.items() if finite(value) is not None
        }
        return None, sum(trace.reward for trace in self._traces), True, numbers

    async def close(self) -> None:
        if self._episode is not None and not self._episode.done():
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)

    async def _next(self) -> Any:
        """Messages for the policy, or that the episode is over; what it raised is raised here."""
        assert self._episode is not None, "reset comes first"
        asked = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait({asked, self._episode}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()
        self._episode.result()
        return _OVER

    async def _play(self, task: Any) -> None:
        vf = _library()
        agents = _Agents(self._seat, _Agent(self))
        await self._env.setup(agents)
        await self._env.run(task, agents)
        about = _about(task)
        episode = vf.Episode(env=vf.EnvInfo(id=self._env.config.env_id), task=about, traces=self._traces)
        await self._env.finalize(task, episode)

    async def turn_of_policy(self, messages: list[dict[str, Any]]) -> str:
        """Ask the policy for a turn."""
        self._asked.put_nowait(messages)
        return await self._said.get()

    def trace(self, task: Any) -> Any:
        """A new record of what the agent does on ``task``."""
        vf = _library()
        config = getattr(self._env.config, self._seat)
        return vf.Trace(task=_about(task), agent=vf.AgentInfo(config=config, name=self._seat))

    def finished(self, trace: Any) -> None:
        """Count a trace that has been scored."""
        self._traces.append(trace)


class _Agents:
    """What an environment's ``run`` gets: its one agent, by the seat's name."""

    def __init__(self, seat: str, agent: _Agent) -> None:
        setattr(self, seat, agent)


class _Agent:
    """In the place of an agent of the library: the policy."""

    trainable = True

    def __init__(self, conversation: Verifiers) -> None:
        self._conversation = conversation

    async def run(self, task: Any, **options: Any) -> Any:
        """One turn on a task that has a prompt."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator[_Interaction]:
        """Turn by turn; scored when the caller leaves it."""
        held = _Interaction(self._conversation, task)
        yield held
        held.trace.is_completed = held.trace.ok = True
        await task.score(held.trace)
        self._conversation.finished(held.trace)


class _Interaction:
    """The caller is the user, the policy answers."""

    def __init__(self, conversation: Verifiers, task: Any) -> None:
        self._conversation, self._task = conversation, task
        self.trace = conversation.trace(task)
        self._over = False
        self._fresh = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
        self._fresh += _plain(task.data.prompt)

    async def turn(self, message: Any = None) -> Any:
        """One turn of the policy, after ``message``; a segment without messages where a ``@stop`` has ended it."""
        vf = _library()
        if self._over:
            return vf.Segment(messages=[], terminated=True)
        asked = [*self._fresh, *_plain(message)]
        self._fresh = []
        for said in asked:
            self._note(
                {"system": vf.SystemMessage, "user": vf.UserMessage}[said["role"]](content=said["content"]), False
            )
        reply = vf.AssistantMessage(content=await self._conversation.turn_of_policy(asked))
        self._note(reply, True)
        self._over = await self._stops()
        return vf.Segment(messages=[reply])

    def _note(self, message: Any, sampled: bool) -> None:
        vf = _library()
        nodes = self.trace.nodes
        nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    async def _stops(self) -> bool:
        offered = {"trace": self.trace, "task": self._task.data}
        for stop in self._task.hooks("stop"):
            found = stop(**{name: offered[name] for name in inspect.signature(stop).parameters if name in offered})
            if await found if inspect.isawaitable(found) else found:
                self.trace.stop(stop.__name__)
                return True
        return False


def _library() -> Any:
    return importlib.import_module("verifiers.v1")


def _about(task: Any) -> Any:
    vf = _library()
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _plain(messages: Any) -> list[dict[str, Any]]:
    """Text or messages of the library as plain messages of text."""
    if messages is None:
        return []
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    plain = [message if isinstance(message, dict) else message.model_dump() for message in messages]
    for message in plain:
        if not isinstance(message["content"], str) or message["role"] not in ("system", "user"):
            raise TypeError("a prompt of system and user messages of text alone can be shown to the policy")
    return [{"role": message["role"], "content": message["content"]} for message in plain]


@functools.cache
def _environment(id: str, config: str) -> tuple[Any, str]:
    """(the environment, the name of its one agent)."""
    vf = _library()
    given = json.loads(config)
    taskset = {"id": id, **given.pop("taskset", {})}
    env = vf.load_environment(vf.resolve_env_config({"taskset": taskset, **given}))
    seats = [name for name in type(env.config).model_fields if isinstance(getattr(env.config, name), vf.AgentConfig)]
    if len(seats) != 1:
        raise JobError(kind="construct", error=f"the environment {id} has {len(seats)} agents, and the policy is one")
    return env, seats[0]


@functools.cache
def _task(env: Any, number: int) -> Any:
    """Task ``number`` of the taskset of ``env``."""
    found = list(env.taskset.include(idx=[f"{number}:{number + 1}"]))
    if not found:
        raise IndexError(f"the taskset {env.config.taskset.id} has no task {number}, which the row asks for")
    return found[0]


def _require_plain(env: Any, task: Any) -> None:
    """Raises ValueError where the task wants a container or a server of tools, which the library's own harness would give it."""
    if type(task).NEEDS_CONTAINER or task.data.image is not None:
        raise ValueError("the task needs a container, which this adapter does not start")
    if type(task).toolsets(env.taskset.config.task) or env.taskset.toolsets(env.taskset.config):
        raise ValueError("the task has servers of tools, which this adapter does not start")
