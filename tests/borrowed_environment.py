"""A virtual environment of its own that borrows the packages of this one: another interpreter, with the same numbers."""

from __future__ import annotations

import site
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

_WITHOUT = '''
import sys


class Absent:
    """These packages are not installed here."""

    names = frozenset({names!r})

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
'''


def borrowed(home: Path, without: Sequence[str] = ()) -> Path:
    """Make it in ``home``; returns its interpreter.

    Args:
        without: packages of this environment that it does not have.
    """
    venv.create(home, symlinks=True, with_pip=False)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    places = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (own / "borrowed.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in places))
    (own / "sitecustomize.py").write_text(_WITHOUT.format(names=list(without)))
    return home / "bin" / "python"
