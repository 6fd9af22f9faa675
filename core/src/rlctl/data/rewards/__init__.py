"""Rewards: a completion and its row to a number.

Built-in names are in :data:`rlctl.data.rewards.registry.BUILTIN`; plugins add names through ``rlctl_rewards``; a user
names a function as ``path/to/file.py:function``. Nothing is registered by an import.
"""

from rlctl.data.rewards.base import Reward, RewardContext, RewardInput, RewardResult
from rlctl.data.rewards.scorer import RewardScorer, build_reward

__all__ = ["Reward", "RewardContext", "RewardInput", "RewardResult", "RewardScorer", "build_reward"]
