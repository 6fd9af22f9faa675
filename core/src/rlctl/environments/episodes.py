"""The loop over turns: all conversations of a batch, turn by turn, over the rollout engine's ``generate``. Imports no torch.

What a conversation keeps is token ids: those that the engine has sampled, with their log-probs, and between them the glue of
:mod:`rlctl.environments.glue`. From its second turn on each conversation is a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlctl.data.columns import Message, Row
from rlctl.data.lengths import beyond_model
from rlctl.environments.client import EnvironmentClient
from rlctl.environments.glue import ChatGlue, Transcript
from rlctl.environments.tools import as_user, in_words
from rlctl.errors import DataError
from rlctl.generation import Completion, Conversation, Ending, FinishReason, GenerateRequest, SamplingParams, Turn

if TYPE_CHECKING:
    from rlctl.config.schema_environment import EnvironmentConfig

Generate = Callable[[GenerateRequest], list[Completion]]
_STREAM = 0xD1342543DE82EF95
_SEEDS = 2**62 - 1


@dataclass(eq=False)
class _Open:
    """A conversation under way.

    Args:
        number: for the environment.
        limit: of its tokens after the prompt.
    """

    number: int
    row: Row
    prompt_index: int
    sample_index: int
    transcript: Transcript | None = None
    prompt: list[int] = field(default_factory=list)
    limit: int = 0
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn_start: int = 0
    reason: FinishReason = FinishReason.STOP
    ending: Ending | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.limit - len(self.ids)

    def done(self) -> Conversation:
        assert self.ending is not None
        cut = self.ending is Ending.LENGTH
        reason = FinishReason.LENGTH if cut else FinishReason.ABORT if not self.turns else FinishReason.STOP
        return Conversation(
            self.prompt_index,
            self.sample_index,
            self.ids,
            self.log_probs,
            reason,
            tuple(self.turns),
            self.ending,
            dict(self.metrics),
        )


@dataclass
class Episodes:
    """Conversations with one environment.

    Args:
        max_prompt_length: longest first prompt, in tokens.
        notice: told once, where a conversation was ended because the environment failed.
        positions: how many the model has, where that is known.
    """

    client: EnvironmentClient
    config: EnvironmentConfig
    glue: ChatGlue
    max_prompt_length: int
    notice: Callable[[str], None] = lambda text: None
    positions: int | None = None
    _told: bool = False
    _next: int = 0
    _tool_role: bool | None = None
    _shows_tools: bool | None = None

    def run(
        self,
        rows: Sequence[Row],
        params: SamplingParams,
        generate: Generate,
        on_progress: Callable[[int], None] | None = None,
    ) -> tuple[list[list[int]], list[Completion]]:
        """``params.n`` conversations with each row, each of at most ``params.max_tokens`` tokens after its prompt.

        Args:
            params: its seed is that of the first turn; later requests have seeds that follow from it.
            on_progress: told how many more conversations are over.

        Returns:
            the prompts, and prompt-major the :class:`Conversation` of each sample.

        Raises:
            DataError: the environment fails, its prompt is too long or differs between the samples of a row, or the chat template
                cannot carry a conversation.
        """
        every = [
            _Open(self._next + p * params.n + s, row, p, s, limit=params.max_tokens)
            for p, row in enumerate(rows)
            for s in range(params.n)
        ]
        self._next += len(every)
        told = 0
        try:
            self._begin(every)
            prompts = _prompts(every, params.n)
            first, calls = True, 0
            while going := [c for c in every if c.ending is None]:
                calls = self._turn(going, prompts, params, generate, first, calls)
                self._answer(going)
                first = False
                over = sum(c.ending is not None for c in every)
                if on_progress is not None and over > told:
                    on_progress(over - told)
                told = over
        finally:
            self.client.end([c.number for c in every])
        return prompts, [c.done() for c in every]

    # ---- the policy's part ------------------------------------------------------------------------------------------
    def _turn(
        self,
        going: Sequence[_Open],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        generate: Generate,
        first: bool,
        calls: int,
    ) -> int:
        """Sample one turn of each conversation; returns how many requests have been made so far.

        A request has one limit for all its rows, and no row may get past its budget: it is the smallest room of those in it. A row
        that this has cut goes on where it stopped, in the next request.
        """
        for c in going:
            c.turn_start = len(c.ids)
        whole = first and len(going) == len(prompts) * params.n
        waiting = list(going)
        while waiting:
            rooms = {c.number: self._turn_room(c) for c in waiting}
            # Of rooms within a factor of two: one row at its end does not make the others stop again and again.
            smallest = min(rooms.values())
            part = [c for c in waiting if rooms[c.number] < 2 * smallest]
            asked = replace(params, max_tokens=smallest, seed=_seed(params.seed, calls))
            if whole:
                out = generate(GenerateRequest(prompts, asked))
            else:
                contexts = [[*c.prompt, *c.ids] for c in part]
                out = generate(GenerateRequest(contexts, replace(asked, n=1)))
            whole, calls = False, calls + 1
            for c, completion in zip(part, out, strict=True):
                c.ids += completion.token_ids
                c.log_probs += completion.log_probs
                c.reason = completion.finish_reason
            over = {c.number for c in part if c.reason is not FinishReason.LENGTH or self._turn_room(c) <= 0}
            waiting = [c for c in waiting if c.number not in over]
        return calls

    def _turn_room(self, c: _Open) -> int:
        most = self.config.max_turn_tokens
        return c.room if most is None else min(c.room, most - (len(c.ids) - c.turn_start))

    # ---- the environment's part -------------------------------------------------------------------------------------
    def _begin(self, every: Sequence[_Open]) -> None:
        rows = {c.number: c.row for c in every}
        outcomes = self.client.reset([(c.number, c.row) for c in every])
        known: dict[str, list[int]] = {}
        for c, (status, value) in zip(every, outcomes, strict=True):
            if status == "error":
                self._failed("reset", c, rows, value)
                value = []
            messages = self._with_tools(c.row, value)
            c.transcript = self.glue.open(c.row, messages)
            text = c.transcript.text
            if text not in known:
                known[text] = c.transcript.prompt_ids
            c.prompt = known[text]
            if len(c.prompt) > self.max_prompt_length:
                raise DataError(
                    f"the prompt of {c.row.source} (row {c.row.index}) is too long as {self.client.label} begins it",
                    found=f"{len(c.prompt)} tokens",
                    wanted=f"at most {self.max_prompt_length} (data.max_prompt_length)",
                    next=f"data.max_prompt_length={len(c.prompt)}, or a shorter beginning",
                )
            if (beyond := beyond_model(len(c.prompt), c.limit, self.positions)) is not None:
                # With the tools' schemas and the words of reset, which no length of the row alone tells of.
                raise DataError(
                    f"{beyond.what}, as {self.client.label} begins {c.row.source} (row {c.row.index})",
                    found=beyond.found,
                    wanted=f"at most {self.positions}",
                    next=beyond.next,
                )

    def _answer(self, going: Sequence[_Open]) -> None:
        """Let the environment answer the turns that have just ended, and put its words and the glue behind them."""
        rows = {c.number: c.row for c in going}
        texts = [self.glue.encoder.decode(c.ids[c.turn_start :]) for c in going]
        outcomes = self.client.step([(c.number, text) for c, text in zip(going, texts, strict=True)], rows)
        for c, text, (status, value) in zip(going, texts, outcomes, strict=True):
            turn = Turn(c.turn_start, len(c.ids), text)
            c.turns.append(turn)
            if status == "error":
                self._failed("step", c, rows, value)
                continue
            messages, reward, done, numbers = value
            c.turns[-1] = replace(turn, reward=reward)
            c.metrics |= numbers
            # The turn itself was cut: the policy has no tokens left to go on with.
            if done:
                c.ending = Ending.LENGTH if c.room <= 0 and c.reason is FinishReason.LENGTH else Ending.DONE
            elif c.room <= 0:
                c.ending = Ending.LENGTH
            elif len(c.turns) >= self.config.max_turns:
                c.ending = Ending.MAX_TURNS
            else:
                self._observe(c, messages)

    def _observe(self, c: _Open, messages: Sequence[Message]) -> None:
        assert c.transcript is not None
        shown = self._in_roles(messages)
        glue = c.transcript.follow(shown)
        ids = self.glue.ids(glue, c.ids[c.turn_start :], c.reason)
        c.turns[-1] = replace(c.turns[-1], observation="\n".join(str(message["content"]) for message in shown))
        if len(ids) >= c.room:
            # No token would be left for an answer: the conversation ends with the turn.
            c.ending = Ending.LENGTH
            return
        c.ids += ids
        c.log_probs += [0.0] * len(ids)

    def _failed(self, method: str, c: _Open, rows: Mapping[int, Row], fields: dict[str, Any]) -> None:
        error = self.client.fault(method, rows[c.number], fields)
        if self.config.on_error == "raise":
            raise error
        c.ending = Ending.ERROR
        if not self._told:
            self._told = True
            self.notice(
                f"{error.what}: {error.found}; rollout.environment.on_error=zero ended the conversation with a reward of 0 "
                "(environment/errors counts them)"
            )

    # ---- roles and tools that a template does not know ----------------------------------------------------------------
    def _in_roles(self, messages: Sequence[Message]) -> list[Message]:
        """``messages`` in roles that the template has. Those of tools become one of the user: turns may have to alternate."""
        if all(message["role"] != "tool" for message in messages):
            return list(messages)
        if self._tool_role is None:
            self._tool_role = self.glue.takes_role("tool")
        return list(messages) if self._tool_role else as_user(messages)

    def _with_tools(self, row: Row, messages: list[Message]) -> list[Message]:
        if not self.client.tools:
            return messages
        if self._shows_tools is None:
            self._shows_tools = self.glue.takes_tools()
        return (
            messages if self._shows_tools else in_words(self.client.tools, messages or self.glue.encoder.beginning(row))
        )


def _prompts(every: Sequence[_Open], n: int) -> list[list[int]]:
    """The prompt of each row.

    Raises:
        DataError: the samples of one row begin differently.
    """
    begun = {c.prompt_index: c for c in reversed(every) if c.ending is None}
    for c in every:
        one = begun.get(c.prompt_index, every[c.prompt_index * n])
        if c.ending is not None:
            c.prompt = one.prompt  # reset has failed, and has not said how it begins
        if c.prompt != one.prompt:
            raise DataError(
                f"the environment begins {c.row.source} (row {c.row.index}) differently for two samples of it",
                wanted="the same messages of reset for the same row: its samples are compared with each other",
                next="draw what is random in reset from the row (its index), or set rollout.n=1",
            )
    return [every[first].prompt for first in range(0, len(every), n)]


def _seed(seed: int | None, calls: int) -> int | None:
    """The seed of a request: of the first one the given seed, so that a single turn samples what it would without turns."""
    return seed if seed is None or calls == 0 else (seed + calls * _STREAM) & _SEEDS
