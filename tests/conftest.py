"""Shared by the tests that cross distributions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Modules next to the tests, which importlib import mode does not find.
sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
