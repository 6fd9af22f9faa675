"""Records to rows: which columns a file has, and what they say.

The first readable record of a file decides its shape; every later record must have the same columns filled. Shapes that
are read as they are:

==================================================  ===================================================================
columns                                             row
==================================================  ===================================================================
prompt, reward_model.ground_truth, extra_info       verl's row; ``prompt`` is a list of chat messages or text
prompt, answer                                      plain
question, answer                                    GSM8K: the answer is what follows ``####``, the response all of it
messages                                            a chat; SFT trains on each assistant turn
prompt, response or completion                      SFT, text or chat messages
prompt, chosen, rejected                            pairs, see :mod:`rlctl.data.pair_columns`
chosen, rejected                                    pairs of whole conversations, which begin with the same prompt
==================================================  ===================================================================

``data.columns`` names other columns; a dot reaches into an object (``reward_model.ground_truth``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rlctl.data.faults import Fault, excerpt, listing, nearest, type_name
from rlctl.data.readers import SPLIT_NAMES, Record
from rlctl.data.roles import ROLES
from rlctl.errors import DataError

if TYPE_CHECKING:
    from rlctl.config.schema import ColumnsConfig

PROMPT_COLUMNS = ("prompt", "question")
RESPONSE_COLUMNS = ("response", "completion")
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth")
PROMPT_SYNONYMS = ("problem", "instruction", "input", "query", "text", "conversations", "conversation", "dialog")
ROLE_SYNONYMS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt. ``margin``: by how much the chosen one is better, None where the row does not say."""

    chosen: str
    rejected: str
    margin: float | None = None


@dataclass(frozen=True)
class Row:
    """One row of a dataset, of whatever shape it was stored in.

    Args:
        index: place in its split, from 0.
        source: where it was read, ``train.jsonl:12``, or made, ``sort_digits train row 12``.
        prompt: text, or chat messages ``{"role", "content"}``; for a chat row all turns before the last assistant turn.
        answer: ground truth as text, None where the row has none.
        response: target text for SFT, None where the row has none.
        data_source: name of the dataset, from its column or its file.
        extra: ``extra_info`` and every column that has no other meaning.
        ground_truth: the answer as it was stored, of any JSON type; what a user's reward function gets.
        messages: the whole chat of a chat row; SFT trains on each of its assistant turns.
        pair: the two responses of a row of pairs.
    """

    index: int
    source: str
    prompt: str | tuple[Message, ...]
    answer: str | None
    response: str | None
    data_source: str
    extra: dict[str, Any] = field(default_factory=dict)
    ground_truth: Any = None
    messages: tuple[Message, ...] | None = None
    pair: Pair | None = None

    @property
    def prompt_text(self) -> str:
        """The prompt for people: text as it is, chat messages joined."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


@dataclass(frozen=True)
class Columns:
    """The columns in use; each is a name, or a dotted path into objects. ``gsm8k``: the answer follows ``####``."""

    prompt: str | None = None
    answer: str | None = None
    response: str | None = None
    messages: str | None = None
    data_source: str | None = None
    gsm8k: bool = False
    chosen: str | None = None
    rejected: str | None = None
    margin: str | None = None


class RowError(Exception):
    """A value that cannot be used; becomes a Fault with the row's place."""

    def __init__(self, kind: str, what: str, next: str) -> None:
        super().__init__(what)
        self.kind = kind
        self.what = what
        self.next = next


def find_columns(record: Record, mapping: ColumnsConfig, file: str, *, pairs: bool = False) -> Columns:
    """Decide which columns a file uses, from its first record.

    Args:
        pairs: rows are pairs of responses; else a chosen and a rejected one are columns like any other.

    Raises:
        DataError: a mapped column is not there, or no column can be the prompt.
    """
    values = record.values
    named = {name: value for name, value in mapping.model_dump().items() if value is not None}
    for name, column in named.items():
        if not has_value(values, column):
            near = nearest(column, values)
            raise DataError(
                f"{file} has no column {column!r}, which data.columns.{name} names",
                found=listing(values),
                wanted=f"did you mean {near!r}?" if near else "the name of one of these columns",
                next=f"data.columns.{name}={near or 'COLUMN'}",
            )
    if pairs:
        from rlctl.data.pair_columns import find_pair_columns

        return find_pair_columns(values, named, file)
    if "messages" in named or ("prompt" not in named and isinstance(values.get("messages"), list)):
        messages = named.get("messages", "messages")
        answer = named.get("answer") or first_of(values, ANSWER_COLUMNS)
        return Columns(messages=messages, answer=answer, data_source=data_source_of(values, named))
    prompt = named.get("prompt") or first_of(values, PROMPT_COLUMNS)
    if prompt is None:
        no_prompt(values, file)
    answer = named.get("answer") or first_of(values, ANSWER_COLUMNS)
    response = named.get("response") or first_of(values, RESPONSE_COLUMNS)
    text = get_value(values, answer) if answer else None
    gsm8k = isinstance(text, str) and "####" in text
    return Columns(prompt, answer, response, None, data_source_of(values, named), gsm8k)


def to_row(record: Record, index: int, columns: Columns, default_source: str) -> Row | Fault:
    """The row of a record, or what is wrong with it."""
    try:
        if columns.chosen is not None:
            from rlctl.data.pair_columns import pair_row

            return pair_row(record, index, columns, default_source)
        if columns.messages is not None:
            return _chat_row(record, index, columns, default_source)
        return _prompt_row(record, index, columns, default_source)
    except RowError as error:
        return Fault(error.kind, record.where, error.what, error.next, index)


def source_name(entry: str) -> str:
    """The data source of a file without such a column: its name, or its directory's when it is named after a split."""
    if entry.startswith("hf:"):
        return entry.removeprefix("hf:").partition(":")[0]
    path = PurePath(entry)
    splits = {name for names in SPLIT_NAMES.values() for name in names}
    parent = path.parent.name if path.parent.name != "data" else path.parent.parent.name
    stem = path.stem.split("-0")[0]
    return parent if stem.lower() in splits and parent else stem


# ---- rows ---------------------------------------------------------------------------------------------------------
def _prompt_row(record: Record, index: int, columns: Columns, default_source: str) -> Row:
    assert columns.prompt is not None
    values = record.values
    raw_prompt = need(values, columns.prompt)
    prompt = raw_prompt if isinstance(raw_prompt, str) else messages_of(raw_prompt, columns.prompt)
    if isinstance(prompt, str):
        check_text(prompt, columns.prompt)
    empty = not prompt.strip() if isinstance(prompt, str) else not any(m["content"].strip() for m in prompt)
    if empty:
        raise RowError("empty_prompt", f"the prompt ({columns.prompt}) is empty", "fill it or remove the row")
    truth = need(values, columns.answer) if columns.answer else None
    answer = None if columns.answer is None else _answer_text(truth, columns.answer)
    response: str | None = None
    chat: tuple[Message, ...] | None = None
    if columns.response is not None:
        raw_response = need(values, columns.response)
        if isinstance(raw_response, list):
            turns = messages_of(raw_response, columns.response)
            start = prompt if isinstance(prompt, tuple) else ({"role": "user", "content": prompt},)
            if turns[-1]["role"] != "assistant":
                raise RowError("messages", f"{columns.response} does not end with an assistant turn", "correct the row")
            response = turns[-1]["content"]
            chat = start + turns if len(turns) > 1 else None
            prompt = prompt if chat is None else chat[:-1]
        else:
            response = text_of(raw_response, columns.response)
    if columns.gsm8k:
        assert answer is not None
        response = answer if response is None else response
        answer = truth = _after_hashes(answer, columns.answer)
    return Row(index, record.where, prompt, answer, response, source_of(values, columns, default_source),
               extra_of(values, columns), truth, chat)  # fmt: skip


def _chat_row(record: Record, index: int, columns: Columns, default_source: str) -> Row:
    assert columns.messages is not None
    values = record.values
    messages = messages_of(need(values, columns.messages), columns.messages)
    response = messages[-1]["content"] if messages[-1]["role"] == "assistant" else None
    prompt = messages[:-1] if response is not None else messages
    if not any(message["content"].strip() for message in prompt):
        raise RowError("empty_prompt", "the chat has nothing before the assistant's turn", "fill it or remove the row")
    truth = need(values, columns.answer) if columns.answer else None
    answer = None if columns.answer is None else _answer_text(truth, columns.answer)
    return Row(index, record.where, prompt, answer, response, source_of(values, columns, default_source),
               extra_of(values, columns), truth, messages)  # fmt: skip


def source_of(values: Mapping[str, Any], columns: Columns, default: str) -> str:
    value = get_value(values, columns.data_source) if columns.data_source else None
    if not isinstance(value, str) or not value:
        return default
    assert columns.data_source is not None
    check_text(value, columns.data_source)
    return value


def extra_of(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    used = {columns.prompt, columns.answer, columns.response, columns.messages, columns.data_source, "extra_info"}
    used |= {columns.chosen, columns.rejected, columns.margin}
    used |= {name.partition(".")[0] for name in used if name and name not in values}
    extra = {name: value for name, value in values.items() if name not in used}
    nested = values.get("extra_info")
    if isinstance(nested, Mapping):
        extra |= nested
    elif nested is not None:
        extra["extra_info"] = nested
    return extra


# ---- values -------------------------------------------------------------------------------------------------------
def need(values: Mapping[str, Any], column: str) -> Any:
    if not has_value(values, column):
        near = nearest(column, values)
        hint = f"; it has {listing(values, 8)}" + (f" (did you mean {near!r}?)" if near else "")
        raise RowError("columns", f"the row has no {column!r}{hint}", "fill the column in every row, or remove the row")
    value = get_value(values, column)
    if value is None:
        raise RowError("columns", f"{column} is null", "fill the column in every row, or remove the row")
    return value


def text_of(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RowError("type", f"{column} is {type_name(value)}, not a string", "write it as a string")
    check_text(value, column)
    return value


def check_text(text: str, column: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            "encoding",
            f"{column} holds half of a surrogate pair at character {error.start + 1} ({text[error.start]!a})",
            "write the whole character, or remove it",
        ) from error


def _answer_text(value: Any, column: str) -> str:
    """Ground truth as text. A float that is a whole number loses its ``.0``, which parquet writers like to add."""
    if isinstance(value, str):
        check_text(value, column)
        return value
    if isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError("type", f"{column} is {value}, not a usable answer", "fill the column, or remove the row")
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, (list, dict)):
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (ValueError, RecursionError) as error:
            raise RowError("type", f"{column} cannot be written as text: {error}", "write it as a string") from error
        check_text(text, column)
        return text
    raise RowError("type", f"{column} is {type_name(value)}, not text or a number", "write it as a string")


def _after_hashes(answer: str, column: str | None) -> str:
    _, marker, tail = answer.rpartition("####")
    if not marker or not tail.strip():
        raise RowError(
            "answer",
            f"{column} has no final answer after #### (the file's first row has): {excerpt(answer)!r}",
            "end it with a line `#### NUMBER`, or remove the row",
        )
    return tail.strip()


def messages_of(value: Any, column: str) -> tuple[Message, ...]:
    if not isinstance(value, (list, tuple)):
        raise RowError(
            "type", f"{column} is {type_name(value)}, not text or a list of messages", "write it as a string"
        )
    if not value:
        raise RowError("messages", f"{column} is an empty list of messages", "fill it or remove the row")
    return tuple(_message(item, f"{column}[{number}]") for number, item in enumerate(value))


def _message(item: Any, place: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(
            "messages", f"{place} is {type_name(item)}, not a message", 'write {"role": ..., "content": ...}'
        )
    # Parquet fills the keys that other messages have with null.
    message = {str(key): value for key, value in item.items() if value is not None}
    if "role" not in message and "from" in message and "value" in message:
        raise RowError("messages", f"{place} has from/value, not role/content", "rename them: role and content")
    role = message.get("role")
    if not isinstance(role, str):
        raise RowError(
            "messages", f"{place} has no role; it has {listing(message)}", f"role is one of {listing(ROLES)}"
        )
    if role not in ROLES:
        meant = ROLE_SYNONYMS.get(role.lower()) or nearest(role, ROLES)
        raise RowError(
            "messages",
            f"{place} has the role {excerpt(role)!r}",
            f"write {meant!r}" if meant else f"role is one of {listing(ROLES)}",
        )
    if "content" not in message and "tool_calls" in message:
        message["content"] = ""
    content = message.get("content")
    if isinstance(content, list):
        raise RowError("messages", f"{place}.content is a list of parts; only text is read", "write it as one string")
    if not isinstance(content, str):
        raise RowError("messages", f"{place}.content is {type_name(content)}, not a string", "write it as a string")
    check_text(content, f"{place}.content")
    return message


# ---- lookup -------------------------------------------------------------------------------------------------------
def has_value(values: Mapping[str, Any], column: str) -> bool:
    if column in values:
        return True
    head, dot, rest = column.partition(".")
    inner = values.get(head)
    return bool(dot) and isinstance(inner, Mapping) and has_value(inner, rest)


def get_value(values: Mapping[str, Any], column: str) -> Any:
    if column in values:
        return values[column]
    head, dot, rest = column.partition(".")
    inner = values.get(head)
    return get_value(inner, rest) if dot and isinstance(inner, Mapping) else None


def first_of(values: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if get_value(values, name) is not None), None)


def data_source_of(values: Mapping[str, Any], named: Mapping[str, str]) -> str | None:
    return named.get("data_source") or ("data_source" if "data_source" in values else None)


def no_prompt(values: Mapping[str, Any], file: str) -> None:
    near = next((name for name in PROMPT_SYNONYMS if name in values), None)
    near = near or next((match for name in ("messages", *PROMPT_COLUMNS) if (match := nearest(name, values))), None)
    key = "messages" if near and near.startswith(("conv", "dialog")) else "prompt"
    if near and isinstance(values[near], list):
        key = "messages"
    raise DataError(
        f"{file} has no column that is known to be a prompt",
        found=listing(values),
        wanted="prompt, question or messages, or a mapping in data.columns"
        + (f"; did you mean {near!r}?" if near else ""),
        next=f"data.columns.{key}={near or 'COLUMN'}",
    )
