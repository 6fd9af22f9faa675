"""The batch arithmetic of a run, line by line: from prompts to micro-batches and optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.config.schema import RunConfig, TrainRole

DEFAULT_TOKENS_PER_DEVICE = 16_384
"""Token budget of a micro-batch where neither bound is set, as the trainers have it."""


@dataclass(frozen=True)
class Line:
    """One step of the arithmetic.

    Args:
        key: stable name.
        value: the number; None where it is not known.
        unit: what is counted.
        how: where it comes from.
        note: what a reader should know beside it (rows that do not divide); empty mostly.
    """

    key: str
    value: int | None
    unit: str
    how: str
    note: str = ""


@dataclass(frozen=True)
class MicroBound:
    """The bound of a micro-batch of one role.

    Args:
        max_rows: rows, or None under a token budget.
        max_tokens: tokens of a replica's micro-batch: the budget of a device x usp x cp.
        longest: tokens of the longest row.
    """

    max_rows: int | None
    max_tokens: int | None
    longest: int

    def rows_at_worst(self) -> int:
        """Rows that a micro-batch surely holds, however long they are."""
        if self.max_rows is not None:
            return self.max_rows
        assert self.max_tokens is not None
        return max(1, self.max_tokens // self.longest)

    def tokens(self, rows: int) -> int:
        """The most tokens that one micro-batch of a mini-batch with ``rows`` rows can hold."""
        if self.max_rows is not None:
            return min(rows, self.max_rows) * self.longest
        assert self.max_tokens is not None
        return min(self.max_tokens, rows * self.longest)

    def micro_batches(self, rows: int) -> int:
        """Micro-batches of ``rows`` rows when every row is as long as it may be. Packing never needs more: a micro-batch
        that takes no further row holds at least :meth:`rows_at_worst`."""
        return -(-rows // self.rows_at_worst())


def longest_row(config: RunConfig) -> int:
    """Tokens of the longest row that the data check lets through."""
    return config.data.max_prompt_length + config.data.max_response_length


def micro_bound(role: TrainRole, config: RunConfig, token_ranks: int) -> MicroBound:
    """The bound of ``role``: rows, or the token budget of a device times the ``token_ranks`` (usp x cp) that share a row."""
    longest = longest_row(config)
    if role.micro_batch_size_per_device is not None:
        return MicroBound(role.micro_batch_size_per_device, None, longest)
    budget = role.max_tokens_per_device or max(DEFAULT_TOKENS_PER_DEVICE, longest)
    return MicroBound(None, budget * token_ranks, longest)


def rows_a_rank(rows: int, dp_size: int) -> int:
    """Rows of the fullest data parallel rank: counts differ by one at most."""
    return -(-rows // dp_size)


def rl_lines(config: RunConfig, dp_size: int, token_ranks: int, num_rows: int | None) -> list[Line]:
    """The lines of an RL run.

    Args:
        dp_size: data parallel ranks of the actor.
        token_ranks: ranks that share a row's tokens (usp x cp).
        num_rows: training rows, or None where counting them is not cheap.
    """
    prompts, n = config.data.train_batch_size, config.rollout.n
    rows = prompts * n
    mini = config.actor.ppo_mini_batch_size or prompts
    minis = -(-prompts // mini)
    mini_rows = min(mini, prompts) * n
    lines = [
        Line("prompts", prompts, "prompts a step", "data.train_batch_size"),
        Line("trajectories", rows, "trajectories a step", f"{prompts:,} prompts x rollout.n {n}"),
        _split("trajectories_per_dp_rank", rows, dp_size, "trajectories a dp rank"),
        Line(
            "mini_batches",
            minis,
            "mini-batches an epoch",
            f"{prompts:,} prompts / actor.ppo_mini_batch_size {mini:,}"
            + ("" if config.actor.ppo_mini_batch_size else " (all)"),
            "" if prompts % mini == 0 else f"{prompts} is not a multiple of {mini}: the configuration is refused",
        ),
        Line("mini_batch_rows", mini_rows, "rows an optimizer step", f"{min(mini, prompts):,} prompts x rollout.n {n}"),
        _split("mini_batch_rows_per_dp_rank", mini_rows, dp_size, "rows an optimizer step and dp rank"),
        *_micro_lines(config, mini_rows, dp_size, token_ranks),
        Line(
            "optimizer_steps_per_step",
            minis * config.actor.ppo_epochs,
            "optimizer steps a global step",
            f"{minis:,} {'mini-batch' if minis == 1 else 'mini-batches'} x actor.ppo_epochs {config.actor.ppo_epochs}",
        ),
    ]
    return lines + _run_lines(config, num_rows, minis * config.actor.ppo_epochs, "prompts")


def sft_lines(config: RunConfig, dp_size: int, token_ranks: int, num_rows: int | None) -> list[Line]:
    """The lines of a supervised run: one optimizer step a global step."""
    rows = config.data.train_batch_size
    return [
        Line("rows", rows, "rows an optimizer step", "data.train_batch_size"),
        _split("mini_batch_rows_per_dp_rank", rows, dp_size, "rows an optimizer step and dp rank"),
        *_micro_lines(config, rows, dp_size, token_ranks),
        Line("optimizer_steps_per_step", 1, "optimizer steps a global step", "supervised fine-tuning"),
        *_run_lines(config, num_rows, 1, "rows"),
    ]


def pair_lines(config: RunConfig, dp_size: int, token_ranks: int, num_rows: int | None) -> list[Line]:
    """The lines of a run over pairs: a row for each side, read without gradients before the one optimizer step."""
    pairs = config.data.train_batch_size
    rows = 2 * pairs
    readers = ["the model", *(["the reference"] if config.needs_reference else [])]
    return [
        Line("pairs", pairs, "pairs an optimizer step", "data.train_batch_size"),
        Line("rows", rows, "rows an optimizer step", f"{pairs:,} pairs x 2 sides"),
        _split("mini_batch_rows_per_dp_rank", rows, dp_size, "rows an optimizer step and dp rank"),
        *_micro_lines(config, rows, dp_size, token_ranks),
        Line(
            "scoring_passes", len(readers), "passes without gradients a step", f"over all rows: {' and '.join(readers)}"
        ),
        Line("optimizer_steps_per_step", 1, "optimizer steps a global step", "of the pairs' mean loss"),
        *_run_lines(config, num_rows, 1, "pairs"),
    ]


def _split(key: str, rows: int, dp_size: int, unit: str) -> Line:
    note = ""
    if rows % dp_size:
        short, each = dp_size - rows % dp_size, rows // dp_size
        have = "rank has" if short == 1 else "ranks have"
        note = f"{rows:,} is not divisible by dp {dp_size:,}: {short:,} {have} {each:,}"
        if each == 0:
            note += ", that is a padding batch of zero weight"
    return Line(key, rows_a_rank(rows, dp_size), unit, f"{rows:,} / dp {dp_size:,}", note)


def _micro_lines(config: RunConfig, mini_rows: int, dp_size: int, token_ranks: int) -> list[Line]:
    bound, rows = micro_bound(config.actor, config, token_ranks), rows_a_rank(mini_rows, dp_size)
    count = bound.micro_batches(rows)
    if bound.max_rows is not None:
        how = f"{rows:,} rows / actor.micro_batch_size_per_device {bound.max_rows:,}"
        note = "" if rows % bound.max_rows == 0 else f"the last one has {rows % bound.max_rows:,} rows"
        return [
            Line(
                "micro_batch_rows", min(bound.max_rows, rows), "rows a micro-batch", "actor.micro_batch_size_per_device"
            ),
            Line("micro_batches", count, "micro-batches an optimizer step", how, note),
        ]
    assert bound.max_tokens is not None
    budget = bound.max_tokens // token_ranks
    given = "actor.max_tokens_per_device" if config.actor.max_tokens_per_device else "default tokens a device"
    times = f" x {token_ranks} ranks that share a row (usp x cp)" if token_ranks > 1 else ""
    fits = bound.rows_at_worst()
    return [
        Line("micro_batch_tokens", bound.max_tokens, "tokens a micro-batch at most", f"{given} {budget:,}{times}"),
        Line(
            "micro_batches",
            count,
            "micro-batches an optimizer step at worst",
            f"{rows:,} rows / {fits:,} rows of {bound.longest:,} tokens (max_prompt_length + max_response_length)",
            "fewer where rows are shorter; the count is agreed over dp",
        ),
    ]


def _run_lines(config: RunConfig, num_rows: int | None, optimizer_steps: int, unit: str) -> list[Line]:
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.total_training_steps is not None:
        steps: int | None = trainer.total_training_steps
        how = "trainer.total_training_steps"
    elif num_rows is None:
        steps, how = None, "the number of training rows is not known without reading them: rlctl data check counts"
    else:
        steps = max(1, num_rows // batch) * trainer.total_epochs
        how = f"{num_rows:,} training rows / {batch:,} {unit} a step, whole batches x trainer.total_epochs {trainer.total_epochs}"
    alone = config.critic.warmup_steps if config.critic else 0
    total = None if steps is None else max(0, steps - alone) * optimizer_steps
    counted = f"(global steps - critic.warmup_steps {alone:,})" if alone else "global steps"
    return [
        Line("global_steps", steps, "global steps of the run", how),
        Line("optimizer_steps", total, "optimizer steps of the run", f"{counted} x {optimizer_steps:,}"),
        *_critic_lines(config, steps),
    ]


def _critic_lines(config: RunConfig, steps: int | None) -> list[Line]:
    """The critic's optimizer steps; none without one."""
    critic, prompts = config.critic, config.data.train_batch_size
    if critic is None:
        return []
    mini = min(critic.ppo_mini_batch_size or config.actor.ppo_mini_batch_size or prompts, prompts)
    minis, epochs = -(-prompts // mini), critic.ppo_epochs or config.actor.ppo_epochs
    words = f"{minis:,} {'mini-batch' if minis == 1 else 'mini-batches'} x {epochs:,} {'epoch' if epochs == 1 else 'epochs'}"
    total = None if steps is None else steps * minis * epochs
    return [Line("critic_optimizer_steps", total, "optimizer steps of the critic", f"global steps x {words}")]


def warm_start_lines(config: RunConfig, dp_size: int, token_ranks: int) -> list[Line]:
    """The lines of the supervised steps before RL; empty without a ``warm_start`` section."""
    settings = config.warm_start
    if settings is None:
        return []
    bound = micro_bound(config.actor, config, token_ranks)
    rows = rows_a_rank(settings.batch_size, dp_size)
    return [
        Line("warm_start_steps", settings.steps, "supervised steps before RL, at most", "warm_start.steps"),
        Line("warm_start_rows", settings.batch_size, "rows of each", "warm_start.batch_size"),
        Line(
            "warm_start_micro_batches",
            bound.micro_batches(rows),
            "micro-batches of each at worst",
            f"{rows:,} rows a dp rank / {bound.rows_at_worst():,}",
        ),
    ]


def scored_tokens(config: RunConfig, tokens: int, rows: int) -> int:
    """The most tokens of one micro-batch whose logits are needed.

    In RL a row scores at most ``max_response_length`` of its tokens, in supervised runs all but its first.

    Args:
        tokens: of the micro-batch.
        rows: that it may consist of.
    """
    if config.trainer.type == "sft":
        return tokens - -(-tokens // longest_row(config))
    response = config.data.max_response_length
    return min(rows * response, tokens * response // (response + 1))
