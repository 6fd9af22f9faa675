"""The recipes that this dist ships, as records. Standard library and ``rlctl`` only."""

from __future__ import annotations

from pathlib import Path

from rlctl.hookspecs import hookimpl
from rlctl.records import RecipeSpec

RECIPES = Path(__file__).parent / "recipes"


@hookimpl
def rlctl_recipes() -> list[RecipeSpec]:
    """Every YAML file of ``recipes/``; the summary is the file's first line, a comment."""
    return [RecipeSpec(path.stem, str(path), summary(path)) for path in sorted(RECIPES.glob("*.yaml"))]


def summary(path: Path) -> str:
    """The first line of a file without its comment mark, or empty when it is no comment."""
    with path.open(encoding="utf-8") as stream:
        first = stream.readline().strip()
    return first.removeprefix("#").strip() if first.startswith("#") else ""
