"""Warnings of megatron-core that tell a user nothing: what they speak of was chosen here, or is megatron-core's own matter.

Importing this module imports neither torch nor megatron-core.
"""

from __future__ import annotations

import warnings

KNOWN: tuple[tuple[str, type[Warning], str], ...] = (
    # Its optimizer and layers without Apex and Transformer Engine are the ones that this backend takes.
    (r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning, r"megatron\.core\."),
    # A default of its own that it complains of; no CUDA graph is captured.
    (r"full scope is deprecated. Use empty cuda_graph_scope", UserWarning, r"megatron\.core\."),
    # How its checkpoints are written, read by the version that wrote them.
    (r"`load_state_dict` is deprecated", FutureWarning, r"megatron\.core\.dist_checkpointing\."),
    (r"Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning, r"torch\.distributed\."),
)
"""(start of the text, category, start of the module that it points at)."""


def silence() -> None:
    """Leave those out, and no others, from now on in this process; safe to call again."""
    for message, category, module in KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
