"""Rows to token ids: chat template or raw text, prompts for generation, and prompt + response for SFT. No padding.

What training sees must be what generation sees. So the ids of a prompt are always a prefix of the ids of the same
prompt with its response: where tokenising both together would merge a token across the border, the response is
tokenised on its own, and where the template itself writes the prompt differently once a response follows, that is a
DataError with the row's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlctl.data.columns import Message, Row
from rlctl.data.faults import excerpt
from rlctl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.config.schema import DataConfig


class PromptEncoder:
    """Encodes rows with one tokenizer under one ``data`` section.

    With a chat template (``data.apply_chat_template`` auto or always) a text prompt becomes one user message, after
    ``data.system_prompt`` unless the row has a system message of its own. Without, a prompt is raw text: the system
    prompt and the user's text with a blank line between, and a beginning-of-sequence token where the tokenizer adds one.

    Raises:
        DataError: ``always`` without a template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._data = data
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if data.apply_chat_template == "always" and not has_template:
            raise DataError(
                "data.apply_chat_template is always, but the tokenizer has no chat template",
                next="set model.chat_template, or data.apply_chat_template=auto",
            )
        self.uses_chat_template = has_template and data.apply_chat_template != "never"
        self._bos = self._leading_ids()
        self._special = _special_tokens(tokenizer)
        self._stops: tuple[int, ...] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def prompt_text(self, row: Row) -> str:
        """The prompt as the model sees it, before tokenising (raw text: without the beginning-of-sequence token)."""
        messages = self._messages(row)
        return self._render(row, messages, generation=True) if self.uses_chat_template else self._raw(row, messages)

    def prompt_ids(self, row: Row) -> list[int]:
        """Token ids of the prompt, with the template's generation prompt.

        Raises:
            DataError: the template refuses the row, or the prompt has no tokens.
        """
        return self.encode_prompt(row, self.prompt_text(row))

    def prompt_ids_batch(self, rows: Sequence[Row], *, beginning: bool = False) -> list[list[int]]:
        """:meth:`prompt_ids` of many rows, faster; with ``beginning`` those of :meth:`beginning`."""
        encoded = self._encode_all(
            [
                self.render(row, self.beginning(row), generation=True) if beginning else self.prompt_text(row)
                for row in rows
            ]
        )
        lead = self._lead()
        return [self._checked(row, lead + ids) for row, ids in zip(rows, encoded, strict=True)]

    def messages(self, row: Row) -> list[Message]:
        """The messages of a row's prompt, with the system message and the template of the ``data`` section."""
        return self._messages(row)

    def beginning(self, row: Row) -> list[Message]:
        """:meth:`messages`; of a row that is a whole conversation what stands before its first turn of an assistant."""
        messages = self._messages(row)
        if row.messages is None:
            return messages
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        return messages[:first] or messages

    def render(
        self, row: Row, messages: list[Message], *, generation: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Text of messages, with ``generation`` up to where the policy goes on. Raw text without a chat template.

        Raises:
            DataError: the template refuses them; the message names ``row``.
        """
        if not self.uses_chat_template:
            return self._raw(row, messages)
        return self._render(row, messages, generation, tools)

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands, without tokens at its ends."""
        return self._encode(text)

    def encode_prompt(self, row: Row, text: str) -> list[int]:
        """Ids of a whole prompt's text, see :meth:`prompt_ids`."""
        return self._checked(row, self._lead() + self._encode(text))

    def sft(self, row: Row) -> tuple[list[int], list[bool]]:
        """(ids, loss_mask) of prompt + response: True exactly on response tokens, the token that ends them included.

        A row without a response trains on its answer. A chat row trains on each of its assistant turns.

        Raises:
            DataError: the row has neither, or the chat template breaks the prefix rule.
        """
        return self._assemble(row, self._turns(row), {})

    def sft_batch(self, rows: Sequence[Row]) -> list[tuple[list[int], list[bool]]]:
        """:meth:`sft` of many rows, faster."""
        turns = [self._turns(row) for row in rows]
        texts = list({text for row_turns in turns for turn in row_turns for text in turn})
        known = dict(zip(texts, self._encode_all(texts), strict=True))
        return [self._assemble(row, row_turns, known) for row, row_turns in zip(rows, turns, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts that the tokenizer reads as special tokens."""
        return tuple(self._special.values())

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the end-of-sequence token, and the one that the chat template puts after an answer.

        A base model's tokenizer may name another end-of-sequence token than its chat template writes.
        """
        if self._stops is None:
            eos: Any = self._tokenizer.eos_token_id
            stops = set() if eos is None else {int(eos)}
            if self.uses_chat_template:
                probe = Row(0, "a probe of the chat template", "Hello", "Hello", None, "probe")
                stops.add(self.sft(probe)[0][-1])
            self._stops = tuple(sorted(stops))
        return self._stops

    # ---- messages -------------------------------------------------------------------------------------------------
    def _messages(self, row: Row) -> list[Message]:
        if isinstance(row.prompt, str):
            messages: list[Message] = [{"role": "user", "content": self._fill(row.prompt)}]
        else:
            messages = [dict(message) for message in row.prompt]
            if self._data.prompt_template is not None and messages[-1]["role"] == "user":
                messages[-1]["content"] = self._fill(messages[-1]["content"])
        if self._data.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self._data.system_prompt})
        return messages

    def _fill(self, prompt: str) -> str:
        template = self._data.prompt_template
        return prompt if template is None else template.format(prompt=prompt)

    def _raw(self, row: Row, messages: list[Message]) -> str:
        system = [message["content"] for message in messages if message["role"] == "system"]
        user = [message["content"] for message in messages if message["role"] == "user"]
        if len(user) != 1 or len(system) + len(user) != len(messages):
            raise DataError(
                f"{row.source} (row {row.index}) is a chat of {len(messages)} messages, and no chat template applies",
                wanted="a tokenizer with a chat template, or rows of one user message",
                next="set model.chat_template, or use data.apply_chat_template=auto with a chat model's tokenizer",
            )
        return "\n\n".join((*system, *user))

    def _render(
        self, row: Row, messages: list[Message], generation: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        try:
            text: Any = self._tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except Exception as error:  # a template is the model author's program: jinja's errors and whatever it raises
            raise DataError(
                f"the chat template refuses {row.source} (row {row.index})",
                found=f"{type(error).__name__}: {error}",
                wanted="messages in an order that the template accepts: " + ", ".join(m["role"] for m in messages),
                next="correct the row, or set model.chat_template",
            ) from error
        return str(text)

    # ---- ids ------------------------------------------------------------------------------------------------------
    def _encode(self, text: str) -> list[int]:
        encoded: Any = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(encoded)

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded: Any = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [list(ids) for ids in encoded]

    def _lead(self) -> list[int]:
        # A chat template writes its own beginning-of-sequence token.
        return [] if self.uses_chat_template else list(self._bos)

    def _leading_ids(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text."""
        with_special: Any = self._tokenizer("0")["input_ids"]
        plain = self._encode("0")
        for start in range(len(with_special) - len(plain) + 1):
            if list(with_special[start : start + len(plain)]) == plain:
                return list(with_special[:start])
        return []

    def _checked(self, row: Row, ids: list[int]) -> list[int]:
        if not ids:
            raise DataError(
                f"{row.source} (row {row.index}) has a prompt without a single token", next="remove the row"
            )
        return ids

    def _continue(self, ids: list[int], before: str, after: str, known: Mapping[str, list[int]]) -> list[int]:
        """Ids of ``after``, whose first part ``before`` has the ids ``ids``: those, then the rest.

        ``known`` holds ids of texts that were encoded before.
        """
        whole = known[after] if after in known else self._encode(after)
        if whole[: len(ids)] == ids:
            return whole
        return ids + self._encode(after[len(before) :])

    def _eos(self) -> int:
        eos: Any = self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so a response could not end",
                next='add "eos_token" to its tokenizer_config.json',
            )
        return int(eos)

    # ---- SFT ------------------------------------------------------------------------------------------------------
    def _turns(self, row: Row) -> list[tuple[str, str]]:
        """(text up to a response, text with it) of each response of a row, in order."""
        target = row.response if row.response is not None else row.answer
        if target is None:
            raise DataError(
                f"{row.source} (row {row.index}) has no response to train on",
                wanted="a response, completion or answer column, or a chat that ends with an assistant turn",
                next="data.columns.response=COLUMN, or remove the row",
            )
        messages = self._messages(row)
        if not self.uses_chat_template:
            prompt = self._raw(row, messages)
            return [(prompt, prompt + target)]
        places: list[int] = []
        if row.messages is not None and row.response is not None:
            # A chat row teaches its earlier turns too.
            places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            messages.append(dict(row.messages[-1]))
        else:
            messages.append({"role": "assistant", "content": target})
        turns: list[tuple[str, str]] = []
        done = ""
        for place in (*places, len(messages) - 1):
            prompt = self._render(row, messages[:place], generation=True)
            full = self._render(row, messages[: place + 1], generation=False)
            self._require_prefix(row, done, prompt, "an earlier turn changes once a later one follows")
            self._require_prefix(row, prompt, full, "the prompt changes once its response follows")
            turns.append((prompt, full))
            done = full
        return turns

    def _assemble(
        self, row: Row, turns: Sequence[tuple[str, str]], known: Mapping[str, list[int]]
    ) -> tuple[list[int], list[bool]]:
        """Ids and loss mask of the texts of :meth:`_turns`; ``known`` as for :meth:`_continue`."""
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for prompt, full in turns:
            with_prompt = self._continue(ids, done, prompt, known)
            mask += [False] * (len(with_prompt) - len(ids))
            ids = self._continue(with_prompt, prompt, full, known)
            learned = self._end_of_turn(ids, len(with_prompt)) if self.uses_chat_template else len(ids)
            mask += [True] * (learned - len(with_prompt)) + [False] * (len(ids) - learned)
            done = full
        self._checked(row, self._lead() + ids[: mask.index(True) if True in mask else len(ids)])
        if self.uses_chat_template and True in mask:
            # What a template writes after the token that ends the last turn is never generated.
            last = len(mask) - mask[::-1].index(True)
            ids, mask = ids[:last], mask[:last]
            if self._ends(ids[-1]):
                return ids, mask
        lead = self._lead()
        return [*lead, *ids, self._eos()], [*([False] * len(lead)), *mask, True]

    def _end_of_turn(self, ids: list[int], start: int) -> int:
        """Where the assistant's turn ends in ``ids[start:]``: after its last special token, else at the end."""
        return next((place + 1 for place in range(len(ids) - 1, start - 1, -1) if self._ends(ids[place])), len(ids))

    def _ends(self, token_id: int) -> bool:
        return token_id in self._special

    def _require_prefix(self, row: Row, before: str, after: str, what: str) -> None:
        if after.startswith(before):
            return
        same = next(
            (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
        )
        raise DataError(
            f"the chat template cannot train on {row.source} (row {row.index}): {what}",
            found=f"...{excerpt(after[max(0, same - 20) : same + 30])!r}",
            wanted=f"...{excerpt(before[max(0, same - 20) : same + 30])!r}",
            next="set model.chat_template to one that keeps earlier text as it is, or use rows of a single turn",
        )


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Id to text of every special token, also of those that have no role (bos, eos ...) of their own."""
    added: Any = getattr(tokenizer, "added_tokens_decoder", {})
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {**{i: str(token) for i, token in added.items() if token.special}, **{int(i): str(t) for i, t in named}}
