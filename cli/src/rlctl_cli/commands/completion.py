"""`rlctl completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rlctl.errors import UsageError

_INSTALL = {
    "bash": 'eval "$(rlctl completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(rlctl completion zsh)"    # in ~/.zshrc',
    "fish": "rlctl completion fish > ~/.config/fish/completions/rlctl.fish",
}


@click.command()
@click.argument("shell", required=False, type=click.Choice(list(_INSTALL)))
def completion(shell: str | None) -> None:
    """Print the shell completion script of SHELL (default: the shell of $SHELL).

    \b
    bash: eval "$(rlctl completion bash)"   in ~/.bashrc
    zsh:  eval "$(rlctl completion zsh)"    in ~/.zshrc
    fish: rlctl completion fish > ~/.config/fish/completions/rlctl.fish
    """
    from click.shell_completion import get_completion_class

    from rlctl_cli.main import cli

    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in _INSTALL:
        raise UsageError(
            "your shell is not known",
            found=f"SHELL={os.environ.get('SHELL', '')}",
            wanted="one of " + ", ".join(_INSTALL),
            next="rlctl completion bash",
        )
    found = get_completion_class(name)
    assert found is not None, name
    click.echo(f"# {_INSTALL[name]}")
    click.echo(found(cli, {}, "rlctl", "_RLCTL_COMPLETE").source())
