"""`rlctl plugins`: what is installed and what it declares. Imports light modules only."""

from __future__ import annotations

import click

_STYLE = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
_HOOKS = {
    "rlctl_rewards": "rewards",
    "rlctl_algorithms": "algorithms",
    "rlctl_recipes": "recipes",
    "rlctl_trackers": "trackers",
    "rlctl_weight_transports": "weight transports",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def plugins(as_json: bool) -> int:
    """List installed plugins and what they declare.

    Exit codes: 0 every plugin is usable, 1 one is not.
    """
    from rlctl.doctor.report import plugin_to_json
    from rlctl.plugins import load_plugins

    found = load_plugins()
    rows = []
    for entry in found.entries:
        rows.append({**plugin_to_json(entry), **{words.replace(" ", "_"): [] for words in _HOOKS.values()}})
    for hook, words in _HOOKS.items():
        for dist, record in found.records(hook):
            row = next(r for r in rows if r["dist"] == dist and r["status"] in ("ok", "warn", "fail"))
            row[words.replace(" ", "_")].append(record.name)
    code = int(bool(found.failures()))
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json({"plugins": rows})
        return code
    from rich.table import Table
    from rich.text import Text

    from rlctl_cli.output import console

    out = console()
    if not rows:
        out.print(Text("No plugin is installed. Next: pip install rlctl-plugin-fsdp"))
        return code
    table = Table("plugin", "dist", "stage", "status", "declares", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        declares = [f"{b['kind']} backend {b['name']}" for b in row["backends"]]
        for words in _HOOKS.values():
            names = row[words.replace(" ", "_")]
            declares += [f"{words}: {', '.join(names)}"] if names else []
        status = f"[{_STYLE[row['status']]}]{row['status']}[/]"
        dist = Text(f"{row['dist']} {row['version']}")
        table.add_row(Text(row["name"]), dist, row["stage"], status, Text("; ".join(declares)))
    out.print(table)
    for row in rows:
        if row["cause"]:
            out.print()
            out.print(Text(f"{row['name']} ({row['dist']} {row['version']}), {row['status']} at stage {row['stage']}:"))
            for line in row["cause"]:
                out.print(Text(f"    {line}"))
            if row["next"]:
                out.print(Text(f"    next: {row['next']}"))
    return code
