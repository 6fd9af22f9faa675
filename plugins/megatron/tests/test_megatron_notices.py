"""What of megatron-core's warnings reaches a user."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest

from rlctl_megatron import notices

IMPORTED = """
import json, warnings
from pathlib import Path
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import rlctl_megatron.engine
def name(file):
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[parts.index("site-packages") + 1:]) if "site-packages" in parts else "__main__"
print(json.dumps([[str(w.message), w.category.__name__, name(w.filename)] for w in seen]))
"""


def shown(message: str, category: type[Warning], module: str) -> bool:
    """Whether such a warning gets through."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        notices.silence()
        warnings.warn_explicit(message, category, "file.py", 1, module=module)
    return bool(seen)


def test_importing_the_engine_warns_of_nothing_that_is_not_known() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=240, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    # Python shows neither of these outside of __main__ and pytest.
    seen = [w for w in seen if w[1] not in ("DeprecationWarning", "PendingDeprecationWarning")]
    assert [w for w in seen if "Apex" in w[0]], "without Apex it warns, so there is something to leave out"
    assert [w for w in seen if shown(w[0], getattr(__import__("builtins"), w[1], UserWarning), w[2])] == []


@pytest.mark.parametrize(
    ("message", "category", "module"),
    [
        ("Apex is not installed. Falling back", UserWarning, "another.package"),
        ("Apex is not installed. Falling back", RuntimeWarning, "megatron.core.optimizer"),
        ("loss is not finite", UserWarning, "megatron.core.optimizer"),
        ("`load_state_dict` is deprecated", FutureWarning, "torch.optim.adamw"),
    ],
)
def test_other_warnings_get_through(message: str, category: type[Warning], module: str) -> None:
    assert shown(message, category, module)


def test_what_is_known_does_not_get_through() -> None:
    assert not shown("Apex is not installed. Falling back", UserWarning, "megatron.core.optimizer")
    text = "Please use DTensor instead and we are deprecating ShardedTensor."
    assert not shown(text, FutureWarning, "torch.distributed.checkpoint.planner_helpers")
