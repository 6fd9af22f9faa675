"""Giving memory back between rollouts. vLLM's sleep works on a GPU only; here its calls are held against vLLM's own signatures."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest.mock import call, create_autospec

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed (it has an environment of its own)", allow_module_level=True)

from vllm import LLM

from rlctl_vllm.config import VLLMConfig
from rlctl_vllm.engine import VLLMRollout


def engine(device: str, *, enabled: bool) -> tuple[VLLMRollout, Any]:
    made = VLLMRollout()
    made.settings = VLLMConfig(enable_sleep_mode=enabled)
    made.device = torch.device(device)
    llm = create_autospec(LLM, instance=True)
    made.llm, made._names = llm, create_autospec(object)
    return made, llm


def test_weights_and_cache_go_together_and_come_back_apart() -> None:
    made, llm = engine("cuda", enabled=True)
    assert made.rlctl_release(parts=("weights", "kv")) is True
    assert made.rlctl_resume(parts=("weights",)) is True
    assert made.rlctl_resume(parts=("kv",)) is True
    assert llm.mock_calls == [call.sleep(level=1), call.wake_up(tags=["weights"]), call.wake_up(tags=["kv_cache"])]
    assert made.rlctl_release(parts=("kv",)) is False, "vLLM cannot give back one of the two"


@pytest.mark.parametrize(("device", "enabled"), [("cpu", True), ("cuda", False)])
def test_where_nothing_can_be_freed_it_says_so(device: str, enabled: bool) -> None:
    made, llm = engine(device, enabled=enabled)
    assert made.rlctl_release(parts=("weights", "kv")) is False
    made.rlctl_resume(parts=("weights", "kv"))
    assert llm.mock_calls == []
