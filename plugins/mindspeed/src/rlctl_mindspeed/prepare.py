"""The one place where MindSpeed changes this process: its adaptor, before megatron-core is imported.

``mindspeed.megatron_adaptor`` replaces functions in megatron-core's modules when it is imported. Whoever had taken a name out of
one of them before goes on with the unpatched function, and nothing says so: the ranks of a run would compute with a mixture. So a
process in which megatron-core is there already, and MindSpeed is not, is refused. Every rank that a launcher starts is a fresh
process, in which this comes first.

Importing this module imports neither torch nor megatron-core.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from rlctl import extensions
from rlctl.causes import cause_chain
from rlctl.errors import BackendUnavailableError
from rlctl_megatron.notices import silence

ADAPTOR = "mindspeed.megatron_adaptor"
_asked: dict[str, Any] = {}
"""The arguments that the features of this process were switched with."""


def prepare(config: Mapping[str, Any]) -> None:
    """Load Ascend's extension of torch, then MindSpeed's patches; safe to call again.

    Args:
        config: the ``engine`` section; its ``mindspeed_args`` go to MindSpeed.

    Raises:
        BackendUnavailableError: torch_npu does not load, megatron-core was imported before, or another engine of this process
            asked MindSpeed for other features.
        ImportError: MindSpeed does not load; whoever called shows the chain.
    """
    silence()
    require_torch_npu()
    if ADAPTOR not in sys.modules:
        _require_first()
        _import_adaptor()
    _switch(dict(config.get("mindspeed_args") or {}))


def require_torch_npu() -> None:
    """Import it.

    Raises:
        BackendUnavailableError: it is not installed or does not load, with the whole chain.
    """
    if extensions.load("npu"):
        return
    error = extensions.why_not("npu")
    if error is None:
        raise BackendUnavailableError(
            "torch_npu is not installed, so torch knows no device npu",
            found="no module torch_npu",
            wanted="the torch-npu that fits the installed torch, and CANN",
            next="rlctl doctor mindspeed",
        )
    lines = [f"because {c.line}" if i else c.line for i, c in enumerate(cause_chain(error))]
    raise BackendUnavailableError(
        "torch_npu is installed and does not load",
        details=lines,
        found=cause_chain(error)[-1].line,
        wanted="CANN's libraries on the loader's path, and the driver",
        next="source /usr/local/Ascend/ascend-toolkit/set_env.sh, or rlctl doctor mindspeed",
    ) from error


def _require_first() -> None:
    early = sorted(m for m in sys.modules if m == "megatron.core" or m.startswith("megatron.core."))
    if early:
        raise BackendUnavailableError(
            "megatron-core was imported in this process before MindSpeed could patch it",
            found=f"{len(early)} of its modules are loaded, and {ADAPTOR} is not",
            wanted="MindSpeed's patches before the first import of megatron.core",
            next="run it in a process of its own (runtime.launcher=process), and import nothing of megatron-core before",
        )


def _import_adaptor() -> None:
    """MindSpeed reads its settings from the command line as it is imported: this process's own is none of its business."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        importlib.import_module(ADAPTOR)
    finally:
        sys.argv = arguments


def _switch(wanted: dict[str, Any]) -> None:
    if wanted == _asked:
        return
    if _asked:
        raise BackendUnavailableError(
            "MindSpeed's features are those of a process, and another engine here asked for others",
            found=f"{wanted} beside {_asked}",
            wanted="the same engine.mindspeed_args for every role of a pool",
            next="give the role a pool of its own (runtime.pools and its pool setting)",
        )
    repatch = getattr(sys.modules[ADAPTOR], "repatch", None)
    if repatch is None:
        raise BackendUnavailableError(
            "this MindSpeed cannot be told which features to switch",
            found=f"engine.mindspeed_args, and no {ADAPTOR}.repatch",
            wanted="no engine.mindspeed_args, or a MindSpeed of core_r0.12.1",
            next="leave actor.engine.mindspeed_args out",
        )
    repatch(dict(wanted))
    _asked.update(wanted)
