"""What is wrong with another interpreter, in words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rlctl import __version__
from rlctl.catalogue import find
from rlctl.causes import Cause
from rlctl.errors import RlctlError
from rlctl.records import API_VERSION, BackendKind
from rlctl.remedy import for_library

OLDEST = (3, 11)
_PIP = re.compile(r"\bpip (?=install|uninstall)")


class InterpreterError(RlctlError):
    """A role cannot run in the interpreter that it names."""


def no_python(python: str, found: str) -> InterpreterError:
    """It does not answer."""
    return InterpreterError(
        f"{python} does not answer as a Python interpreter does",
        found=found,
        wanted=f"Python {_dotted(OLDEST)} or newer, with rlctl in it",
        next=f"{shlex.quote(python)} --version shows what it is",
    )


def too_old(python: str, version: Sequence[int]) -> InterpreterError:
    return InterpreterError(
        f"{python} is too old for rlctl",
        found=f"Python {_dotted(version)}",
        wanted=f"Python {_dotted(OLDEST)} or newer",
        next="make the environment again with a newer Python: python3.12 -m venv DIRECTORY",
    )


def no_rlctl(python: str, causes: Sequence[str], backend: tuple[str, BackendKind] | None) -> InterpreterError:
    """rlctl does not import there.

    Args:
        backend: what is wanted of it, for the command that brings both.
    """
    return InterpreterError(
        f"{python} has no rlctl",
        details=_told(causes),
        found=causes[-1] if causes else None,
        wanted=f"rlctl {__version__}, as here",
        next=install(python, backend),
    )


def broken_rlctl(python: str, causes: Sequence[Cause]) -> InterpreterError:
    """Its rlctl is ours and does not work."""
    mend = for_library(causes) or f"pip install --force-reinstall 'rlctl-core=={__version__}'"
    return InterpreterError(
        f"the rlctl of {python} does not work",
        details=chain(causes),
        found=causes[-1].line,
        wanted="rlctl with everything that it requires",
        next=there(mend, python),
    )


def chain(causes: Sequence[Cause]) -> list[str]:
    """One line a cause, outermost first."""
    return _told([cause.line for cause in causes])


def _told(lines: Sequence[str]) -> list[str]:
    return [f"because {line}" if i else line for i, line in enumerate(lines)]


def other_version(python: str, version: str, api: Sequence[int]) -> InterpreterError:
    return InterpreterError(
        f"the rlctl of {python} is another version than the one that is run here",
        found=f"rlctl {version} (hook API {_dotted(api)})",
        wanted=f"rlctl {__version__} (hook API {_dotted(API_VERSION)}): what travels between them are its records",
        next=there(f"pip install 'rlctl-core=={__version__}'", python),
    )


def install(python: str, backend: tuple[str, BackendKind] | None) -> str:
    """The command that brings a backend to an interpreter."""
    entry = None if backend is None else find(*backend)
    command = f"pip install 'rlctl-core=={__version__}'" if entry is None else entry.install
    return there(command, python)


def there(command: str, python: str) -> str:
    """A command of this environment as one of the other."""
    typed = shlex.quote(python)
    command = _PIP.sub(lambda found: f"{typed} -m pip ", command)
    return command.replace("rlctl doctor", f"rlctl doctor --python {typed}")


def told_there(error: RlctlError, python: str) -> None:
    """Make ``error`` one of another interpreter: it says which, and what to do is done there."""
    if python not in error.what:
        error.what = f"{error.what}, in {python}"
    error.next = None if error.next is None else there(error.next, python)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
