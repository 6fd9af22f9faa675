"""The child's side of a probe in another interpreter. Started as a file by a Python that nothing is known of, so it is written
in what every Python 3 reads, and imports the standard library alone until the rlctl there is known to be ours.

Argument: a directory with ``task.json``, as :mod:`rlctl.probing.child` has it. ``result.json`` says first who answers:
``python`` (its version), ``executable``, ``prefix``, then ``rlctl`` and ``api`` or, where it does not import, ``missing`` (the
chain of causes, one line each). Only with the same rlctl and hook API as the parent's is the task done; its result is
``answer``.
"""

import json
import os
import sys


def main(directory: str) -> None:
    # As with -P: this file's own directory holds no module that anybody may import.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    with open(os.path.join(directory, "task.json")) as file:
        task = json.load(file)
    said = {"python": list(sys.version_info[:3]), "executable": sys.executable, "prefix": sys.prefix}
    try:
        if sys.version_info >= (3, 11):  # noqa: UP036
            _ask(task, said, directory)
    finally:
        _write(directory, "result", json.dumps(said))


def _ask(task: dict, said: dict, directory: str) -> None:
    _write(directory, "step", "importing rlctl")
    try:
        import rlctl
        from rlctl.records import API_VERSION
    except BaseException as error:
        said["missing"] = _causes(error)
        return
    said["rlctl"], said["api"] = rlctl.__version__, list(API_VERSION)
    if said["rlctl"] == task["version"] and said["api"] == task["api"]:
        from rlctl.probing import child

        said["answer"] = child.act(task, directory)


def _causes(error: "BaseException | None") -> list:
    lines = []
    while error is not None and len(lines) < 20:
        lines.append("%s: %s" % (type(error).__name__, error))  # noqa: UP031
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return lines


def _write(directory: str, name: str, text: str) -> None:
    """A whole file at a time: the parent may read it at any moment."""
    beside = os.path.join(directory, name + ".tmp")
    with open(beside, "w") as file:
        file.write(text)
    os.replace(beside, os.path.join(directory, name + (".json" if name == "result" else "")))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    # Leave at once: a library's atexit handler that hangs or crashes is not what was asked about.
    os._exit(0)
