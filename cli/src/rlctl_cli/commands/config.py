"""`rlctl config`: the resolved configuration with its origins, its JSON schema, and files of other projects translated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlctl.config.load import ResolvedConfig
    from rlctl.config.migrate import LeftOut, Migration


@click.group()
def config() -> None:
    """Show a resolved configuration, its JSON schema, or translate one of another project."""


@config.command()
@click.argument("source", metavar="RECIPE|FILE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--backend", help="Training backend of actor and reference (actor.backend).")
@click.option("--rollout", help="Rollout backend (rollout.backend).")
@click.option("--algorithm", help="Advantage estimator (algorithm.adv_estimator), or sft, dpo or rm.")
@click.option("--model", help="Model directory, hub id or package:NAME (model.path).")
@click.option("--data", help="Training file, or a directory with train and test files (data.train_files).")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes, one a rank (runtime.nproc).")
@click.option("--launcher", help="inline, process or ray (runtime.launcher).")
@click.option("--address", help="Ray cluster to join: auto, or HOST:PORT (runtime.ray.address).")
@click.option("--origins", is_flag=True, help="Say where each value came from.")
@click.option("--changed", is_flag=True, help="Leave defaults out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def show(source: str, overrides: tuple[str, ...], origins: bool, changed: bool, as_json: bool, **flags: Any) -> None:
    """Print the configuration that `rlctl train` would run, checked and complete.

    \b
    rlctl config show quickstart --origins
    rlctl config show run.yaml actor.optim.lr=1e-5 > resolved.yaml
    """
    from rlctl.config.load import load_config

    notices: list[str] = []
    resolved = load_config(source, overrides, flags, notice=notices.append)
    for line in notices:
        click.echo(line, err=True)
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json(
            {
                "source": resolved.source,
                "base_dir": resolved.base_dir,
                "config": resolved.config.model_dump(mode="json"),
                "origins": resolved.origins,
                "notices": notices,
            }
        )
    elif origins or changed:
        _print_table(resolved, changed)
    else:
        click.echo(resolved.to_yaml(), nl=False)


def _print_table(resolved: ResolvedConfig, changed: bool) -> None:
    """One line a value: key, value, origin. Defaults are dim."""
    from rich.table import Table
    from rich.text import Text

    from rlctl.config.document import dotted, leaves
    from rlctl_cli.output import console

    table = Table(box=None, pad_edge=False, show_edge=False)
    for title in ("key", "value", "from"):
        table.add_column(title, no_wrap=False, overflow="fold")
    for loc, value in leaves(resolved.config.model_dump(mode="json")):
        path = dotted(loc)
        origin = resolved.origins[path]
        if changed and origin == "default":
            continue
        style = "dim" if origin == "default" else ""
        table.add_row(Text(path, style), Text(_inline(value), style), Text(origin, "dim" if style else "cyan"))
    console().print(table)


def _inline(value: Any) -> str:
    """A value as it would be typed after KEY= on the command line."""
    from rlctl.config.yaml_dump import dump_inline

    return dump_inline(value)


@config.command()
@click.option("--backend", help="Fill in the engine section of this backend (training or rollout).")
@click.option("--rollout", help="Fill in the engine section of this rollout backend.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file that does not exist yet."
)
def schema(backend: str | None, rollout: str | None, output: Path | None) -> None:
    """Print the JSON schema of a run's YAML file.

    Editors complete and check keys with it: put `# yaml-language-server: $schema=rlctl.schema.json` on the first line.
    """
    import json

    from rlctl.config.json_schema import json_schema
    from rlctl.plugins import load_plugins

    text = json.dumps(json_schema(load_plugins(), backend, rollout), indent=2, ensure_ascii=False)
    if output is None:
        click.echo(text)
    else:
        _write_new(output, text + "\n")


@config.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file that does not exist yet."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def migrate(file: str, output: Path | None, as_json: bool) -> None:
    """Translate a verl or TRL file: the new YAML on stdout, what could not be translated on stderr.

    Exit code 1 when something is left that its reader has to decide. The old file is not touched.
    """
    from rlctl.config.migrate import migrate as translate
    from rlctl.config.yaml_source import read

    result = translate(read(Path(file), file), file)
    if output is not None:
        _write_new(output, result.to_yaml())
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json(_migration_json(file, result))
    else:
        if output is None:
            click.echo(result.to_yaml(), nl=False)
        _print_left_out(file, result)
    open_ends = [item for item in result.left_out if not item.needless] or result.to_set
    if open_ends:
        click.get_current_context().exit(1)


def _migration_json(file: str, result: Migration) -> dict[str, Any]:
    def plain(item: LeftOut) -> dict[str, Any]:
        return {"path": item.path, "line": item.line, "found": item.found, "reason": item.reason}

    return {
        "source": file,
        "config": result.values,
        "origins": result.origins,
        "not_translated": [plain(item) for item in result.left_out if not item.needless],
        "not_needed": [plain(item) for item in result.left_out if item.needless],
        "to_set": list(result.to_set),
        "notes": list(result.notes),
    }


def _print_left_out(file: str, result: Migration) -> None:
    lost = [item for item in result.left_out if not item.needless]
    needless = [item for item in result.left_out if item.needless]
    for title, items in (("not translated", lost), ("not needed here", needless)):
        if items:
            click.echo(f"\n{title}:", err=True)
        for item in items:
            found = f" ({item.found})" if item.found else ""
            click.echo(f"  {file}:{item.line} {item.path}{found}: {item.reason}", err=True)
    if result.to_set:
        click.echo("\nstill to be set:", err=True)
        for line in result.to_set:
            click.echo(f"  {line}", err=True)
    for note in result.notes:
        click.echo(f"\nnote: {note}", err=True)
    click.echo(f"\n{len(result.origins)} values translated, {len(lost)} not", err=True)


def _write_new(path: Path, text: str) -> None:
    """Write a file that must not exist."""
    from rlctl.errors import ConfigError

    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists and is left as it is",
            found="a file",
            wanted="a new name",
            next=f"--output {path.stem}-2{path.suffix}",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written",
            found=error.strerror,
            wanted="a writable directory",
            next=f"ls -ld {path.parent}",
        ) from error
