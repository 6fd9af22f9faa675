"""Foreign imports in a child process each: what it raises, prints, or dies of costs nothing here."""

from rlctl.probing.parent import Outcome, Task, run_probes

__all__ = ["Outcome", "Task", "run_probes"]
