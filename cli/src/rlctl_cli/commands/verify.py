"""`rlctl verify`: parity of a backend and topology against one process of plain Hugging Face code."""

from __future__ import annotations

import click


@click.command()
@click.option("--backend", required=True, metavar="NAME", help="Training backend.")
@click.option("--topology", metavar="AXES", help="Sizes of the axes, as in dp_shard=2,usp=2. Default: one process.")
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks; with --all the most ranks (default: devices, or 4).")
@click.option(
    "--all", "every", is_flag=True, help="Every axis that the backend declares, alone and in pairs, up to --nproc."
)
@click.option(
    "--model", "models", multiple=True, metavar="DIR|tiny:FAMILY", help="Model (repeatable). tiny:all: every family."
)
@click.option("--models", "families", metavar="FAMILIES", help="Tiny families, comma-separated, or all.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="dtype of the computation."
)
@click.option("--engine", multiple=True, metavar="KEY=VALUE", help="A setting of the backend's engine (repeatable).")
@click.option("--device", default="auto", metavar="TYPE", help="auto, cpu, cuda or npu.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=300.0,
    help="Seconds without progress of a rank before it counts as hanging.",
)
@click.option("--no-record", is_flag=True, help="Write no evidence record.")
@click.option("-q", "--quiet", is_flag=True, help="Only failures and the last line.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def verify(
    backend: str,
    topology: str | None,
    nproc: int | None,
    every: bool,
    models: tuple[str, ...],
    families: str | None,
    dtype: str,
    engine: tuple[str, ...],
    device: str,
    timeout_s: float,
    no_record: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Compare a backend and topology with one process of plain Hugging Face code.

    \b
    rlctl verify --backend fsdp2 --topology dp_shard=2,usp=2
    rlctl verify --backend fsdp2 --all --nproc 4 --json

    Loss, log-probs, entropy, grad norm, every gradient, updated weights, export and checkpoint; for a mixture of experts
    its routing too, for a value model its values. Exit codes: 0 everything is within its tolerance,
    1 something is not or could not run, 2 the request is wrong.
    """
    from rlctl.device import detect_device
    from rlctl.plugins import load_plugins
    from rlctl.verify.request import make_request

    def notice(text: str) -> None:
        click.echo(text, err=True)

    plugins = load_plugins()
    for warning in plugins.warnings():
        notice(warning)
    chosen = [*models, *(f"tiny:{f.strip()}" for f in (families or "").split(",") if f.strip())]
    request = make_request(
        plugins,
        backend,
        detect_device(device),
        topology=topology,
        every=every,
        nproc=nproc,
        models=chosen,
        dtype=dtype,
        engine=engine,
        record=not no_record,
        timeout_s=timeout_s,
        notice=notice,
    )
    from rlctl.interrupts import stop_signals
    from rlctl.verify.run import Verifier
    from rlctl_cli.verify_view import View

    view = View(tables=not as_json, quiet=quiet)
    with stop_signals(), view, Verifier(plugins, view, notice) as verifier:
        report = verifier.run(request)
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json(report.to_json())
    else:
        view.finish(report)
    return 0 if report.passed else 1
