"""The part of the data check that is about pairs: their tokens. See :mod:`rlctl.data.check`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlctl.config.schema_preference import extra_tokens
from rlctl.data.columns import Row
from rlctl.data.faults import Fault, listing
from rlctl.data.pairs import SIDES, describe_long, measure_pairs, overlong_pairs, pair_limit_words
from rlctl.data.prompts import PromptEncoder
from rlctl.data.readers import Split
from rlctl.data.report import DataReport, describe_lengths

if TYPE_CHECKING:
    from rlctl.config.schema import RunConfig


def check_pair_tokens(
    report: DataReport,
    split: Split,
    rows: Sequence[Row],
    encoder: PromptEncoder,
    config: RunConfig,
    positions: int | None,
    tell: Callable[[str, int, int | None], None],
) -> None:
    """Lengths of both sides, and what does not fit."""
    phase, data, extra = f"tokenising {split}", config.data, extra_tokens(config)
    found = measure_pairs(rows, encoder, lambda done: tell(phase, done, len(rows)))
    report.faults += found.faults
    lengths = {"prompt": found.chosen.prompt, "chosen": found.chosen.response, "rejected": found.rejected.response}
    for name, values in lengths.items():
        stats = describe_lengths(values, "tokens")
        if stats is not None:
            report.splits[split].lengths[name] = stats
    limit = data.max_prompt_length + data.max_response_length - extra
    long = overlong_pairs(found, limit)
    left_out = {at for at, _ in long}
    if long:
        what = f"{len(long)} sides of pairs have more than {pair_limit_words(data, extra).removeprefix('at most ')}: "
        what += describe_long(found, long)
        if data.overlong_prompts == "error" or len(left_out) == len(found.rows):
            hint = "raise the limit, or set data.overlong_prompts=filter"
            first = found.rows[long[0][0]].index
            report.faults.append(Fault("overlong", split, what, hint, first, count=len(left_out)))
        else:
            report.warnings.append(Fault("overlong", split, what, "they are left out (filter)", count=len(left_out)))
    kept = (found.total(at, side) + extra for at in range(len(found.rows)) if at not in left_out for side in SIDES)
    longest = max(kept, default=0)
    if positions is not None and longest > positions:
        what = f"rows are longer than the model's {positions} positions ({longest} tokens)"
        hint = "a lower data.max_prompt_length with data.overlong_prompts=filter"
        report.faults.append(Fault("positions", split, what, hint))
    unknown = sorted({*found.chosen.unknown, *found.rejected.unknown})
    if unknown:
        what = f"{len(unknown)} rows have characters that the tokenizer does not know (rows {listing(map(str, unknown), 5)})"
        hint = "use another tokenizer, or rows of its characters"
        report.warnings.append(Fault("unknown_token", split, what, hint, count=len(unknown)))
