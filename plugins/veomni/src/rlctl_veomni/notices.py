"""VeOmni's own words: it logs every step of a build to stdout, where a program may read rlctl's JSON, and draws bars of progress
through those of the command line.

Importing this module imports neither torch nor veomni.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VERBOSITY = "VEOMNI_VERBOSITY"
QUIET = "ERROR"


def silence() -> None:
    """Errors only, unless the user asked for more; before the first import of veomni. Safe to call again."""
    os.environ.setdefault(VERBOSITY, QUIET)


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, a model is built and filled without bars of progress, and without transformers' complaint of how VeOmni calls it."""
    from transformers.utils import logging

    loader: Any = importlib.import_module("veomni.models.module_utils")
    bar, verbosity = loader.tqdm, logging.get_verbosity()
    loader.tqdm = lambda items, **_: items
    logging.set_verbosity_error()
    try:
        yield
    finally:
        loader.tqdm = bar
        logging.set_verbosity(verbosity)
