"""What the pages point at is there: files behind relative links, commands that are typed, settings that are named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("plugins/*/README.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_commands_that_the_pages_type_exist() -> None:
    typed: set[tuple[str, ...]] = set()
    for page in PAGES:
        for block in re.findall(r"```(?:\w*)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                if match := re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?rlctl ([a-z]+)(?: ([a-z]+))?", line):
                    typed.add((match[1], match[2] or ""))
    assert {"train", "doctor", "runs", "report"} <= {command for command, _ in typed}
    groups = {"data", "config", "runs"}
    for command, sub in sorted(typed):
        words = [command, sub] if command in groups and sub else [command]
        done = subprocess.run(
            [sys.executable, "-m", "rlctl_cli.main", *words, "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"rlctl {' '.join(words)}: {done.stderr}"


def test_the_readmes_short_configuration_is_complete(tmp_path: Path) -> None:
    from rlctl.config.load import load_config
    from rlctl.plugins import load_plugins

    block = re.search(r"```yaml\n(model: \{path: \./my-model\}.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "my-model").mkdir()
    for name in ("rows.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "my.yaml").write_text(block[1])
    config = load_config(str(tmp_path / "my.yaml"), plugins=load_plugins()).config
    assert config.reward.components[0].name == "number"
