"""`rlctl plan`: ranks, batch arithmetic, refusals, memory and backends of a run, before anything is launched."""

from __future__ import annotations

import click


@click.command()
@click.argument("source", required=False, metavar="RECIPE|FILE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Ranks of the main pool (runtime.nproc).")
@click.option(
    "--device-memory", type=click.FloatRange(min=0, min_open=True), metavar="GIB", help="Memory of one device, in GiB."
)
@click.option("--device", type=click.Choice(["cpu", "cuda", "npu"]), help="Plan for this device (trainer.device).")
@click.option("--backend", metavar="NAME", help="Training backend (actor.backend), installed or not.")
@click.option("--critic", is_flag=True, help="Plan as if a value model were trained beside the actor.")
@click.option("--ranks", is_flag=True, help="Write out every rank's coordinates and every process group.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def plan(
    source: str | None,
    overrides: tuple[str, ...],
    world_size: int | None,
    device_memory: float | None,
    device: str | None,
    backend: str | None,
    critic: bool,
    ranks: bool,
    as_json: bool,
) -> None:
    """Show what a run comes to: ranks, batches, memory, and which backends could do it. Imports no torch.

    \b
    rlctl plan quickstart
    rlctl plan run.yaml --world-size 8 --device cuda --device-memory 80
    rlctl plan run.yaml actor.parallel.usp=2 --world-size 16 --ranks

    Exit code 1 when something would be refused, or does not fit the memory that --device-memory gives.
    """
    from rlctl.errors import UsageError

    if source is None or "=" in source:
        raise UsageError(
            "rlctl plan needs a recipe or a YAML file",
            found=source,
            wanted="for example: rlctl plan quickstart --world-size 8",
            next="rlctl recipes",
        )
    from rlctl.evidence import load_evidence
    from rlctl.plan.planner import make_plan
    from rlctl.plan.request import read_request
    from rlctl.plugins import load_plugins

    plugins = load_plugins()
    for warning in plugins.warnings():
        click.echo(warning, err=True)
    request = read_request(
        source, overrides, plugins, world_size=world_size, device=device, backend=backend, critic=critic
    )
    found = make_plan(request, plugins, load_evidence(plugins.entries))
    if as_json:
        from rlctl.plan.report import plan_to_json
        from rlctl_cli.output import emit_json

        emit_json(plan_to_json(found, device_memory))
    else:
        from rlctl_cli.output import console
        from rlctl_cli.plan_view import print_plan

        print_plan(found, device_memory, console(), ranks=ranks)
    if found.refusals or found.memory.verdict(device_memory)[0] == "too_large":
        click.get_current_context().exit(1)
