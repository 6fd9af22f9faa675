"""docs/runs.md against a manifest that the code writes, and its commands against the command line."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from rlctl.config.load import ResolvedConfig
from rlctl.config.schema import RunConfig
from rlctl.device import Device
from rlctl.manifest import build_manifest
from rlctl.rundir import RunDirectory
from rlctl_cli.main import cli

PAGE = (Path(__file__).parents[1] / "docs" / "runs.md").read_text(encoding="utf-8")
OF_THE_TRAINER = {"engines", "runtime", "total_training_steps", "last_step", "best", "error"}
"""Keys that only a trainer adds."""


def test_every_manifest_key_is_documented_and_no_other(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"task": {"name": "sort"}}})
    manifest = build_manifest(ResolvedConfig(config, {}, tmp_path, "quickstart"), device=Device("cpu"))
    run = RunDirectory.create(tmp_path, "quickstart", "", manifest)
    run.rewind(0)
    run.finish("done")
    table = PAGE[PAGE.index("## manifest.json") :]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    assert documented - OF_THE_TRAINER == set(run.manifest()) - OF_THE_TRAINER
    assert documented >= OF_THE_TRAINER


def test_every_command_of_the_page_exists() -> None:
    block = re.findall(r"```\n(.*?)```", PAGE, re.S)[0]
    commands = [line.split() for line in block.splitlines()]
    assert len(commands) == 4
    for words in commands:
        path = [word for word in words[1:3] if word.islower() and word != "last"]
        result = CliRunner().invoke(cli, [*path, "--help"])
        assert result.exit_code == 0, words
        assert "--json" in result.output, words
