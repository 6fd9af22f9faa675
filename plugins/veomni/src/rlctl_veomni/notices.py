"""VeOmni's own words: it logs every step of a build to stdout, where a program may read rlctl's JSON.

Importing this module imports neither torch nor veomni.
"""

from __future__ import annotations

import os

VERBOSITY = "VEOMNI_VERBOSITY"
QUIET = "ERROR"


def silence() -> None:
    """Errors only, unless the user asked for more; before the first import of veomni. Safe to call again."""
    os.environ.setdefault(VERBOSITY, QUIET)
