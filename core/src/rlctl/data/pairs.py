"""Rows of pairs as token ids: both sides of each, and which pairs fit. The trainers and the data check ask the same functions.

A side is the prompt with one response, encoded as a row of SFT is: its loss mask is True on the response's tokens, the one that
ends it included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlctl.data.columns import Row
from rlctl.data.faults import Fault, listing
from rlctl.data.lengths import CHUNK, Lengths, limit_words
from rlctl.data.prompts import PromptEncoder
from rlctl.errors import DataError

if TYPE_CHECKING:
    from rlctl.config.schema import DataConfig

SIDES = ("chosen", "rejected")


def sides(row: Row) -> tuple[Row, Row]:
    """A pair as two rows of SFT: the chosen response, the rejected one."""
    assert row.pair is not None, row.source
    chosen, rejected = row.pair.chosen, row.pair.rejected
    return replace(row, response=chosen, messages=None), replace(row, response=rejected, messages=None)


@dataclass
class PairLengths:
    """Tokens of the sides of each pair that could be encoded, and pairs that could not, or have the same tokens."""

    chosen: Lengths = field(default_factory=Lengths)
    rejected: Lengths = field(default_factory=Lengths)
    faults: list[Fault] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        return self.chosen.rows

    def total(self, place: int, side: str) -> int:
        """Tokens of one side, its prompt included."""
        lengths: Lengths = getattr(self, side)
        return lengths.prompt[place] + lengths.response[place]


def measure_pairs(
    rows: Sequence[Row], encoder: PromptEncoder, progress: Callable[[int], None] | None = None
) -> PairLengths:
    """Encode both sides of every pair."""
    found = PairLengths()
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        for row, encoded in zip(chunk, _encode(chunk, encoder, found.faults), strict=True):
            if encoded is None:
                continue
            if encoded[0][0] == encoded[1][0]:
                what = "the tokens of its chosen and its rejected response are the same"
                found.faults.append(
                    Fault("pair", row.source, what, "remove the row, or use another tokenizer", row.index)
                )
                continue
            for side, (ids, mask) in zip(SIDES, encoded, strict=True):
                lengths: Lengths = getattr(found, side)
                lengths.rows.append(row)
                lengths.prompt.append(mask.index(True))
                lengths.response.append(len(ids) - mask.index(True))
                unknown = encoder.tokenizer.unk_token_id
                if unknown is not None and unknown in ids:
                    lengths.unknown.append(row.index)
        if progress is not None:
            progress(start + len(chunk))
    return found


def overlong_pairs(lengths: PairLengths, limit: int) -> list[tuple[int, str]]:
    """(position in ``lengths.rows``, side) of every side of more than ``limit`` tokens."""
    return [(at, side) for at in range(len(lengths.rows)) for side in SIDES if lengths.total(at, side) > limit]


def fit_pairs(
    rows: Sequence[Row], encoder: PromptEncoder, data: DataConfig, *, extra: int = 0, positions: int | None = None
) -> list[Row]:
    """The pairs of which both sides fit, all of them under ``data.overlong_prompts`` error.

    Args:
        extra: tokens that the trainer adds to a side.
        positions: how many the model has, where that is known.

    Raises:
        DataError: a pair cannot be encoded, or has the same tokens twice; sides are too long (rows and sides are named);
            filtering leaves none; or what is left goes beyond the model's positions.
    """
    lengths = measure_pairs(rows, encoder)
    if lengths.faults:
        first = lengths.faults[0]
        raise DataError(first.line(), found=f"{len(lengths.faults)} such rows", next=first.next)
    limit = data.max_prompt_length + data.max_response_length - extra
    long = overlong_pairs(lengths, limit)
    if long and data.overlong_prompts == "error":
        raise DataError(
            "1 side of a pair is too long" if len(long) == 1 else f"{len(long)} sides of pairs are too long",
            found=describe_long(lengths, long),
            wanted=pair_limit_words(data, extra),
            next="raise the limit, or set data.overlong_prompts=filter",
        )
    left_out = {at for at, _ in long}
    kept = [at for at in range(len(lengths.rows)) if at not in left_out]
    if rows and not kept:
        raise DataError("every pair is too long", wanted=pair_limit_words(data, extra), next="raise the limit")
    longest = max((lengths.total(at, side) + extra for at in kept for side in SIDES), default=0)
    if positions is not None and longest > positions:
        raise DataError(
            f"rows are longer than the model's {positions} positions",
            found=f"{longest} tokens",
            wanted=f"at most {positions}",
            next="a lower data.max_prompt_length with data.overlong_prompts=filter",
        )
    return [lengths.rows[at] for at in kept]


def describe_long(lengths: PairLengths, long: Sequence[tuple[int, str]]) -> str:
    """``rows 3 (chosen), 7 (rejected); the longest has 300 tokens``."""
    named = listing((f"{lengths.rows[at].index} ({side})" for at, side in long), 10)
    return f"rows {named}; the longest has {max(lengths.total(at, side) for at, side in long)} tokens"


def pair_limit_words(data: DataConfig, extra: int) -> str:
    """The bound of :func:`fit_pairs` in words."""
    return limit_words(data, True) + (f", {extra} of which reads the score" if extra else "")


def _encode(
    rows: Sequence[Row], encoder: PromptEncoder, faults: list[Fault]
) -> list[list[tuple[list[int], list[bool]]] | None]:
    """Both sides of each row, chosen first; None for a row that cannot be encoded."""
    try:
        flat = encoder.sft_batch([side for row in rows for side in sides(row)])
        return [flat[at : at + 2] for at in range(0, len(flat), 2)]
    except DataError as error:
        if len(rows) == 1:
            row = rows[0]
            # The fault names the row already.
            what = error.what.replace(f"{row.source} (row {row.index})", "it")
            what += f": {error.found}" if error.found else ""
            faults.append(Fault("encode", row.source, what, error.next or "correct the row", row.index))
            return [None]
    return [encoded for row in rows for encoded in _encode([row], encoder, faults)]
