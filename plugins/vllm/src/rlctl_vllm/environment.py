"""What vLLM takes from the environment of its process, set before its first import. Imports neither torch nor vllm.

A variable that the user set stays as it is, but for the one that decides in which process the engine lives.
"""

from __future__ import annotations

import os

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine lives in the rank's own process: weights are handed over without a copy, and an error is the error itself."""
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM would report its version and settings to its makers.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


CHANGES = {
    "process group": "an engine that ends leaves torch's process group to the rank",
    "set_num_threads": "torch.set_num_threads stays torch's own on a CPU",
}
"""What is changed of vLLM, or kept from being changed by it: name -> words. See :mod:`rlctl_vllm.compat`."""


def prepare(device: str) -> None:
    """Set them. Safe to call again; without effect on what vLLM has read already."""
    os.environ.update(IN_PROCESS)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if device.partition(":")[0] == "cpu":
        # Ranks of a pool share the host's cores, and a training engine may share the process: neither is tied to some cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
