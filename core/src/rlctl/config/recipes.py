"""Shipped configurations: the ``rlctl_recipes`` records of all plugins, and how a command's argument becomes a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.config.suggest import nearest
from rlctl.errors import ConfigError

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet


@dataclass(frozen=True)
class Recipe:
    """One shipped configuration and the dist that ships it."""

    name: str
    path: Path
    summary: str
    dist: str


@dataclass(frozen=True)
class Source:
    """Where a configuration is read from.

    Args:
        path: the file.
        label: how messages name the file, in front of a line number.
        name: what the user called it: the recipe's name, or the path as it was given.
    """

    path: Path
    label: str
    name: str


def list_recipes(plugins: PluginSet) -> list[Recipe]:
    """Every shipped recipe, by name. Of two with one name the first dist's (in alphabetical order) stands."""
    found: dict[str, Recipe] = {}
    for dist, record in sorted(plugins.records("rlctl_recipes"), key=lambda pair: (pair[1].name, pair[0])):
        found.setdefault(record.name, Recipe(record.name, Path(record.path), record.summary, dist))
    return list(found.values())


def find_recipe(name: str, plugins: PluginSet) -> Recipe:
    """The recipe called ``name``.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    recipes = {recipe.name: recipe for recipe in list_recipes(plugins)}
    if name in recipes:
        return recipes[name]
    close = nearest(name, recipes)
    raise ConfigError(
        f"there is no recipe called {name[:80]!r}" + (f". Did you mean {close}?" if close else ""),
        found=", ".join(recipes) or "no recipes are installed",
        wanted="the name of a recipe, or the path of a YAML file",
        next=f"rlctl recipes {close}" if close else "rlctl recipes" if recipes else "pip install rlctl",
    )


def find_source(source: str, plugins: PluginSet) -> Source:
    """A recipe by its name, else a file by its path. A bare word is a recipe first; ``./word`` is always a file.

    Raises:
        ConfigError: neither is there.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise ConfigError(
            "the working directory is not there any more",
            found=error.strerror,
            wanted="a directory that exists",
            next="cd to another directory",
        ) from error
    path = Path(source).expanduser() if source.startswith("~/") else Path(source)
    is_path = "/" in source or source.endswith((".yaml", ".yml"))
    if not is_path:
        recipe = next((r for r in list_recipes(plugins) if r.name == source), None)
        if recipe is not None:
            return Source(recipe.path, recipe.path.name, recipe.name)
        if not _is_file(path):
            find_recipe(source, plugins)
    if not _exists(path):
        stem = path.stem
        near = _near_file(path)
        known = nearest(stem, [r.name for r in list_recipes(plugins)], 0.75) if "/" not in source else None
        raise ConfigError(
            f"there is no configuration file {source[:200]!r}",
            found=f"no such file in {here if not path.is_absolute() else path.parent}",
            wanted="the path of a YAML file, or the name of a recipe",
            next=f"did you mean {near}?" if near else f"rlctl train {known}" if known else "rlctl recipes",
        )
    return Source(path, source, source)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _is_file(path: Path) -> bool:
    return _exists(path) and not path.is_dir()


def _near_file(path: Path) -> Path | None:
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return None
    close = nearest(path.name, names)
    return path.parent / close if close else None
