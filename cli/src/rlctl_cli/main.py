"""The `rlctl` entry point. Commands load lazily: `rlctl --help` imports neither torch nor pydantic."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import click

from rlctl import __version__, extensions
from rlctl.errors import RlctlError

# name -> (module:attribute, one line of help). Help texts live here so that listing commands imports none of them.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("rlctl_cli.commands.train:train", "Train from a recipe or a YAML file."),
    "doctor": ("rlctl_cli.commands.doctor:doctor", "Check what is installed, what loads, and why something does not."),
    "capabilities": ("rlctl_cli.commands.capabilities:capabilities", "Show what each backend can do, with evidence."),
    "verify": (
        "rlctl_cli.commands.verify:verify",
        "Compare a backend and topology with one process, number by number.",
    ),
    "plan": ("rlctl_cli.commands.plan:plan", "Show ranks, batches, memory and fitting backends before a launch."),
    "bench": ("rlctl_cli.commands.bench:bench", "Measure the training step of backends on equal work."),
    "plugins": ("rlctl_cli.commands.plugins:plugins", "List installed plugins and what they declare."),
    "recipes": ("rlctl_cli.commands.recipes:recipes", "List shipped recipes, or show one."),
    "data": ("rlctl_cli.commands.data:data", "Check a dataset before any model is loaded."),
    "config": (
        "rlctl_cli.commands.config:config",
        "Show a resolved configuration, its JSON schema, or translate one of verl or TRL.",
    ),
    "runs": ("rlctl_cli.commands.runs:runs", "List, show and compare runs."),
    "report": ("rlctl_cli.commands.report:report", "Write one self-contained HTML report of a run."),
    "completion": ("rlctl_cli.commands.completion:completion", "Print the shell completion script."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    # Inside click, which would make exit code 1 of a pipe whose reader has gone (`rlctl runs list | head`).
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:
            _drop_stdout()
            raise click.exceptions.Exit(0) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_stdout()
            return None
        return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            if near and "No such command" in error.message:
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from error
            raise


def _drop_stdout() -> None:
    """What is still buffered goes nowhere, instead of failing once more on the way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="RL post-training of language models, with backends as plugins.\n\n"
    "Start with: rlctl doctor, then rlctl train quickstart.",
)
@click.version_option(__version__, prog_name="rlctl")
@click.option(
    "--no-plugins", is_flag=True, help="Ignore every third-party plugin (also RLCTL_DISABLE_PLUGINS=name,name)."
)
@click.option("--debug", is_flag=True, envvar="RLCTL_DEBUG", help="Show tracebacks for every error.")
@click.pass_context
def cli(ctx: click.Context, no_plugins: bool, debug: bool) -> None:
    ctx.obj = {"debug": debug, "no_plugins": no_plugins}
    if no_plugins:
        os.environ["RLCTL_DISABLE_PLUGINS"] = "*"


def main(argv: list[str] | None = None) -> Any:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 usage, 128 + n ended by signal n (130: Ctrl-C)."""
    extensions.keep_from_loading()
    debug = "--debug" in (argv if argv is not None else sys.argv) or os.environ.get("RLCTL_DEBUG")
    try:
        code = cli.main(args=argv, prog_name="rlctl", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2 if isinstance(error, click.UsageError) else error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        # click makes an Abort of a KeyboardInterrupt; the signal's number is with the first one.
        signum = getattr(error, "signum", None) or getattr(error.__cause__, "signum", None) or signal.SIGINT
        click.echo(f"interrupted ({signal.Signals(signum).name})", err=True)
        sys.exit(128 + signum)
    except RlctlError as error:
        if debug:
            raise
        from rlctl_cli.output import print_error

        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
