"""`rlctl bench`: the training step of the installed backends, measured on equal work and ranked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rlctl.bench import Measured, Workload
    from rlctl.device import Device
    from rlctl.topology import Topology


@click.command()
@click.argument("backends", nargs=-1, metavar="[BACKEND]...")
@click.option("--model", default="tiny:qwen3", show_default=True, help="Model directory or hub id, or tiny:FAMILY.")
@click.option("--topology", metavar="AXIS=N,...", help="Parallel axes of every backend, as in dp_shard=2.")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes (ranks); what the topology leaves is dp_shard.")
@click.option("--rows", type=click.IntRange(min=1), default=8, show_default=True, help="Rows of a step.")
@click.option("--length", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of a row.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of a micro-batch."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of the computation.",
)
@click.option("--checkpointing/--no-checkpointing", default=False, show_default=True, help="Keep layer inputs only.")
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Measured steps.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=2, show_default=True, help="Unmeasured steps before them."
)
@click.option("--engine", "engine_keys", multiple=True, metavar="BACKEND:KEY=VALUE", help="A backend's own setting.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or npu; auto: what the machine has.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def bench(backends: tuple[str, ...], as_json: bool, engine_keys: tuple[str, ...], **given: Any) -> None:
    """Measure the training step of BACKENDs on equal work, and rank them.

    Without names every installed training backend is measured. Rows, tokens, dtype and checkpointing are the same for all;
    what a backend cannot make equal is noted beside its figures. `rlctl plan`'s memory forecast stands beside the peak.

    \b
    rlctl bench
    rlctl bench fsdp2 --model ./my-model --rows 16 --length 1024 --dtype bfloat16 --checkpointing
    """
    import tempfile
    from pathlib import Path

    from rlctl.bench import Workload, installed_backends, measure, ranked
    from rlctl.device import detect_device
    from rlctl.errors import BackendUnavailableError, RlctlError
    from rlctl.plugins import load_plugins
    from rlctl.verify.topologies import parse_topology
    from rlctl_cli.live import make_reporter

    plugins = load_plugins()
    device = detect_device(given["device"])
    topology = parse_topology(given["topology"], given["nproc"])
    names = list(dict.fromkeys(backends)) or installed_backends(plugins, device)
    if not names:
        raise BackendUnavailableError(
            f"no training backend is installed that answers {device.type}",
            wanted="a plugin such as rlctl-plugin-fsdp",
            next="rlctl capabilities shows which backend answers which device",
        )
    work = Workload(
        given["rows"],
        given["length"],
        given["max_tokens"],
        given["dtype"],
        given["checkpointing"],
        given["steps"],
        given["warmup"],
    )
    settings = _engine_settings(engine_keys, names)
    results: list[Measured] = []
    reporter = make_reporter(quiet=as_json)
    with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as scratch:
        model, facts, forecast = _model(given["model"], Path(scratch), work, topology, device)
        for name in names:
            with reporter.phase(f"bench {name}", work.warmup + work.steps) as bar:
                results.append(
                    measure(
                        plugins,
                        name,
                        model,
                        facts,
                        topology,
                        work,
                        device,
                        engine=settings.get(name),
                        forecast=forecast,
                        progress=bar.advance,
                    )
                )
    reporter.close()
    results = ranked(results)
    if as_json:
        from rlctl_cli.output import emit_json

        emit_json({"device": str(device), "workload": vars(work), "results": [m.to_json() for m in results]})
    else:
        _print(results, work)
    if all(m.problem for m in results) or any(m.problem for m in results if m.backend in backends):
        raise RlctlError(
            "not every backend could be measured",
            details=[f"{m.backend}: {m.problem}" for m in results if m.problem],
            next="rlctl doctor",
        )


def _engine_settings(keys: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    from rlctl.config.yaml_source import parse_value
    from rlctl.errors import UsageError

    out: dict[str, dict[str, Any]] = {}
    for text in keys:
        backend, colon, pair = text.partition(":")
        key, equals, value = pair.partition("=")
        if not (colon and equals and key) or backend not in names:
            raise UsageError(
                "an engine setting cannot be read",
                found=text,
                wanted=f"BACKEND:KEY=VALUE with BACKEND one of {', '.join(names)}",
                next=f"--engine {names[0]}:KEY=VALUE; rlctl config schema --backend {names[0]} lists the keys",
            )
        out.setdefault(backend, {})[key] = parse_value(value)
    return out


def _model(text: str, scratch: Path, work: Workload, topology: Topology, device: Device) -> tuple[Any, Any, Any]:
    """(model section, facts, forecast) of a directory, a hub id, or a tiny model written into ``scratch``."""
    from rlctl.bench import forecast_gib
    from rlctl.config.schema import ModelConfig
    from rlctl.constraints import ModelFacts
    from rlctl.errors import UsageError
    from rlctl.models import resolve_model_source
    from rlctl.plan.source import find_model
    from rlctl.verify.tiny import FAMILIES, TinyModel, write_tiny

    if text.startswith("tiny:"):
        family = text.removeprefix("tiny:")
        if family not in FAMILIES:
            raise UsageError(
                "no such tiny model", found=text, wanted="one of " + ", ".join(f"tiny:{f}" for f in FAMILIES)
            )
        text = str(
            write_tiny(TinyModel(family, num_experts=4 if "moe" in family or family == "mixtral" else 0), scratch)
        )
    model = resolve_model_source(ModelConfig(path=text), notice=lambda line: click.echo(line, err=True))
    config = find_model(model).config
    facts = ModelFacts() if config is None else ModelFacts.from_config(config)
    return model, facts, forecast_gib(model, config, topology, work, device)


def _print(results: Sequence[Measured], work: Workload) -> None:
    import statistics

    from rich.table import Table

    from rlctl_cli.output import console

    out = console()
    recompute = "with" if work.checkpointing else "without"
    out.print(
        f"{work.rows} rows x {work.length} tokens a step, {work.dtype}, {recompute} checkpointing, median of {work.steps}"
    )
    table = Table(
        "rank",
        "backend",
        "topology",
        "s/step",
        "tokens/s a device",
        "peak GiB",
        "forecast GiB",
        "loss",
        box=None,
        pad_edge=False,
    )
    place = 0
    for m in results:
        axes = ", ".join(f"{k}={v}" for k, v in m.axes.items()) or "one process"
        speed = m.tokens_per_s_per_device
        if speed is None:
            table.add_row("-", m.backend, axes, "not measured")
            continue
        place += 1
        middle = statistics.median(m.step_s)
        peak = "?" if m.peak_gib is None else f"{m.peak_gib:.3g}"
        expected = "?" if m.forecast_gib is None else f"{m.forecast_gib:.3g}"
        table.add_row(
            str(place),
            m.backend,
            axes,
            f"{middle:.3f} ({m.step_s[0]:.3f} to {m.step_s[-1]:.3f})",
            f"{speed:,.0f}",
            peak,
            expected,
            f"{m.loss:.5f}",
        )
    out.print(table)
    for m in results:
        for note in (*m.notes, *([m.problem] if m.problem else [])):
            out.print(f"{m.backend}: {note}", style="dim", highlight=False)
    out.print(
        "peak: the device allocator's; on a CPU the whole process, libraries included. forecast: tensors, by rlctl plan.",
        style="dim",
        highlight=False,
    )
