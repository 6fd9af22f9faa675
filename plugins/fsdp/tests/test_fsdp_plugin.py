"""The light module: what it declares, and that it stays light."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlctl.engine import load_target
from rlctl.records import Axis, Support
from rlctl_fsdp import plugin
from rlctl_fsdp.config import FSDPConfig


def test_declaring_the_backends_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, rlctl_fsdp.plugin as p; p.rlctl_backends(); print([m for m in ('torch','transformers','pydantic','numpy') if m in sys.modules])"  # fmt: skip # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    config = "import sys, rlctl_fsdp.config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", config], capture_output=True, text=True, check=True).stdout.strip() == "False"  # fmt: skip


def test_every_cell_is_there_once_and_refusals_have_a_reason() -> None:
    for spec in plugin.rlctl_backends():
        cells = [(c.model_type, c.device, c.axis) for c in spec.capabilities]
        assert len(cells) == len(set(cells)) == len(spec.model_types) * len(spec.devices) * len(Axis)
        for cell in spec.capabilities:
            assert cell.reason
            if cell.support is Support.UNSUPPORTED:
                assert "take " in cell.reason, cell


def test_targets_exist() -> None:
    for spec in plugin.rlctl_backends():
        assert isinstance(load_target(spec.engine), type)
        assert load_target(spec.config)().model_dump() is not None


def test_requirements_are_those_of_the_dist() -> None:
    project = Path(plugin.__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("installed without its source")
    declared = tomllib.loads(project.read_text())["project"]
    assert set(plugin.REQUIREMENTS) == {d for d in declared["dependencies"] if not d.startswith("rlctl-core")}
    assert declared["optional-dependencies"] == {"lora": [plugin.LORA_REQUIREMENT]}


@pytest.mark.parametrize(
    ("version", "status", "next_"),
    [(None, "skip", plugin.LORA_HINT), ("0.4.0", "warn", plugin.LORA_HINT), ("0.21.2", "ok", "")],
)
def test_doctor_says_whether_adapters_can_be_trained(monkeypatch, version, status, next_) -> None:
    monkeypatch.setattr("rlctl.requirements.installed_version", lambda name: version)
    found = plugin.rlctl_checks()[0].run()
    assert (found.status, found.next) == (status, next_)
    assert (version or "peft is not installed") in found.found


def test_settings_are_strict() -> None:
    with pytest.raises(ValidationError):
        FSDPConfig.model_validate({"activation_checkpoint": True})
    with pytest.raises(ValidationError):
        FSDPConfig.model_validate({"attention": "flash"})


def test_the_readme_lists_every_setting_and_its_default() -> None:
    readme = Path(plugin.__file__).parents[2] / "README.md"
    if not readme.is_file():
        pytest.skip("installed without its source")
    table = {
        key.strip(" `"): cells[1].strip(" `")
        for line in readme.read_text().splitlines()
        if line.startswith("| `") and len(cells := line.strip("|").split("|")) == 3
        for key in cells[0].split(",")
    }
    documented = {k: v for k, v in table.items() if k in FSDPConfig.model_fields}
    assert documented == {
        name: str(field.default).lower().removesuffix(".0") for name, field in FSDPConfig.model_fields.items()
    }
