"""Tools: Python functions that the policy may call. Standard library only: it runs beside the user's code.

:class:`ToolEnvironment` makes JSON schemas of the functions' signatures, which the chat template shows to the model (or, where it
has no place for tools, the first message in words), reads calls out of what the model writes, and answers with what they return.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlctl.data.finite import finite
from rlctl.environments.results import wrong
from rlctl.environments.schemas import ToolError, name_of, schema_of
from rlctl.environments.tool_calls import Call, CallError, parser_of

MAX_RESULT = 2000
"""Letters of a tool's answer that the model is shown."""


class ToolEnvironment:
    """A conversation in which the policy calls tools, and ends it with a turn that calls none.

    Subclass it: give it ``functions`` and write :meth:`finish`, the reward of the last turn. A call that cannot be read, has no
    such tool or the wrong arguments, or that fails, is answered with words that begin with ``Error:``.

    Args:
        functions: the tools; their names, type hints and docstrings are what the model is told.
        style: how calls are written: ``hermes`` (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen and Hermes
            models do), or ``plain`` (``name[argument]``, for tools of one argument).
        show_tools: tell the model of the tools; False for a policy that knows them.

    Raises:
        ToolError: one of them cannot be a tool, or two have one name.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]] = (), style: str = "hermes", show_tools: bool = True
    ) -> None:
        self._functions = _by_name(functions)
        self._parse = parser_of(style)
        schemas = [schema_of(function) for function in functions]
        self.tools = schemas if show_tools else []
        self.row: dict[str, Any] = {}
        self.calls = 0
        self.errors = 0

    # ---- what a subclass writes ---------------------------------------------------------------------------------
    def finish(self, text: str) -> float:
        """The reward of the turn that ends the conversation."""
        raise NotImplementedError("write finish(self, text) -> float")

    def require_ready(self) -> None:
        """Raises ToolError where a subclass has an ``__init__`` that leaves this class's one out."""
        if not hasattr(self, "_functions"):
            name, init = type(self).__name__, type(self).__init__
            what = f"__init__ of {name} does not call super().__init__, so {name} has no tools"
            raise ToolError(what, "super().__init__([the tools]) in __init__", init)

    # ---- the environment ----------------------------------------------------------------------------------------
    def reset(self, row: dict[str, Any]) -> Any:
        """Begin with the row's own prompt."""
        self.row = row

    def step(self, text: str) -> tuple[Any, float, bool, dict[str, float]]:
        """Answer the calls of a turn; without any the conversation is over."""
        try:
            calls = self._parse(text, self._functions)
        except CallError as error:
            return self._observed([f"Error: {error}"], failed=1)
        if not calls:
            return None, self._finished(text), True, self._numbers()
        found = [self._called(call) for call in calls]
        self.calls += len(calls)
        return self._observed([words for words, _ in found], failed=sum(not fine for _, fine in found))

    def _finished(self, text: str) -> float:
        value: object = self.finish(text)
        reward = finite(value)
        if reward is None:
            raise wrong("the reward of finish", value, "a finite number, which finish(self, text) returns")
        return reward

    def _observed(self, texts: Sequence[str], failed: int) -> tuple[Any, float, bool, dict[str, float]]:
        self.errors += failed
        return [{"role": "tool", "content": text} for text in texts], 0.0, False, self._numbers()

    def _numbers(self) -> dict[str, float]:
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}

    def _called(self, call: Call) -> tuple[str, bool]:
        """(what the tool says, whether it did)."""
        function = self._functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name!r}; there are {', '.join(self._functions)}", False
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return f"Error: {call.name}: {error}", False
        try:
            result = function(**call.arguments)
        except Exception as error:  # a tool's own failure is what the model has to learn from
            return f"Error: {call.name}: {error}"[:MAX_RESULT], False
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        return text[:MAX_RESULT], True


def _by_name(functions: object) -> dict[str, Callable[..., Any]]:
    """The tools by name. Raises ToolError where they are no list of functions, or two have one name."""
    if isinstance(functions, (str, Mapping)) or not isinstance(functions, Iterable):
        called = f"the function {name_of(functions)}" if callable(functions) else type(functions).__name__
        raise ToolError(f"the tools are no list, but {called}", "a list of functions, [tool]", functions)
    named: dict[str, Callable[..., Any]] = {}
    for function in functions:
        if not callable(function):
            raise ToolError(f"{function!r} among the tools is no function", "a list of functions, [tool]")
        name = name_of(function)
        if name in named:
            raise ToolError(f"two tools have the name {name!r}", "a name of its own for each tool", function)
        named[name] = function
    return named


def as_user(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with what tools say in the user's name, for templates without their role; neighbours become one message."""
    out: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        tool = message["role"] == "tool"
        said = f"<tool_response>\n{message['content']}\n</tool_response>" if tool else str(message["content"])
        if out and out[-1]["role"] == "user" and (tool or (after_tool and message["role"] == "user")):
            out[-1]["content"] += f"\n{said}"
        else:
            out.append({**message, "role": "user" if tool else message["role"], "content": said})
        after_tool = tool
    return out


def in_words(tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with the tools described in the first one, for templates that have no place for them."""
    lines = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
    words = (
        f"You may call these tools:\n{lines}\n"
        'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. When you are done, answer without a call.'
    )
    first, *rest = ({**message} for message in messages)
    first["content"] = (
        f"{first['content']}\n\n{words}" if first["role"] == "system" else f"{words}\n\n{first['content']}"
    )
    return [first, *rest]
