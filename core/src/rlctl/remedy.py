"""The next command for a fault of a plugin: rules from a cause chain to what mends it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlctl.causes import Cause
from rlctl.discovery import Candidate
from rlctl.requirements import Unmet, pip_install

_IMPORT_TO_DIST: Mapping[str, str] = {
    "yaml": "PyYAML",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "megatron": "megatron-core",
    "torch_npu": "torch-npu",
    "flash_attn": "flash-attn",
    "mpi4py": "mpi4py",
}

_LIBRARIES: tuple[tuple[str, str], ...] = (
    (
        r"libcuda\.so",
        "install the NVIDIA driver of this machine (nvidia-smi must answer), or install a CPU build of torch",
    ),
    (r"lib(cudart|cublas|cudnn|nccl|nvrtc|cusparse|cufft)[^ ]*\.so", "pip install --force-reinstall torch"),
    (
        r"lib(hccl|ascendcl|ascend_hal|hccl_v1|acl_op_compiler)[^ ]*\.so",
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    ),
    (r"lib(amdhip64|rccl|hsa-runtime64)[^ ]*\.so", "install ROCm for this machine (rocminfo must answer)"),
)
"""Shared libraries that no pip command of the plugin brings: pattern, and what does."""


def upgrade(candidate: Candidate) -> str:
    """For a fault that only the plugin's authors can mend."""
    return f"pip install --upgrade {candidate.dist} (until then: export RLCTL_DISABLE_PLUGINS={candidate.name})"


def reinstall(candidate: Candidate) -> str:
    """For an entry point whose module is gone: the dist is half removed, or its metadata is of another version."""
    return f"pip install --force-reinstall {candidate.dist} (or pip uninstall {candidate.dist})"


def for_requirements(unmet: Sequence[Unmet], remedies: Mapping[str, str] | None = None) -> str:
    """What satisfies them all: the pip command, then what pip cannot bring.

    Args:
        remedies: of the backend's record, by distribution.
    """
    own = {canonicalize_name(name): words for name, words in (remedies or {}).items()}
    by_hand = [own[canonicalize_name(u.dist)] for u in unmet if canonicalize_name(u.dist) in own]
    by_pip = [u.requirement.split("|")[0].strip() for u in unmet if canonicalize_name(u.dist) not in own]
    commands = [pip_install(*dict.fromkeys(by_pip))] if by_pip else []
    return "; then ".join([*commands, *dict.fromkeys(by_hand)])


def chatter(output: str) -> str:
    """What a plugin printed, in one line."""
    lines = output.strip().splitlines()
    more = f" and {len(lines) - 1} more lines" if len(lines) > 1 else ""
    return f"prints to stdout while it is imported: {lines[0][:200]!r}{more}"


def for_light_module(candidate: Candidate, causes: Sequence[Cause]) -> str:
    """Stage 2: a light module needs nothing but the standard library and rlctl, so most faults are the plugin's own."""
    missing = _missing_module(causes)
    if missing and _top(missing) == _top(candidate.target):
        return reinstall(candidate)
    if any(c.type == "AttributeError" and c.where == "" for c in causes):
        return reinstall(candidate)
    if any(c.type == "TypeError" and "BackendSpec" in c.message for c in causes):
        return f"pip install --upgrade rlctl-core {candidate.dist}"
    return for_import(candidate, causes, ()) if missing else upgrade(candidate)


def for_import(
    candidate: Candidate,
    causes: Sequence[Cause],
    requirements: Sequence[str],
    remedies: Mapping[str, str] | None = None,
) -> str:
    """Stage 4: what mends the import of a backend's libraries.

    Args:
        causes: the whole chain; the innermost link that a rule knows decides.
        requirements: the backend's PEP 508 strings, so that the command asks for a version that fits.
        remedies: of the backend's record, for a module whose distribution pip cannot bring.
    """
    missing = _missing_module(causes)
    if missing and _top(missing) in (remedies or {}):
        return (remedies or {})[_top(missing)]
    mend = for_library(causes, requirements, own=_top(candidate.target))
    if mend:
        return mend
    return reinstall(candidate) if _missing_module(causes) else upgrade(candidate)


def for_library(causes: Sequence[Cause], requirements: Sequence[str] = (), own: str = "") -> str:
    """What mends a library that does not import; empty when no rule knows.

    Args:
        own: top-level package of the importer, whose own missing modules are no missing library.
    """
    for cause in reversed(causes):
        for pattern, mend in _LIBRARIES:
            if re.search(pattern, cause.message):
                return mend
    missing = _missing_module(causes)
    if missing and _top(missing) != own:
        dist = _IMPORT_TO_DIST.get(_top(missing), _top(missing))
        return pip_install(_with_version(dist, requirements))
    library = None if missing else _broken_library(causes)
    return f"pip install --force-reinstall {library}" if library else ""


def _missing_module(causes: Sequence[Cause]) -> str | None:
    for cause in reversed(causes):
        if cause.type == "ModuleNotFoundError" and cause.module:
            return cause.module
    return None


def _broken_library(causes: Sequence[Cause]) -> str | None:
    """The dist whose file raised an error about a binary (undefined symbol, wrong ELF, missing .so)."""
    binary = r"undefined symbol|\.so\b|\.so\.|wrong ELF|GLIBC|DLL load failed|cannot open shared object"
    for cause in reversed(causes):
        if re.search(binary, cause.message) and cause.module:
            owners = metadata.packages_distributions().get(_top(cause.module), [])
            if owners:
                return owners[0]
    return None


def _with_version(dist: str, requirements: Sequence[str]) -> str:
    for text in requirements:
        for part in text.split("|"):
            try:
                requirement = Requirement(part.strip())
            except InvalidRequirement:
                continue
            if requirement.name.lower().replace("_", "-") == dist.lower().replace("_", "-"):
                return f"{requirement.name}{requirement.specifier}"
    return dist


def _top(module: str) -> str:
    return module.partition(":")[0].partition(".")[0].strip()
