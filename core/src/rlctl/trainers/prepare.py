"""Rows that fit, before a model is loaded: a row that is too long is refused (or left out) here, by its index."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.config.schema import DataConfig
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rows import Row
from rlctl.errors import DataError
from rlctl.tracking.reporter import Reporter

_CHUNK = 1_000
_SHOWN = 8


def fitting_rows(
    rows: Sequence[Row], encoder: PromptEncoder, data: DataConfig, *, sft: bool, reporter: Reporter, split: str
) -> list[Row]:
    """Encode every row once and keep those within the limits.

    RL: a prompt has at most ``max_prompt_length`` tokens. SFT: prompt and response together have at most
    ``max_prompt_length + max_response_length``.

    Raises:
        DataError: rows are too long and ``data.overlong_prompts`` is ``error``, or no row is left.
    """
    limit = data.max_prompt_length + (data.max_response_length if sft else 0)
    lengths: list[int] = []
    with reporter.phase(f"encoding {split} rows", len(rows)) as bar:
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            if sft:
                lengths += [len(encoder.sft(row)[0]) for row in part]
            else:
                lengths += [len(ids) for ids in encoder.prompt_ids_batch(part)]
            bar.advance(len(part))
    over = [(row, n) for row, n in zip(rows, lengths, strict=True) if n > limit]
    if not over:
        return list(rows)
    names = "data.max_prompt_length + data.max_response_length" if sft else "data.max_prompt_length"
    if data.overlong_prompts == "error":
        shown = [f"{row.source} (row {row.index}): {n} tokens" for row, n in over[:_SHOWN]]
        raise DataError(
            f"{len(over)} of {len(rows)} {split} rows are too long",
            details=shown + ([f"... and {len(over) - _SHOWN} more"] if len(over) > _SHOWN else []),
            found=f"up to {max(n for _, n in over)} tokens",
            wanted=f"at most {limit} ({names})",
            next=f"raise {names}, or set data.overlong_prompts=filter to leave them out",
        )
    kept = [row for row, n in zip(rows, lengths, strict=True) if n <= limit]
    if not kept:
        raise DataError(f"no {split} row is within {limit} tokens", wanted=f"at least one row within {names}")
    reporter.message(f"{len(over)} of {len(rows)} {split} rows are longer than {limit} tokens and left out")
    return kept
