"""Rewards by ``data_source``: every row has one, and every source that is named has rows."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.config.schema_reward import RewardConfig
from rlctl.data.columns import Row
from rlctl.data.faults import listing, nearest
from rlctl.errors import DataError


def require_sources(config: RewardConfig, rows: Sequence[Row]) -> None:
    """Compare the sources that the ``reward`` section names with those of the rows (training and validation together).

    Raises:
        DataError: a named source has no rows, or rows of a source have no reward.
    """
    named = {s: f"reward.components[{i}].sources" for i, c in enumerate(config.components) for s in c.sources}
    named |= dict.fromkeys(config.source_weights, "reward.source_weights")
    if not named:
        return
    there = {row.data_source for row in rows}
    for source, place in named.items():
        if source not in there:
            near = nearest(source, there)
            raise DataError(
                f"no row has the data_source {source!r}, which {place} names",
                found=listing(sorted(there)),
                wanted=f"did you mean {near!r}?" if near else "one of these",
                next=f"correct {place}, or set data.columns.data_source",
            )
    if all(component.sources for component in config.components):
        scored = {source for component in config.components for source in component.sources}
        if left := sorted(there - scored):
            raise DataError(
                f"rows of data_source {listing(left)} have no reward",
                found=f"reward.components score {listing(sorted(scored))}",
                next=f"add {left[0]} to the sources of a component, or a component without sources",
            )
