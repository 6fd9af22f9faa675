"""The data check: everything that can be known of a run's data before a model is loaded.

Order: cheap and certain things first. Rows are read and compared without the tokenizer; the tokenizer (which takes torch
with it, see :func:`rlctl.data.tokenizer.load_tokenizer`) comes after, then the reward's dry run.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.data.columns import Row
from rlctl.data.dry_run import dry_run
from rlctl.data.faults import Fault, listing, show_path
from rlctl.data.lengths import (
    Lengths,
    beyond_positions,
    limit_words,
    longest,
    measure,
    model_positions,
    overlong,
)
from rlctl.data.pair_check import check_pair_tokens
from rlctl.data.pairs import SIDES
from rlctl.data.prompts import PromptEncoder
from rlctl.data.readers import Split, directory_has_split
from rlctl.data.report import DataReport, SplitReport, describe_lengths
from rlctl.data.rows import collect_rows
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import DataError, RlctlError
from rlctl.trainer_kinds import PAIR_TRAINERS

if TYPE_CHECKING:
    from rlctl.config.load import ResolvedConfig
    from rlctl.config.schema import DataConfig, RunConfig
    from rlctl.plugins import PluginSet

Progress = Callable[[str, int, int | None], None]
"""Called with (phase, rows done, rows in all or None)."""

REWARD_LIMIT_S = 60.0


def check_data(
    resolved: ResolvedConfig,
    plugins: PluginSet | None,
    progress: Progress | None = None,
    reward_limit_s: float = REWARD_LIMIT_S,
) -> DataReport:
    """Check all rows of a run: schema, duplicates, lengths in tokens, reward.

    Args:
        progress: for a progress bar.
        reward_limit_s: time for the dry run of the reward on each split.
    """
    config = resolved.config
    report = DataReport(resolved.source)
    tell = progress or (lambda phase, done, total: None)
    start = time.monotonic()
    sft, rl, pairs = config.trainer.type == "sft", config.trainer.type == "rl", config.trainer.type in PAIR_TRAINERS
    splits = _read(report, config.data, ("train", "val"), tell, pairs=pairs)
    _compare(report, splits)
    _check_sizes(report, splits["train"], config)
    encoder, positions = _encoder(report, config, tell)
    if encoder is not None:
        for split, rows in splits.items():
            if pairs:
                check_pair_tokens(report, split, rows, encoder, config, positions, tell)
                continue
            # A warm start trains on the training rows' own answers.
            trains = sft or (split == "train" and config.warm_start is not None)
            _check_tokens(report, split, rows, encoder, config, trains, positions, tell)
    if rl:
        _check_reward(report, splits, resolved, plugins, tell, reward_limit_s)
        _check_environment(report, splits, resolved, plugins, encoder, positions, tell)
    report.seconds = time.monotonic() - start
    return report


def check_files(entry: str, data: DataConfig, progress: Progress | None = None) -> DataReport:
    """Check a bare dataset, a file or a directory: schema, duplicates, lengths in characters."""
    report = DataReport(entry if entry.startswith("hf:") else show_path(entry))
    tell = progress or (lambda phase, done, total: None)
    start = time.monotonic()
    both = Path(entry).is_dir() and directory_has_split(entry, "train")
    names: tuple[Split, ...] = ("train", "val") if both and directory_has_split(entry, "val") else ("train",)
    if Path(entry).is_dir() and not both and directory_has_split(entry, "val"):
        names = ("val",)
    splits = _read(report, data.model_copy(update={"train_files": (entry,), "val_files": ()}), names, tell, pairs=None)
    _compare(report, splits)
    for split, rows in splits.items():
        _add_lengths(report, split, "prompt", [len(row.prompt_text) for row in rows], "characters")
        for side in SIDES:
            _add_lengths(report, split, side, [len(getattr(row.pair, side)) for row in rows if row.pair], "characters")
        answers = [len(text) for row in rows if (text := row.response or row.answer) is not None]
        _add_lengths(report, split, "response", answers, "characters")
    report.seconds = time.monotonic() - start
    return report


# ---- rows ---------------------------------------------------------------------------------------------------------
def _read(
    report: DataReport, data: DataConfig, names: Sequence[Split], tell: Progress, *, pairs: bool | None
) -> dict[Split, list[Row]]:
    splits: dict[Split, list[Row]] = {}
    for split in names:
        phase = f"reading {split}"
        tell(phase, 0, None)
        try:
            rows, faults = collect_rows(data, split, lambda done, phase=phase: tell(phase, done, None), pairs=pairs)
        except DataError as error:
            rows, faults = [], [_from_error("file", f"data.{split}_files", error)]
        splits[split] = rows
        report.faults += faults
        report.splits[split] = SplitReport(len(rows), dict(Counter(row.data_source for row in rows)))
    return splits


def _compare(report: DataReport, splits: dict[Split, list[Row]]) -> None:
    """Prompts that come twice: in one split a warning, in both a fault."""
    keys: dict[Split, dict[str, Row]] = {}
    for split, rows in splits.items():
        first: dict[str, Row] = {}
        seen: dict[str, Row] = {}
        again: list[Row] = []
        for row in rows:
            first.setdefault(_key(row), row)
            # A prompt may have several pairs.
            whole = _key(row) + repr(row.pair) if row.pair else _key(row)
            if seen.setdefault(whole, row) is not row:
                again.append(row)
        keys[split] = first
        report.splits[split].duplicates = len(again)
        # A procedural task may draw a prompt twice; a file should not hold it twice.
        if again and not again[0].source.startswith(f"{again[0].data_source} {split} row"):
            places = listing((row.source for row in again), 3)
            what = f"{len(again)} prompts come more than once ({places})"
            report.warnings.append(
                Fault("duplicate", split, what, "remove them, or leave them in on purpose", count=len(again))
            )
    if "train" not in keys or "val" not in keys:
        return
    shared = [row for key, row in keys["val"].items() if key in keys["train"]]
    if shared:
        other = keys["train"][_key(shared[0])]
        what = f"{len(shared)} validation prompts are also in the training data ({shared[0].source} is {other.source})"
        report.faults.append(
            Fault("leakage", "val", what, "remove them from one of the two", shared[0].index, count=len(shared))
        )


def _key(row: Row) -> str:
    return row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, sort_keys=True, default=str)


def _check_sizes(report: DataReport, rows: Sequence[Row], config: RunConfig) -> None:
    wanted = [("data.train_batch_size", config.data.train_batch_size, report.faults)]
    if config.warm_start is not None:
        # The warm start takes smaller batches then, and says so.
        wanted.append(("warm_start.batch_size", config.warm_start.batch_size, report.warnings))
    for setting, size, found in wanted:
        if 0 < len(rows) < size:
            what = f"{len(rows)} rows are fewer than one batch of {setting}={size}"
            found.append(Fault("size", "train", what, f"{setting}={len(rows)}, or more rows"))


# ---- tokens -------------------------------------------------------------------------------------------------------
def _encoder(report: DataReport, config: RunConfig, tell: Progress) -> tuple[PromptEncoder | None, int | None]:
    """Also the number of the model's positions, where it is known."""
    tell("loading the tokenizer", 0, None)
    try:
        from rlctl.models import resolve_model_source

        model = resolve_model_source(config.model)
        return PromptEncoder(load_tokenizer(model), config.data), model_positions(model)
    except RlctlError as error:
        report.faults.append(_from_error("tokenizer", "model", error))
        return None, None


def _check_tokens(
    report: DataReport,
    split: Split,
    rows: Sequence[Row],
    encoder: PromptEncoder,
    config: RunConfig,
    trains: bool,
    positions: int | None,
    tell: Progress,
) -> None:
    phase, sft = f"tokenising {split}", config.trainer.type == "sft"
    talks = not sft and config.rollout.environment is not None
    lengths = measure(rows, encoder, sft=trains, talks=talks, progress=lambda done: tell(phase, done, len(rows)))
    report.faults += lengths.faults
    _add_lengths(report, split, "prompt", lengths.prompt, "tokens")
    _add_lengths(report, split, "response", lengths.response, "tokens")
    for whole in (False, True) if trains and not sft else (sft,):
        _check_overlong(report, split, overlong(lengths, config.data, sft=whole), lengths, config.data, whole)
        beyond = beyond_positions(lengths, config.data, positions, sft=whole)
        if beyond is not None:
            report.faults.append(Fault("positions", split, f"{beyond.what} ({beyond.found})", beyond.next))
    if not sft:
        _check_answers(report, split, rows, encoder, config.data)
    if lengths.unknown:
        what = f"{len(lengths.unknown)} rows have characters that the tokenizer does not know (rows "
        what += f"{listing(map(str, lengths.unknown), 5)})"
        hint = "use another tokenizer, or rows of its characters"
        report.warnings.append(Fault("unknown_token", split, what, hint, count=len(lengths.unknown)))
    if encoder.uses_chat_template:
        markers = [token for token in encoder.special_tokens if len(token) > 3]
        marked = [r.index for r in rows if isinstance(r.prompt, str) and any(mark in r.prompt for mark in markers)]
        if marked:
            what = f"{len(marked)} prompts hold chat markers already (rows {listing(map(str, marked), 5)})"
            hint = "data.apply_chat_template=never for prompts that are templated already"
            report.warnings.append(Fault("templated", split, what, hint, count=len(marked)))


def _check_overlong(
    report: DataReport, split: Split, long: list[int], lengths: Lengths, data: DataConfig, sft: bool
) -> None:
    if not long:
        return
    indices = listing((str(lengths.rows[place].index) for place in long), 10)
    what = (
        f"{len(long)} rows have more than {limit_words(data, sft).removeprefix('at most ')}; "
        f"the longest has {longest(lengths, long, sft)} (rows {indices})"
    )
    if data.overlong_prompts == "error" or len(long) == len(lengths.rows):
        hint = "raise the limit, or set data.overlong_prompts=filter"
        first = lengths.rows[long[0]].index
        report.faults.append(Fault("overlong", split, what, hint, first, count=len(long)))
    else:
        report.warnings.append(Fault("overlong", split, what, "they are left out (filter)", count=len(long)))


def _check_answers(
    report: DataReport, split: Split, rows: Sequence[Row], encoder: PromptEncoder, data: DataConfig
) -> None:
    """Answers that no response within the limit can give."""
    answers = [(row.index, row.answer) for row in rows if row.answer]
    if not answers:
        return
    encoded = encoder.tokenizer([text for _, text in answers], add_special_tokens=False, verbose=False)["input_ids"]
    long = [index for (index, _), ids in zip(answers, encoded, strict=True) if len(ids) > data.max_response_length]
    if long:
        what = f"{len(long)} answers are longer than data.max_response_length={data.max_response_length} "
        what += f"(rows {listing(map(str, long), 5)})"
        report.warnings.append(Fault("answer_length", split, what, "raise data.max_response_length", count=len(long)))


def _add_lengths(report: DataReport, split: Split, name: str, values: Sequence[int], unit: str) -> None:
    stats = describe_lengths(values, unit)
    if stats is not None:
        report.splits[split].lengths[name] = stats


# ---- reward -------------------------------------------------------------------------------------------------------
def _check_reward(
    report: DataReport,
    splits: dict[Split, list[Row]],
    resolved: ResolvedConfig,
    plugins: PluginSet | None,
    tell: Progress,
    limit_s: float,
) -> None:
    from rlctl.data.rewards import build_reward
    from rlctl.data.rewards.sources import require_sources

    rows = [row for split in splits.values() for row in split]
    if not rows:
        return
    tell("reward dry run", 0, len(rows))
    try:
        require_sources(resolved.config.reward, rows)
        scorer = build_reward(resolved.config.reward, plugins, resolved.base_dir)
    except RlctlError as error:
        report.faults.append(_from_error("reward", "reward", error))
        return
    with scorer:
        run = dry_run(rows, scorer, limit_s=limit_s, progress=lambda done: tell("reward dry run", done, len(rows)))
    report.reward = run.report if run.report.rows or run.faults else None
    report.faults += run.faults
    report.warnings += run.warnings


def _check_environment(
    report: DataReport,
    splits: dict[Split, list[Row]],
    resolved: ResolvedConfig,
    plugins: PluginSet | None,
    encoder: PromptEncoder | None,
    positions: int | None,
    tell: Progress,
) -> None:
    if resolved.config.rollout.environment is None or encoder is None:
        return
    from rlctl.environments.dry_run import try_environment

    tell("trying the environment", 0, None)
    for rows in splits.values():
        try:
            try_environment(resolved, plugins, encoder, rows, positions)
        except RlctlError as error:
            report.faults.append(_from_error("environment", "rollout.environment", error))
            return


def _from_error(kind: str, where: str, error: RlctlError) -> Fault:
    """A fault that says all an error says."""
    parts = [error.what, *error.details]
    parts += [f"found: {error.found}"] if error.found else []
    parts += [f"wanted: {error.wanted}"] if error.wanted else []
    return Fault(kind, where, "; ".join(parts), error.next or "see above", fatal=True)
