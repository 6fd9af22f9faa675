"""`rlctl train`: from a recipe or a YAML file to a trained model. Everything that can be refused early is, before torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("source", required=False, metavar="RECIPE|FILE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--backend", help="Training backend of actor and reference (actor.backend).")
@click.option("--rollout", help="Rollout backend (rollout.backend).")
@click.option("--algorithm", help="Advantage estimator (algorithm.adv_estimator), or sft, dpo or rm.")
@click.option("--model", help="Model directory, hub id or package:NAME (model.path).")
@click.option("--data", help="Training file, or a directory with train and test files (data.train_files).")
@click.option("--val-data", help="Validation file (data.val_files).")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps (trainer.total_training_steps).")
@click.option("--seed", type=click.IntRange(min=0), help="Seed (trainer.seed).")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes, one a rank (runtime.nproc).")
@click.option("--launcher", help="inline, process or ray (runtime.launcher).")
@click.option("--address", help="Ray cluster to join: auto, or HOST:PORT (runtime.ray.address).")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of this run; a new one, unless resuming.")
@click.option(
    "--resume", metavar="RUN", help="Continue a run (path, name, unique prefix, or last) from its last checkpoint."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Resolve and check the configuration, and of dpo and rm the rows, then stop. rlctl data check reads them for every trainer.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress, only the result.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on stdout.")
def train(
    source: str | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: str | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train from a recipe or a YAML file.

    \b
    rlctl train quickstart
    rlctl train my.yaml actor.optim.lr=1e-5 --model ./my-model
    rlctl train --resume last
    """
    from rlctl.errors import ConfigError, UsageError
    from rlctl.plugins import load_plugins
    from rlctl.records import BackendKind
    from rlctl.registry import require_backend

    def notice(text: str) -> None:
        click.echo(text, err=True)

    resume_path: Path | None = None
    if resume is not None:
        from rlctl_cli.commands.runs import find_run

        resume_path = find_run(resume)
        if source is not None and "=" in source:
            source, overrides = None, (source, *overrides)
        if source is not None:
            raise UsageError("--resume takes its configuration from the run", found=source, wanted="no RECIPE or FILE")
        source = str(resume_path / "config.yaml")
    plugins = load_plugins()

    def warn() -> None:
        for warning in plugins.warnings():
            notice(warning)

    if source is None:
        if flags.get("backend"):
            # A backend that cannot answer is the first thing to say.
            require_backend(flags["backend"], BackendKind.TRAIN, plugins)
        warn()
        raise UsageError(
            "rlctl train needs a recipe or a YAML file",
            wanted="for example: rlctl train quickstart",
            next="rlctl recipes",
        )
    given = {name: value for name, value in flags.items() if value is not None}
    from rlctl.config.homes import require_backends, require_imports
    from rlctl.config.load import load_config
    from rlctl.config.problems import InvalidConfigError

    try:
        resolved = load_config(source, overrides, given, plugins, notice)
    except ConfigError as error:
        if flags.get("backend") and not isinstance(error, InvalidConfigError):
            require_backend(flags["backend"], BackendKind.TRAIN, plugins)  # before a missing recipe
        warn()
        raise
    # From metadata alone: what is not installed is said here, before a trainer imports it, and says all that a warning would.
    require_backends(resolved.config, plugins)
    warn()
    if resume_path is not None:
        from rlctl.rundir import RunDirectory

        kind = RunDirectory.open(resume_path).manifest().get("kind")
        if kind not in (None, resolved.config.trainer.type):
            raise UsageError(
                "a run keeps its trainer when it is resumed",
                found=f"trainer.type={resolved.config.trainer.type}",
                wanted=str(kind),
                next=f"start a new run with --model {resume_path / 'export'}",
            )
    if resume_path is None and resolved.config.trainer.resume_mode == "auto":
        if run_dir is None:
            raise UsageError(
                "trainer.resume_mode=auto needs to know which run",
                found="no --run-dir",
                wanted="--run-dir DIR: a new run is made there, and continued when it exists",
            )
        resume_path = run_dir if (run_dir / "manifest.json").is_file() else None
    if dry_run:
        require_imports(resolved.config, plugins, None, notice)
        from rlctl.trainers.functions import try_functions

        try_functions(resolved, plugins)
        click.echo(f"configuration of {resolved.source} is complete: nothing was started", err=True)
        return
    from rlctl_cli.live import make_reporter

    reporter = make_reporter(quiet=quiet or as_json)
    import faulthandler

    from rlctl.interrupts import stop_signals
    from rlctl.trainers.run import Runner

    # A backend that crashes the process in native code then at least shows where.
    faulthandler.enable()
    with stop_signals():
        runner = Runner(resolved, plugins, reporter, run_dir=run_dir, resume=resume_path)
        result = runner.execute()
    from rlctl_cli.summary import print_summary, summary

    if as_json:
        from rlctl_cli.output import emit_json

        emit_json(summary(result))
    else:
        print_summary(result)
