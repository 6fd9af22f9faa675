"""Makes the helpers next to the tests importable under importlib import mode, and the light module where the dist is not installed:
the base environment has no vllm, and the record, settings and refusals are tested there too."""

import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
if importlib.util.find_spec("rlctl_vllm") is None:
    source = str(HERE.parent / "src")
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
