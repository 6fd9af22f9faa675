"""The vllm rollout under the suite that every rollout backend must pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed (rlctl-plugin-vllm; it has an environment of its own)")

import vllm_tiny as tiny

from rlctl.testing import RolloutConformance


class TestLlama(RolloutConformance):
    backend = "vllm"
    model: ClassVar[Mapping[str, Any]] = {"config": tiny.LLAMA}
    settings: ClassVar[Mapping[str, Any]] = {"kv_cache_mib": 32}
    vocab_size = 35
    fresh_engine = False

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return tiny.weights_of(tiny.hf_model(self.model["config"], seed))


class TestTiedQwen2(TestLlama):
    """A tied head, and biases."""

    model: ClassVar[Mapping[str, Any]] = {"config": tiny.QWEN2_TIED}


class TestQwen3Moe(TestLlama):
    """Experts, whose weights come as whole tensors of a layer, and norms of queries and keys."""

    model: ClassVar[Mapping[str, Any]] = {"config": tiny.QWEN3_MOE}
