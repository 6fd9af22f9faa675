"""What a chat template writes between two turns of the policy, as tokens: tokens in, tokens out.

The policy's own words are never rendered nor encoded again. For the template a placeholder stands in for each of its turns; what
the template writes behind the last placeholder, once the observation follows, is the glue: the end of the turn, the observation
and the start of the next turn. That is right only where the template leaves everything before as it was, so each rendering has
to begin with the one before it, or the template is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.data.columns import Message, Row
from rlctl.data.faults import excerpt
from rlctl.data.prompts import PromptEncoder
from rlctl.errors import DataError
from rlctl.generation import FinishReason

TURN = "PLACEHOLDER"
"""What stands for a turn of the policy: a word that templates have no reason to trim, split or look into."""

_THOUGHT = "A THOUGHT"
_KEEP = "set model.chat_template to one that keeps earlier text as it is"


@dataclass
class ChatGlue:
    """The chat template of one run, as conversations need it.

    Args:
        tools: JSON schemas for the template.
        keep_thinking: earlier turns keep their thinking where the template would leave it out.
        stop: the texts that end a turn (``rollout.stop``).
    """

    encoder: PromptEncoder
    tools: Sequence[Mapping[str, Any]] = ()
    keep_thinking: bool = False
    stop: Sequence[str] = ()
    _probed: set[str] = field(default_factory=set)

    def open(self, row: Row, messages: Sequence[Message] = ()) -> Transcript:
        """A conversation that begins with ``messages``, or with the row's own prompt."""
        begin = [dict(message) for message in messages] or self.encoder.beginning(row)
        text = self.encoder.render(row, begin, generation=True, tools=self.tools)
        return Transcript(self, row, begin, text)

    def takes_role(self, role: str) -> bool:
        """True when the template has a place for observations of ``role``: it shows their text."""
        if not self.encoder.uses_chat_template:
            return role == "user"
        probe = Row(0, "a probe of the chat template", "Hello", None, None, "probe")
        try:
            transcript = self.open(probe)
            return "SEEN" in transcript.follow([{"role": role, "content": "SEEN"}])
        except DataError:
            return False

    def takes_tools(self) -> bool:
        """True when the template shows the model the ``tools``."""
        if not self.encoder.uses_chat_template or not self.tools:
            return False
        probe = Row(0, "a probe of the chat template", "Hello", None, None, "probe")
        messages: list[Message] = [{"role": "user", "content": "Hello"}]
        with_tools = self.encoder.render(probe, messages, generation=True, tools=self.tools)
        return with_tools != self.encoder.render(probe, messages, generation=True)

    def require_thoughts_kept(self, row: Row, begin: Sequence[Message], observation: Sequence[Message]) -> None:
        """Refuse a template that drops the thinking of earlier turns, which the policy was shown when it sampled the later ones.

        Raises:
            DataError: it does, and the configuration does not say that they are kept.
        """
        role = str(observation[0]["role"])
        if self.keep_thinking or role in self._probed or not self.encoder.uses_chat_template:
            return
        turn = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{TURN}"}
        text = self.encoder.render(row, [*begin, turn, *observation], generation=True, tools=self.tools)
        if _THOUGHT not in text:
            raise DataError(
                "the chat template leaves the thinking of an earlier turn out once a message follows",
                found=f"...{excerpt(text[max(0, text.find(TURN) - 40) :], 80)!r}",
                wanted="earlier turns as they were sampled: those tokens are what the policy has seen and is trained on",
                next=f"{_KEEP}, or rollout.environment.earlier_thinking=keep, which keeps it whatever the template does",
            )
        self._probed.add(role)

    def ids(self, glue: str, turn: Sequence[int], reason: FinishReason) -> list[int]:
        """Tokens of ``glue`` that follow the sampled tokens ``turn``: less the end of the turn where the policy has sampled it."""
        ids = self._encoded(glue)
        if reason is not FinishReason.STOP or not turn or not ids:
            return ids
        if turn[-1] == ids[0]:
            return ids[1:]
        overlap = self._overlap(glue, turn)
        return self._encoded(glue[overlap:]) if overlap else ids

    def _overlap(self, glue: str, turn: Sequence[int]) -> int:
        """Letters of the glue that the policy wrote itself, where a text of ``rollout.stop`` ended its turn."""
        if not self.stop:
            return 0
        said = str(self.encoder.tokenizer.decode(list(turn), skip_special_tokens=False))
        return next((k for k in range(min(len(glue), len(said)), 0, -1) if said.endswith(glue[:k])), 0)

    def _encoded(self, text: str) -> list[int]:
        # Some tokenizers begin a text with a space of their own: behind a word they do not.
        behind, word = self.encoder.encode(TURN + text), self.encoder.encode(TURN)
        return behind[len(word) :] if behind[: len(word)] == word else self.encoder.encode(text)


@dataclass
class Transcript:
    """One conversation as the template sees it, placeholders for the policy's turns.

    Args:
        begin: the messages it begins with.
        text: their rendering.
    """

    glue: ChatGlue
    row: Row
    begin: list[Message]
    text: str
    messages: list[Message] = field(default_factory=list)

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the first prompt; before the first :meth:`follow`."""
        return self.glue.encoder.encode_prompt(self.row, self.text)

    def follow(self, observation: Sequence[Message]) -> str:
        """The text between the turn that has just ended and the next one: its end, the observation and the next turn's start.

        Raises:
            DataError: the template refuses the messages, does not show them, or writes earlier text differently once they follow.
        """
        if not self.glue.encoder.uses_chat_template:
            return "".join(str(message["content"]) for message in observation)
        self.glue.require_thoughts_kept(self.row, self.begin, observation)
        earlier = list(self.messages)
        self.messages += [{"role": "assistant", "content": TURN}, *(dict(message) for message in observation)]
        after, before = self._rendered(self.messages), self.text + TURN
        if not after.startswith(before):
            # A template may write the day, which has changed since: what counts is that the observation changes nothing before it.
            before = self._rendered(earlier) + TURN
        if not after.startswith(before):
            same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            raise DataError(
                "the chat template writes a turn, or what came before it, differently once an observation follows",
                found=f"...{excerpt(after[max(0, same - 20) : same + 40])!r}",
                wanted=f"...{excerpt(before[max(0, same - 20) : same + 40])!r}",
                next=f"{_KEEP}, up to the turn of the model that its generation prompt opens",
            )
        self.text = after
        glue = after[len(before) :]
        for message in observation:
            if not _shows(glue, str(message["content"])):
                raise DataError(
                    f"the chat template does not show a message of the role {message['role']!r}",
                    found=f"{excerpt(glue, 80)!r}",
                    wanted=f"the observation {excerpt(message['content'])!r} in it",
                    next="let the environment answer with a role that the template knows, such as user",
                )
        return glue

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self.glue.encoder.render(self.row, [*self.begin, *messages], generation=True, tools=self.glue.tools)


def _shows(glue: str, content: str) -> bool:
    """True where a template has written ``content``, trimmed or as JSON (Llama 3 does so with what a tool says)."""
    texts = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
    return any(text.strip() in glue for text in texts)
