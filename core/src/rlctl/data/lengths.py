"""How long rows are, and which do not fit. The trainers and the data check ask the same functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.data.columns import Row
from rlctl.data.faults import Fault, listing
from rlctl.data.prompts import PromptEncoder
from rlctl.errors import DataError

if TYPE_CHECKING:
    from rlctl.config.schema import DataConfig, ModelConfig

CHUNK = 512


@dataclass
class Lengths:
    """Tokens of each row that could be encoded. ``response`` is empty where only prompts were measured.

    Args:
        rows: the rows, in order.
        prompt: tokens before the first response token.
        response: tokens after them (for a chat of several turns, all the rest).
        faults: rows that could not be encoded.
    """

    rows: list[Row] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    """Indices of rows with characters that the tokenizer does not know."""


def measure(
    rows: Sequence[Row],
    encoder: PromptEncoder,
    *,
    sft: bool,
    talks: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Lengths:
    """Encode every row: the prompt, and with ``sft`` also its response.

    Args:
        talks: the policy talks to an environment, which begins before the first answer of a row that is a conversation.
    """
    lengths = Lengths()
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        for row, ids, prompt in _encode(
            chunk, partial(_encode_chunk, encoder=encoder, sft=sft, talks=talks), lengths.faults
        ):
            lengths.rows.append(row)
            lengths.prompt.append(prompt)
            if sft:
                lengths.response.append(len(ids) - prompt)
            if encoder.tokenizer.unk_token_id in ids and encoder.tokenizer.unk_token_id is not None:
                lengths.unknown.append(row.index)
        if progress is not None:
            progress(start + len(chunk))
    return lengths


def overlong(lengths: Lengths, data: DataConfig, *, sft: bool) -> list[int]:
    """Positions in ``lengths.rows`` that do not fit: a prompt over its limit, or for SFT a whole row over both limits."""
    if not sft:
        return [place for place, tokens in enumerate(lengths.prompt) if tokens > data.max_prompt_length]
    limit = data.max_prompt_length + data.max_response_length
    both = zip(lengths.prompt, lengths.response, strict=True)
    return [place for place, (prompt, response) in enumerate(both) if prompt + response > limit]


def fit_rows(
    rows: Sequence[Row],
    encoder: PromptEncoder,
    data: DataConfig,
    *,
    sft: bool = False,
    talks: bool = False,
    positions: int | None = None,
) -> list[Row]:
    """The rows that fit the limits, all of them under ``data.overlong_prompts`` error.

    Args:
        talks: as for :func:`measure`.
        positions: how many the model has, where that is known.

    Raises:
        DataError: a row cannot be encoded; rows are too long (their indices are named); filtering leaves none; or what is
            left goes beyond the model's positions.
    """
    lengths = measure(rows, encoder, sft=sft, talks=talks)
    if lengths.faults:
        first = lengths.faults[0]
        raise DataError(first.line(), found=f"{len(lengths.faults)} such rows", next=first.next)
    long = overlong(lengths, data, sft=sft)
    if long and data.overlong_prompts == "error":
        raise DataError(
            f"{len(long)} rows are too long",
            found=f"rows {listing((str(lengths.rows[place].index) for place in long), 10)}; "
            f"the longest has {longest(lengths, long, sft)} tokens",
            wanted=limit_words(data, sft),
            next="raise the limit, or set data.overlong_prompts=filter",
        )
    left_out = set(long)
    kept = [row for place, row in enumerate(lengths.rows) if place not in left_out]
    if rows and not kept:
        raise DataError("every row is too long", wanted=limit_words(data, sft), next="raise the limit")
    beyond = beyond_positions(lengths, data, positions, sft=sft)
    if beyond is not None:
        raise DataError(beyond.what, found=beyond.found, wanted=f"at most {positions}", next=beyond.next)
    return kept


@dataclass(frozen=True)
class Beyond:
    """Rows that are longer than the model has positions: what they come to, and what makes them fit."""

    what: str
    found: str
    next: str


def beyond_positions(lengths: Lengths, data: DataConfig, positions: int | None, *, sft: bool) -> Beyond | None:
    """The longest row that fits the limits against the model's positions; None where it fits, or their number is not known.

    A row of SFT is its own tokens; one of RL may get ``data.max_response_length`` after its prompt.
    """
    left_out = set(overlong(lengths, data, sft=sft))
    kept = [place for place in range(len(lengths.rows)) if place not in left_out]
    if positions is None or not kept:
        return None
    tokens = longest(lengths, kept, sft)
    return beyond_model(tokens, 0 if sft else data.max_response_length, positions)


def surely_beyond(data: DataConfig, positions: int | None) -> Beyond | None:
    """As :func:`beyond_positions` for RL, of what holds whatever the prompts are: each has a token."""
    return beyond_model(1, data.max_response_length, positions)


def beyond_model(tokens: int, response: int, positions: int | None) -> Beyond | None:
    """``tokens`` with ``response`` more after them (0: a whole row of SFT) against the model's positions."""
    if positions is None or tokens + response <= positions:
        return None
    if not response:
        what, found = f"rows are longer than the model's {positions} positions", f"{tokens} tokens"
        return Beyond(what, found, "a lower data.max_prompt_length with data.overlong_prompts=filter")
    what = f"prompts with data.max_response_length={response} tokens after them are longer than the model's {positions} positions"
    least = f"{tokens} + {response} tokens"
    if tokens >= positions:
        return Beyond(what, least, f"data.max_prompt_length={positions // 2} with data.overlong_prompts=filter")
    return Beyond(what, least, f"data.max_response_length={positions - tokens}, or a shorter prompt limit")


def model_positions(model: ModelConfig) -> int | None:
    """How many positions a model has, by ``model.config`` or its config.json; None where neither says so."""
    values: Any = model.config
    if values is None and model.path is not None:
        try:
            values = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # a hub id; or a broken file, which the engine names when it builds the model
    return positions_in(values)


def positions_in(values: Any) -> int | None:
    """The positions that a Hugging Face config states."""
    if not isinstance(values, Mapping):
        return None
    inner = values.get("text_config")
    found = values.get("max_position_embeddings") or (inner if isinstance(inner, Mapping) else {}).get(
        "max_position_embeddings"
    )
    return found if isinstance(found, int) and found > 0 else None


def limit_words(data: DataConfig, sft: bool) -> str:
    """The bound of :func:`overlong` in words."""
    if sft:
        total = data.max_prompt_length + data.max_response_length
        return f"at most {total} tokens (data.max_prompt_length + data.max_response_length)"
    return f"at most {data.max_prompt_length} tokens of prompt (data.max_prompt_length)"


def longest(lengths: Lengths, places: Sequence[int], sft: bool) -> int:
    """Tokens of the longest of the rows at ``places``."""
    return max(lengths.prompt[place] + (lengths.response[place] if sft else 0) for place in places)


def _encode(
    rows: Sequence[Row], chunk: Callable[[Sequence[Row]], list[tuple[Row, list[int], int]]], faults: list[Fault]
) -> list[tuple[Row, list[int], int]]:
    """(row, ids, tokens of the prompt) of each row that can be encoded."""
    try:
        return chunk(rows)
    except DataError:
        pass  # one of them is at fault: find out which, one by one
    done: list[tuple[Row, list[int], int]] = []
    for row in rows:
        try:
            done += chunk([row])
        except DataError as error:
            # The fault names the row already.
            what = error.what.replace(f"{row.source} (row {row.index})", "it")
            what += f": {error.found}" if error.found else ""
            faults.append(Fault("encode", row.source, what, error.next or "correct the row", row.index))
    return done


def _encode_chunk(
    rows: Sequence[Row], encoder: PromptEncoder, sft: bool, talks: bool
) -> list[tuple[Row, list[int], int]]:
    if sft:
        pairs = zip(rows, encoder.sft_batch(rows), strict=True)
        return [(row, ids, mask.index(True)) for row, (ids, mask) in pairs]
    return [
        (row, ids, len(ids)) for row, ids in zip(rows, encoder.prompt_ids_batch(rows, beginning=talks), strict=True)
    ]
