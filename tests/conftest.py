"""Shared by the tests that cross distributions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Modules next to the tests, which importlib import mode does not find.
sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

LONGEST = (
    "test_verify_megatron.py",
    "test_runtime_same_metrics.py",
    "test_distillation_same_curve.py",
    "test_verify_fsdp2.py",
    "test_megatron_same_metrics.py",
    "test_train_ranks.py",
    "test_docs_write_a_plugin.py",
)
"""A file runs on one worker: the longest start first, so that no worker waits at the end for another's long file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
