"""The Ray cluster of one run: this process starts it on the host's loopback and ends it with the run.

It waits beside the controller in a session of its own, so that signals to the controller's process group (Ctrl-C in a
terminal, ``kill -- -GROUP``) do not take the cluster from under a controller that has an end to write down. The stop signals
that a scheduler sends to every process are blocked here and, by inheritance, in all of Ray; ranks get them back. When the
controller closes its end of standard input, or is gone however that came about, everything here ends at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

from rlctl.interrupts import STOP_SIGNALS
from rlctl.runtime import ray_sweep

OWN_CPUS = 1024
"""CPUs that the cluster declares: there they limit nothing, as with processes."""


def quiet() -> None:
    """What Ray prints about ranks that die, to stdout, is said by our own errors, and stdout may be one JSON object."""
    from ray._private import worker

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    worker._worker_logs_enabled = False


def start(directory: str) -> str:
    """Start the cluster with its files in ``directory``; returns its address.

    Raises:
        Exception: whatever Ray raises.
    """
    import ray
    from ray._private import ray_constants

    quiet()
    # Read from the environment when Ray was imported. Without it Ray takes the loopback as its address, as it does by
    # default on other systems than Linux.
    ray_constants.ENABLE_RAY_CLUSTER = False
    context: Any = ray.init(
        address="local",
        num_cpus=max(OWN_CPUS, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=directory,
    )
    return context.address_info["gcs_address"]


def main(directory: str, controller: int) -> None:
    """Start, say where (or what went wrong) as one line of JSON, wait, sweep."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        try:
            said = {"address": start(directory)}
        except Exception as error:  # Ray has no class of its own for what can go wrong here
            said = {"error": " ".join(str(error).split())}
        print(json.dumps(said), flush=True)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads on
        sys.stdin.buffer.read()
    finally:
        ray_sweep.sweep(directory, controller)
        os._exit(0)  # what Ray would do at the end is done


if __name__ == "__main__":
    _directory, _controller = sys.argv[1:]
    main(_directory, int(_controller))
