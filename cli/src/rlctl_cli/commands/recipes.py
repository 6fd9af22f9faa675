"""`rlctl recipes`: the shipped configurations, shown or copied to start from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlctl.config.recipes import Recipe


@click.command()
@click.argument("name", required=False)
@click.option(
    "--copy",
    "destination",
    metavar="DEST",
    type=click.Path(path_type=Path),
    help="Copy the recipe, and the files it uses, to DEST (a YAML file or a directory). Nothing is overwritten.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def recipes(name: str | None, destination: Path | None, as_json: bool) -> None:
    """List shipped recipes, show one, or copy one.

    \b
    rlctl recipes
    rlctl recipes quickstart
    rlctl recipes quickstart --copy my.yaml
    """
    from rlctl.config.recipes import find_recipe, list_recipes
    from rlctl.errors import UsageError
    from rlctl.plugins import load_plugins

    plugins = load_plugins()
    if name is None:
        if destination is not None:
            raise UsageError("--copy needs the name of a recipe", next="rlctl recipes NAME --copy my.yaml")
        _list(list_recipes(plugins), as_json)
        return
    recipe = find_recipe(name, plugins)
    if destination is not None:
        written = copy_recipe(recipe, destination)
        if as_json:
            from rlctl_cli.output import emit_json

            emit_json({"name": recipe.name, "written": written})
        else:
            for path in written:
                click.echo(str(path))
            click.echo(f"next: rlctl train {written[0]}", err=True)
        return
    text = recipe.path.read_text(encoding="utf-8")
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json({**_plain(recipe), "text": text})
    else:
        click.echo(text, nl=False)


def _plain(recipe: Recipe) -> dict[str, str]:
    return {"name": recipe.name, "summary": recipe.summary, "dist": recipe.dist, "path": str(recipe.path)}


def _list(found: list[Recipe], as_json: bool) -> None:
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json({"recipes": [_plain(recipe) for recipe in found]})
        return
    from rich.table import Table
    from rich.text import Text

    from rlctl_cli.output import console

    table = Table(box=None, pad_edge=False, show_edge=False)
    for title in ("recipe", "what it does", "from"):
        table.add_column(title)
    for recipe in found:
        table.add_row(Text(recipe.name, "bold"), Text(recipe.summary), Text(recipe.dist, "dim"))
    console().print(table)
    click.echo("run one: rlctl train NAME, or copy it first: rlctl recipes NAME --copy my.yaml", err=True)


def copy_recipe(recipe: Recipe, destination: Path) -> list[Path]:
    """Copy a recipe and the files below its directory that its text names, so that the copy runs where it lies.

    Returns:
        What was written, the YAML file first.

    Raises:
        ConfigError: something of that name is there already, or the place cannot be written; nothing was written then.
    """
    from rlctl.errors import ConfigError

    target = destination / recipe.path.name if destination.is_dir() else destination
    if target.suffix not in (".yaml", ".yml"):
        target = target.with_name(target.name + ".yaml")
    pairs = [(recipe.path, target)]
    pairs += [(source, target.parent / source.relative_to(recipe.path.parent)) for source in used_files(recipe.path)]
    taken = [to for _, to in pairs if to.exists() or to.is_symlink()]
    if taken:
        raise ConfigError(
            f"{taken[0]} exists and is left as it is",
            found=", ".join(str(path) for path in taken),
            wanted="names that are free",
            next=f"rlctl recipes {recipe.name} --copy another-directory/{recipe.path.name}",
        )
    try:
        for source, to in pairs:
            to.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, to)
            else:
                shutil.copyfile(source, to)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written",
            found=error.strerror,
            wanted="a writable place",
            next=f"ls -ld {target.parent}",
        ) from error
    return [to for _, to in pairs]


def used_files(recipe: Path) -> list[Path]:
    """Files and directories next to a recipe which its text names by a relative path."""
    words = set(re.findall(r"[\w.\-]+(?:/[\w.\-]+)*", recipe.read_text(encoding="utf-8")))
    paths = {(recipe.parent / word.rstrip(".")) for word in words if not word.startswith((".", "/"))}
    return sorted(path for path in paths if path.exists() and path != recipe and path.suffix not in (".yaml", ".yml"))
