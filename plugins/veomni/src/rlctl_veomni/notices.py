"""VeOmni's own words: it logs every step of a build to stdout, where a program may read rlctl's JSON, and draws bars of progress
through those of the command line.

Importing this module imports neither torch nor veomni.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

VERBOSITY = "VEOMNI_VERBOSITY"
QUIET = "ERROR"
_UNDOCUMENTED = re.compile(r"\[ERROR\] `.*` is part of .*, but not documented\.")
"""transformers prints it to stdout of classes that others derive from its own, VeOmni's models among them."""


class _WithoutDocstrings:
    """A stream that leaves those lines out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left_out = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # print writes the line's end by itself.
        if _UNDOCUMENTED.match(text) or (self._left_out and text == "\n"):
            self._left_out = text != "\n"
            return len(text)
        self._left_out = False
        return self._stream.write(text)


def silence() -> None:
    """Errors only, unless the user asked for more, also where veomni was imported before. Safe to call again."""
    logging.getLogger("veomni").setLevel(os.environ.setdefault(VERBOSITY, QUIET))


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, a model is built and filled without bars of progress, and without transformers' complaints of VeOmni's code."""
    from transformers.utils import logging as words

    loader: Any = importlib.import_module("veomni.models.module_utils")
    bar, verbosity = loader.tqdm, words.get_verbosity()
    loader.tqdm = lambda items, **_: items
    words.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(_WithoutDocstrings(sys.stdout)):  # type: ignore[type-var]
            yield
    finally:
        loader.tqdm = bar
        words.set_verbosity(verbosity)
