"""Records with names of their own, rlctl's and those of plugins, in one table. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rlctl.errors import ConfigError

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet

CORE = "rlctl-core"
Record = TypeVar("Record")


def known_records(
    hook: str,
    words: str,
    builtin: Mapping[str, Record],
    plugins: PluginSet | None,
    keep: Callable[[Any], bool] = lambda record: True,
) -> dict[str, tuple[str, Record]]:
    """Name to (the dist that brings it, its record).

    Args:
        hook: the discovery hook through which plugins declare such records.
        words: what they are, for messages.
        keep: which of the plugins' records are meant.

    Raises:
        ConfigError: two dists claim one name.
    """
    known = {name: (CORE, record) for name, record in builtin.items()}
    for dist, record in plugins.records(hook) if plugins is not None else []:
        if not keep(record):
            continue
        if record.name in known:
            raise ConfigError(
                f"two distributions claim the {words} {record.name!r}",
                found=f"{known[record.name][0]} and {dist}",
                next=f"RLCTL_DISABLE_PLUGINS={dist}, or uninstall one of them",
            )
        known[record.name] = (dist, record)
    return known


def is_own(name: str) -> bool:
    """True for a name of the user's own code: ``path/to/file.py:Name`` or ``module:Name``."""
    return ":" in name or name.endswith(".py")


def unknown(name: str, known: Mapping[str, Any], *, words: str, own: str, key: str, default: str) -> ConfigError:
    """The error for a name that is not in the table.

    Args:
        words: what it is, for messages.
        own: what stands for the user's own code, ``path/to/file.py:function``.
        key: the setting to correct.
        default: a name to suggest where none is near.
    """
    from rlctl.config.suggest import nearest

    near = nearest(name, known)
    return ConfigError(
        f"there is no {words} {name!r}",
        found=f"did you mean {near!r}?" if near else None,
        wanted=f"{', '.join(sorted(known))}, or {own}",
        next=f"{key}={near or default}",
    )
