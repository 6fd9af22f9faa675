"""What a run was: enough to repeat it, and nothing secret. Imports no torch.

:func:`build_manifest` lists the keys; a run adds ``name, ended, duration_s, metrics`` and, where they apply, ``error``,
``best`` and ``resumes``. Environment values are never written; arguments that look like credentials are replaced.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement

from rlctl import files, topology
from rlctl.config.algorithm_faults import algorithm_words
from rlctl.data.readers import split_files
from rlctl.data.rows import val_entries
from rlctl.device import Device, device_name, is_simulated
from rlctl.errors import DataError

if TYPE_CHECKING:
    from rlctl.config.load import ResolvedConfig
    from rlctl.config.schema import DataConfig, RolloutConfig, RunConfig
    from rlctl.plugins import PluginSet

SCHEMA = 1
REDACTED = "<redacted>"

# fmt: off
_DISTS = (
    "rlctl-core", "rlctl", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "numpy", "pydantic",
    "pluggy", "PyYAML", "packaging", "click", "rich", "pyarrow", "matplotlib", "math-verify", "reasoning-gym",
    "tensorboard", "wandb", "gguf", "datasets", "ray", "flash-attn", "triton", "torch-npu",
)
# fmt: on

# Shapes that are credentials wherever they stand: Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google, JWT.
_SECRET = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|xox[a-z]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_OPAQUE = re.compile(r"(?=[^\s]*[0-9])(?=[^\s]*[A-Za-z])[A-Za-z0-9+=]{32,}")
_SECRET_WORDS = {"token", "secret", "password", "passwd", "apikey", "credential", "credentials", "auth", "bearer"}
_SPECIAL_TOKENS = {"bos", "eos", "pad", "unk", "mask", "sep", "cls"}
_PUBLIC_HASHES = {"revision", "commit", "sha", "sha256", "hash", "checksum"}


def now() -> str:
    """The time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds_since(moment: object, until: float | None = None) -> float | None:
    """Seconds from a time that :func:`now` wrote until the unix time ``until`` (default: now); None for anything else."""
    if not isinstance(moment, str):
        return None
    try:
        start = datetime.fromisoformat(moment)
    except ValueError:
        return None
    return round((time.time() if until is None else until) - start.timestamp(), 3)


def typed_command() -> list[str]:
    """This process's command line, credentials replaced."""
    return redact([Path(sys.argv[0]).name, *sys.argv[1:]])


def redact(argv: Sequence[str]) -> list[str]:
    """``argv`` with everything that looks like a credential replaced.

    Known token shapes and logins inside addresses go wherever they stand; whole values go when their key says so
    (``--hf-token X``, ``wandb.api_key=X``) or when they are 32 or more opaque characters, except under a key such as
    ``revision``, whose hash is what makes a run repeatable.
    """
    out: list[str] = []
    key_before = ""
    for argument in argv:
        key, equals, value = argument.partition("=")
        if equals and re.fullmatch(r"[-\w.]+", key):
            out.append(f"{key}={_redact_value(key, value)}")
            key_before = ""
        elif argument.startswith("-"):
            out.append(_SECRET.sub(REDACTED, argument))
            key_before = argument
        else:
            out.append(_redact_value(key_before, argument))
            key_before = ""
    return out


def _redact_value(key: str, value: str) -> str:
    words = set(re.split(r"[-_.]+", key.lower().strip("-")))
    secret = words & _SECRET_WORDS or {"api", "key"} <= words or {"access", "key"} <= words
    if value and secret and not ("token" in words and words & _SPECIAL_TOKENS):
        return REDACTED
    if not words & _PUBLIC_HASHES and _OPAQUE.fullmatch(value):
        return REDACTED
    return _URL_LOGIN.sub(f"{REDACTED}@", _SECRET.sub(REDACTED, value))


def versions() -> dict[str, str]:
    """Versions of the dists that can change a run's numbers, of those that carry an rlctl plugin, and of what they need."""
    names = {name.lower(): name for name in _DISTS}
    for entry in metadata.entry_points(group="rlctl.plugins"):
        if entry.dist is not None:
            names.setdefault(entry.dist.name.lower(), entry.dist.name)
            for line in entry.dist.requires or ():
                with suppress(InvalidRequirement):
                    required = Requirement(line).name
                    names.setdefault(required.lower(), required)
    found: dict[str, str] = {}
    for name in names.values():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, branch and dirty flag of the repository around ``directory``; None when there is none.

    Untracked files do not make it dirty: the run directory itself is often one of them.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(directory), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


def hash_files(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Path, size in bytes and sha256 of each file.

    Raises:
        DataError: a file cannot be read.
    """
    out = []
    for path in paths:
        try:
            out.append({"path": str(path), "bytes": path.stat().st_size, "sha256": files.sha256(path)})
        except OSError as error:
            raise DataError(
                f"the data file {path} cannot be read", found=str(error), next="rlctl data check FILE"
            ) from error
    return out


def guards_record(config: RunConfig) -> dict[str, Any]:
    """``off``: names of guards that were switched off; ``changed``: settings that are not the default; ``inactive``:
    guards that are on and cannot look, with the reason."""
    default = type(config.guards)()
    given = config.guards.model_dump()
    inactive: dict[str, str] = {}
    if config.trainer.type == "rl" and given["rollout_logprob_check"] and (why := filtered_sampling(config.rollout)):
        inactive["rollout_logprob_check"] = why
    return {
        "off": sorted(name for name, value in given.items() if value is False),
        "changed": {n: v for n, v in given.items() if v is not False and v != getattr(default, n)},
        "inactive": inactive,
    }


def filtered_sampling(rollout: RolloutConfig) -> str | None:
    """Why the probabilities of sampled tokens are not the model's own, so that the trainer's cannot be compared with
    them; None when they are."""
    settings = [f"rollout.top_p={rollout.top_p:g}"] if rollout.top_p < 1 else []
    settings += [f"rollout.top_k={rollout.top_k}"] if rollout.top_k else []
    return f"{' and '.join(settings)}: the rollout samples from a part of the distribution" if settings else None


def process_record() -> dict[str, Any]:
    """Which process this is, so that a later reader can tell a running run from one that died."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": _start_ticks(os.getpid())}


def process_is_alive(record: Any) -> bool | None:
    """Whether the recorded process still runs; None when that cannot be known (another host, no record)."""
    if not isinstance(record, dict) or record.get("host") != socket.gethostname():
        return None
    pid = record.get("pid")
    if not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and another user's
    ticks = record.get("start_ticks")
    return ticks is None or _start_ticks(pid) in (None, ticks)  # another start time: the number was given away again


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])  # field 22 of proc(5); the name before it may hold spaces


def _data_files(data: DataConfig, base_dir: Path) -> list[Path]:
    """The files of both splits, directories expanded; ``hf:`` entries have no file here."""

    def placed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n if n.startswith("hf:") else str(base_dir / Path(n).expanduser()) for n in names)

    data = data.model_copy(update={"train_files": placed(data.train_files), "val_files": placed(data.val_files)})
    names = [*split_files(data.train_files, "train"), *split_files(val_entries(data), "val")]
    return [Path(name) for name in names if not name.startswith("hf:")]


def build_manifest(
    resolved: ResolvedConfig,
    plugins: PluginSet | None = None,
    *,
    device: Device,
    argv: Sequence[str] | None = None,
    cwd: Path | None = None,
) -> dict[str, Any]:
    """The manifest of a run that is about to start.

    Args:
        resolved: the configuration and where its values came from.
        plugins: recorded with their versions and states.
        device: where it runs.
        argv: command line as typed; credentials in it are replaced. Default: this process's.
        cwd: where it was typed; its git state is recorded. Default: the current directory.

    Raises:
        DataError: a data file cannot be read.
        CapabilityError: the parallel axes do not fit the number of processes.
    """
    config = resolved.config
    cwd = Path.cwd() if cwd is None else cwd
    clean = typed_command() if argv is None else redact(argv)
    data_files = _data_files(config.data, resolved.base_dir)
    task = config.data.task
    training = {
        "actor": topology.resolve(config.runtime.sizes()[config.actor.pool], config.actor.parallel.model_dump())
    }
    seeds = {"trainer": config.trainer.seed}
    if task is not None:
        seeds["task"] = task.seed
    return {
        "schema": SCHEMA,
        "status": "running",
        "kind": config.trainer.type,
        "recipe": Path(resolved.source).stem,
        "source": resolved.source,
        "model": config.model.path or f"random {(config.model.config or {}).get('model_type', 'model')}",
        "task": task.name if task is not None else ", ".join(path.name for path in data_files),
        "algorithm": algorithm_words(config) if config.trainer.type == "rl" else config.trainer.type,
        "backend": config.actor.backend,
        "rollout": config.rollout.backend if config.trainer.type == "rl" else None,
        "command": clean,
        "command_line": shlex.join(clean),
        "cwd": str(cwd),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "process": process_record(),
        "versions": versions(),
        "plugins": [
            {"name": e.name, "dist": e.dist, "version": e.version, "status": str(e.status)}
            for e in (plugins.entries if plugins is not None else ())
        ],
        "git": git_state(cwd),
        "seeds": seeds,
        "data": hash_files(list(dict.fromkeys(data_files))),
        "topology": {role: asdict(axes) for role, axes in training.items()},
        "device": {
            "type": device.type,
            "vendor": device.vendor,
            "name": device_name(device),
            "simulated": is_simulated(device),
        },
        "guards": guards_record(config),
        "origins": {key: " ".join(redact(text.split(" "))) for key, text in resolved.origins.items()},
        "started": now(),
        "ended": None,
        "duration_s": None,
        "metrics": {},
    }
