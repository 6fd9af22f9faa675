"""Components to scores: the weighted sum, with every value checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.config.schema_reward import component_name
from rlctl.data.columns import Row
from rlctl.data.faults import excerpt, type_name
from rlctl.data.finite import LARGEST, as_float
from rlctl.data.procedural import REASONING_GYM
from rlctl.data.rewards.base import Reward, RewardContext, RewardInput, RewardResult
from rlctl.data.rewards.registry import build_component
from rlctl.errors import DataError
from rlctl.generation import Conversation

if TYPE_CHECKING:
    from rlctl.config.schema import RewardConfig
    from rlctl.plugins import PluginSet


class RewardScorer:
    """Scores completions. Built by :func:`build_reward`; close it at the end (it may own processes).

    Args:
        components: (name, weight, reward) of each, names all different.
        sources: values of ``data_source`` that a component is for, by its name; one that is not here is for every row.
    """

    def __init__(
        self, components: Sequence[tuple[str, float, Reward]], sources: Mapping[str, Collection[str]] | None = None
    ) -> None:
        assert components, "RewardConfig has at least one component by default"
        self.components = tuple(components)
        self.sources = {name: frozenset(of) for name, of in (sources or {}).items() if of}

    def scores(self, name: str, row: Row) -> bool:
        """True when the component ``name`` is for this row."""
        return name not in self.sources or row.data_source in self.sources[name]

    def score(
        self,
        rows: Sequence[Row],
        texts: Sequence[str],
        finish_reasons: Sequence[str],
        num_tokens: Sequence[int],
        conversations: Sequence[Conversation | None] | None = None,
    ) -> list[RewardResult]:
        """One result a completion; ``rows[i]`` is the row that completion ``i`` answers.

        Raises:
            DataError: a row lacks what a reward needs, a user's function fails, or a value is not a finite number that float32
                holds.
        """
        items = [
            RewardInput(row, text, str(reason), count, conversation)
            for row, text, reason, count, conversation in zip(
                rows, texts, finish_reasons, num_tokens, conversations or [None] * len(texts), strict=True
            )
        ]
        for name, _, reward in self.components:
            prepare = getattr(reward, "prepare", None)
            if prepare is not None:
                prepare([item for item in items if self.scores(name, item.row)])
        return [self.score_one(item) for item in items]

    def score_one(self, item: RewardInput) -> RewardResult:
        """The result of one completion; see :meth:`score`."""
        total = 0.0
        values: dict[str, float] = {}
        for name, weight, reward in self.components:
            if not self.scores(name, item.row):
                continue
            value = reward(item)
            if isinstance(value, Mapping):
                for key, extra in value.items():
                    if key != "score":
                        values[f"{name}/{key}"] = _number(extra, f"{name}/{key}", item)
                value = value["score"]
            values[name] = _number(value, name, item)
            total += weight * values[name]
        if not values:
            raise DataError(
                f"no reward is for {item.row.source} (row {item.row.index})",
                found=f"data_source {item.row.data_source!r}",
                next="add it to the sources of one of reward.components",
            )
        if not abs(total) <= LARGEST:
            raise DataError(
                f"the weighted sum of reward.components is too large for {item.row.source} (row {item.row.index})",
                found=f"{total:g} of {', '.join(f'{name} {values[name]:g} x {w:g}' for name, w, _ in self.components if name in values)}",
                wanted=f"at most {LARGEST:.1e}, the largest float32",
                next="lower the weight of a component, or bring its values to a common scale",
            )
        return RewardResult(total, values)

    def close(self) -> None:
        """End the worker processes of the components."""
        for _, _, reward in self.components:
            close = getattr(reward, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def build_reward(config: RewardConfig, plugins: PluginSet | None, base_dir: Path) -> RewardScorer:
    """Build every component. Paths of user functions are relative to ``base_dir``.

    Rows of ``reasoning_gym:NAME`` tasks are scored by the task's own function when ``reward.components`` is left at its
    default.

    Raises:
        ConfigError: a component is unknown or misconfigured.
        DataError: a user's function cannot be loaded.
    """
    if not config.components:
        raise DataError("reward.components is empty", next="reward.components=[{name: exact_match}]")
    context = RewardContext(config.timeout_s, base_dir)
    built: list[tuple[str, float, Reward]] = []
    sources: dict[str, tuple[str, ...]] = {}
    try:
        for number, component in enumerate(config.components):
            reward = build_component(component, f"reward.components[{number}]", context, plugins)
            name = component_name(component.name, [name for name, _, _ in built])
            built.append((name, component.weight, reward))
            sources[name] = component.sources
    except BaseException:
        if built:
            RewardScorer(built).close()
        raise
    if "components" not in config.model_fields_set:
        name, weight, default = built[0]
        built[0] = (name, weight, _OwnScorer(default, context))
    return RewardScorer(built, sources)


class _OwnScorer(Reward):
    """The default reward, except for rows that bring a scorer of their own."""

    def __init__(self, default: Reward, context: RewardContext) -> None:
        self.compares = default.compares
        self._default = default
        self._context = context
        self._gym: Reward | None = None

    def __call__(self, item: RewardInput) -> float | Mapping[str, float]:
        if not item.row.data_source.startswith(REASONING_GYM):
            return self._default(item)
        if self._gym is None:
            from rlctl.data.rewards.gym import reasoning_gym

            self._gym = reasoning_gym(context=self._context)
        return self._gym(item)

    def close(self) -> None:
        close = getattr(self._gym, "close", None)
        if close is not None:
            close()


def _number(value: object, name: str, item: RewardInput) -> float:
    if isinstance(value, (bool, int, float)):
        number = as_float(value)
        if abs(number) <= LARGEST:
            return number
        if math.isfinite(number) or isinstance(value, int):
            raise DataError(
                f"the reward {name!r} is too large for {item.row.source} (row {item.row.index})",
                found=f"{number:g}",
                wanted=f"at most {LARGEST:.1e}, the largest float32",
                next="correct the reward: bring its values to the scale of the others",
            )
    raise DataError(
        f"the reward {name!r} gave no finite number for {item.row.source} (row {item.row.index})",
        found=f"{type_name(value)}: {excerpt(value)}",
        wanted="a finite float",
        next="correct the reward, so that it returns a number for every completion",
    )
