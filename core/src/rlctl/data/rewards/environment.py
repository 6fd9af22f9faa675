"""The reward environment: the sum of a conversation's turns, and the numbers that the environment has given with it."""

from __future__ import annotations

from collections.abc import Mapping

from rlctl.data.rewards.base import RewardInput
from rlctl.errors import DataError


class EnvironmentReward:
    """See the module. A conversation whose environment failed gets 0."""

    compares = False
    of_conversations = True
    """Nothing that a row says of itself can be scored."""

    def __call__(self, item: RewardInput) -> Mapping[str, float]:
        if item.conversation is None:
            raise DataError(
                f"{item.row.source} (row {item.row.index}) was no conversation, so no environment has rewarded it",
                next="set rollout.environment, or take the component environment out of reward.components",
            )
        return {**item.conversation.metrics, "score": item.conversation.reward}


def environment() -> EnvironmentReward:
    """The sum of the turns' rewards."""
    return EnvironmentReward()
