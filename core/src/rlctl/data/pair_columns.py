"""Records to pairs: a prompt with a better and a worse response, in the shapes that datasets have them.

======================================  ================================================================================
chosen, rejected                        prompt
======================================  ================================================================================
text                                    ``prompt``: text or chat messages
chat messages: one assistant turn       ``prompt``: text or chat messages
whole conversations (messages)          what both begin with; a ``prompt`` column, where there is one, is not read
whole texts, without a ``prompt``       what both begin with, up to the last ``Assistant:`` where they have one (HH), else to
                                        the last blank
======================================  ================================================================================

Behind the common prompt one assistant turn is read on each side, of messages and of texts that are dialogues. Each row decides
its own shape; a margin stands in every row of a file, or in none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlctl.data import columns as read
from rlctl.data.columns import PROMPT_COLUMNS, Columns, Message, Pair, Row, RowError
from rlctl.data.faults import excerpt, listing, nearest, type_name
from rlctl.data.finite import LARGEST, as_float
from rlctl.data.readers import Record
from rlctl.errors import DataError

if TYPE_CHECKING:
    from rlctl.config.schema import ColumnsConfig

CHOSEN, REJECTED, MARGIN = "chosen", "rejected", "margin"
SYNONYMS = {
    CHOSEN: ("preferred", "response_chosen", "winner", "better", "accepted"),
    REJECTED: ("dispreferred", "response_rejected", "loser", "worse"),
}
MARKERS = ("Assistant:", "ASSISTANT:", "assistant:")
TURNS = {
    "Assistant:": re.compile(r"(?:^|\n)[ \t]*(?:Human|User|Assistant):"),
    "ASSISTANT:": re.compile(r"(?<!\w)(?:HUMAN|USER|ASSISTANT):"),
    "assistant:": re.compile(r"(?:^|\n)[ \t]*(?:human|user|assistant):"),
}
"""By the marker of an assistant turn: where a turn of such a dialogue begins. In capitals also within a line (Vicuna)."""


def has_pair(values: Mapping[str, Any], mapping: ColumnsConfig) -> bool:
    """True where a record has both sides, under their own names or those of ``data.columns``."""
    return all(read.has_value(values, getattr(mapping, side) or side) for side in (CHOSEN, REJECTED))


def find_pair_columns(values: Mapping[str, Any], named: Mapping[str, str], file: str) -> Columns:
    """The columns of a file of pairs.

    Raises:
        DataError: a side is missing, or nothing can be the prompt.
    """
    sides = {side: named.get(side, side) for side in (CHOSEN, REJECTED)}
    for side, column in sides.items():
        if not read.has_value(values, column):
            near = next((name for name in SYNONYMS[side] if name in values), None) or nearest(side, values)
            raise DataError(
                f"{file} has no column of {side} responses, which rows of pairs need",
                found=listing(values),
                wanted="chosen and rejected, or a mapping in data.columns"
                + (f"; did you mean {near!r}?" if near else ""),
                next=f"data.columns.{side}={near or 'COLUMN'}",
            )
    prompt = named.get("prompt") or read.first_of(values, PROMPT_COLUMNS)
    margin = named.get(MARGIN) or (MARGIN if MARGIN in values else None)
    return Columns(
        prompt=prompt, data_source=read.data_source_of(values, named), chosen=sides[CHOSEN], rejected=sides[REJECTED], margin=margin
    )  # fmt: skip


def pair_row(record: Record, index: int, columns: Columns, default_source: str) -> Row:
    """The row of a pair.

    Raises:
        RowError: a side is missing, empty or of another form, both say the same, or they have no common prompt.
    """
    assert columns.chosen is not None
    assert columns.rejected is not None
    values = record.values
    names = {CHOSEN: columns.chosen, REJECTED: columns.rejected}
    raw = {side: read.need(values, name) for side, name in names.items()}
    empty = [names[side] for side, value in raw.items() if _is_blank(value)]
    if empty:
        what = f"{empty[0]} has" if len(empty) == 1 else f"{' and '.join(empty)} both have"
        raise RowError("pair", f"{what} an empty response", "fill it or remove the row")
    if isinstance(raw[CHOSEN], list) != isinstance(raw[REJECTED], list):
        what = f"{names[CHOSEN]} is {type_name(raw[CHOSEN])} and {names[REJECTED]} is {type_name(raw[REJECTED])}"
        raise RowError("pair", what, "write both as text, or both as chat messages")
    if raw[CHOSEN] == raw[REJECTED]:
        raise RowError(
            "pair",
            f"{names[CHOSEN]} and {names[REJECTED]} are the same",
            "remove the row: nothing is to be learned of it",
        )
    columns = replace(columns, prompt=_prompt_column(values, columns, raw[CHOSEN]))
    prompt = None if columns.prompt is None else _prompt(read.need(values, columns.prompt), columns.prompt)
    if isinstance(raw[CHOSEN], list):
        chats = {side: read.messages_of(value, names[side]) for side, value in raw.items()}
        prompt, texts = _from_chats(prompt, chats, names)
    else:
        texts = {side: read.text_of(value, names[side]) for side, value in raw.items()}
        if prompt is None:
            prompt, texts = _from_texts(texts, names)
    for side, text in texts.items():
        if not text.strip():
            raise RowError("pair", f"{names[side]} has an empty response", "fill it or remove the row")
    pair = Pair(texts[CHOSEN], texts[REJECTED], _margin(values, columns.margin))
    return Row(
        index, record.where, prompt, None, None, read.source_of(values, columns, default_source),
        read.extra_of(values, columns), pair=pair,
    )  # fmt: skip


def _prompt(raw: Any, column: str) -> str | tuple[Message, ...]:
    if isinstance(raw, str):
        read.check_text(raw, column)
        empty = not raw.strip()
    else:
        raw = read.messages_of(raw, column)
        empty = not any(message["content"].strip() for message in raw)
    if empty:
        raise RowError("empty_prompt", f"the prompt ({column}) is empty", "fill it or remove the row")
    return raw


def _prompt_column(values: Mapping[str, Any], columns: Columns, chosen: Any) -> str | None:
    """The prompt's column in this row; None where the two sides bring it themselves."""
    if isinstance(chosen, list) and _is_conversation(chosen):
        return None
    return columns.prompt or read.first_of(values, PROMPT_COLUMNS)


def _is_blank(value: Any) -> bool:
    """True for a side without a response: no text, or a last message without."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = None if value[-1].get("tool_calls") else value[-1].get("content")
    return isinstance(value, str) and not value.strip()


def _is_conversation(messages: list[Any]) -> bool:
    """True for messages that begin with a prompt of their own."""
    return bool(messages) and isinstance(messages[0], Mapping) and messages[0].get("role") != "assistant"


def _from_chats(
    prompt: str | tuple[Message, ...] | None, chats: Mapping[str, tuple[Message, ...]], names: Mapping[str, str]
) -> tuple[str | tuple[Message, ...], dict[str, str]]:
    """(prompt, responses) of two lists of messages; with a prompt of its own column, they are the responses alone."""
    start = 0
    if prompt is None:
        chosen, rejected = chats[CHOSEN], chats[REJECTED]
        start = next(
            (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)),
        )
        prompt = chosen[:start]
        if not any(message["content"].strip() for message in prompt):
            what = f"{names[CHOSEN]} and {names[REJECTED]} do not begin with a common prompt"
            raise RowError("pair", what, "give the prompt in a column of its own, or correct the row")
    for side, chat in chats.items():
        turns = chat[start:]
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            roles = listing((turn["role"] for turn in turns), 6)
            what = f"{names[side]} has {roles} behind the common prompt, and one assistant turn is read"
            raise RowError(
                "pair", what, "cut both conversations at the first turn in which they differ, or remove the row"
            )
    return prompt, {side: chat[start]["content"] for side, chat in chats.items()}


def _from_texts(texts: Mapping[str, str], names: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """(prompt, responses) of two whole texts."""
    chosen, rejected = texts[CHOSEN], texts[REJECTED]
    same = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected))
    )
    common = chosen[:same]
    ends = [at + len(marker) for marker in MARKERS if (at := common.rfind(marker)) >= 0]
    cut = max(ends, default=0)
    if not cut:
        # Not inside a word: its tokens would be others.
        cut = next((at for at in range(len(common), 0, -1) if common[at - 1].isspace()), 0)
    if not common[:cut].strip():
        what = f"{names[CHOSEN]} and {names[REJECTED]} do not begin with a common prompt: {excerpt(chosen, 40)!r}"
        raise RowError("pair", what, "give the prompt in a column of its own (data.columns.prompt), or correct the row")
    found = {CHOSEN: chosen[cut:], REJECTED: rejected[cut:]}
    for side, text in found.items():
        for marker, turn in TURNS.items():
            begun = turn.search(text)
            # Only in a dialogue of that style: `user:` may begin a line of anything else.
            if begun is not None and any(
                marker == m[0].lstrip() for whole in texts.values() for m in turn.finditer(whole)
            ):
                what = f"{names[side]} has another turn behind the common prompt ({begun[0].strip()}), and one assistant turn is read"
                raise RowError("pair", what, "cut both texts at the first turn in which they differ, or remove the row")
    return common[:cut], found


def _margin(values: Mapping[str, Any], column: str | None) -> float | None:
    if column is None:
        if values.get(MARGIN) is not None:
            what = f"the row has a {MARGIN}, and the first row of the file has none"
            raise RowError("columns", what, f"fill {MARGIN} in every row, or in none")
        return None
    value = read.need(values, column)
    hint = "write the margin as a number, or remove the row"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError("type", f"{column} is {type_name(value)} ({_as_json(value)}), not a number", hint)
    number = as_float(value)
    if not abs(number) <= LARGEST:
        what = f"{column} is {excerpt(value)}, which float32 does not hold" if number == number else f"{column} is NaN"
        raise RowError("type", what, f"write a finite number of at most {LARGEST:.1e}, or remove the row")
    return number


def _as_json(value: Any) -> str:
    """As it stands in the file: text in its quotes."""
    return f'"{excerpt(value)}"' if isinstance(value, str) else excerpt(value)
