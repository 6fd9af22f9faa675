"""The light module: what it declares, that it stays light, what it refuses before a launch, and what doctor says of it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version
from pydantic import ValidationError

from rlctl.capabilities import check_topology
from rlctl.constraints import ModelFacts
from rlctl.errors import BackendUnavailableError
from rlctl.records import Axis, CheckStatus, Support
from rlctl.topology import resolve
from rlctl_veomni import checks, plugin, standins, versions
from rlctl_veomni.config import VeOmniConfig

DENSE = ModelFacts(num_heads=8, num_kv_heads=4, num_layers=6, num_experts=0)
EXPERTS = ModelFacts(num_heads=8, num_kv_heads=4, num_layers=6, num_experts=6)
(SPEC,) = plugin.rlctl_backends()


def after(code: str) -> object:
    """What ``code`` prints as JSON, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_declaring_veomni_and_its_checks_is_light() -> None:
    heavy = ("torch", "transformers", "pydantic", "numpy", "veomni")
    code = (
        "import json, sys, rlctl_veomni.plugin as p; p.rlctl_backends();"
        "said = [c.run().name for c in p.rlctl_checks()];"
        f"print(json.dumps([said, [m for m in {heavy} if m in sys.modules]]))"
    )
    assert after(code) == [["veomni", "veomni-stand-ins", "veomni-torchvision"], []]
    assert after("import json, sys, rlctl_veomni.config; print(json.dumps('torch' in sys.modules))") is False


def test_every_veomni_cell_is_there_once_and_refusals_say_what_to_take() -> None:
    cells = [(c.model_type, c.device, c.axis) for c in SPEC.capabilities]
    assert len(cells) == len(set(cells)) == len(SPEC.model_types) * len(SPEC.devices) * len(Axis)
    for cell in SPEC.capabilities:
        assert cell.reason
        if cell.support is Support.UNSUPPORTED:
            assert "take " in cell.reason, cell
    supported = {c.axis for c in SPEC.capabilities if c.support in (Support.SUPPORTED, Support.CONDITIONAL)}
    assert supported == {Axis.DP_SHARD, Axis.DP_REPLICATE, Axis.EP, Axis.USP}
    limited = {c.device: c.reason for c in SPEC.capabilities if c.support is Support.CONDITIONAL}
    assert set(limited) == {"cuda", "npu"}
    assert all("in bfloat16 only" in reason for reason in limited.values())


def test_veomni_requirements_are_those_of_the_dist() -> None:
    project = Path(plugin.__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("installed without its source")
    declared = tomllib.loads(project.read_text())["project"]["dependencies"]
    assert set(plugin.REQUIREMENTS) == {d for d in declared if not d.startswith("rlctl-core")}


@pytest.mark.parametrize(
    "settings",
    [
        {"param_dtype": "float16"},
        {"reduce_dtype": "auto"},
        {"experts": "fused"},
        {"logits_budget_mib": 0},
        {"collective_timeout_s": -1},
        {"attention": "sdpa"},
        {"recompute": "full"},
    ],
)
def test_veomni_settings_are_strict(settings) -> None:
    with pytest.raises(ValidationError):
        VeOmniConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("world", "axes", "facts", "axis", "words", "nearest"),
    [
        (3, {"usp": 3}, DENSE, "usp", "attention heads", ("usp=1",)),
        (4, {"ep": 4}, EXPERTS, "ep", "experts divide", ("ep=2",)),
        (2, {"ep": 2}, DENSE, "ep", "experts divide", ("ep=1",)),
        (4, {"dp_replicate": 4, "ep": 2}, EXPERTS, "ep", "ep must divide dp_shard x usp", ("ep=1",)),
        (2, {"tp": 2}, EXPERTS, "tp", "take megatron", ()),
        (2, {"pp": 2}, DENSE, "pp", "take megatron", ()),
        (2, {"cp": 2}, DENSE, "cp", "take usp, or megatron", ()),
    ],
)
def test_veomni_refuses_before_a_launch_with_what_would_do(world, axes, facts, axis, words, nearest) -> None:
    for device in plugin.DEVICES:
        fit = check_topology(SPEC, resolve(world, axes), device, facts=facts)
        problems = [p for p in fit.problems if p.axis == axis]
        assert any(words in p.reason for p in problems), problems
        assert set(nearest) <= {n for p in problems for n in p.nearest}


def test_experts_may_take_the_ranks_of_both_shards_and_slices() -> None:
    for axes in ({"ep": 2, "usp": 2}, {"ep": 2, "dp_shard": 2}):
        assert not check_topology(SPEC, resolve(2, {"dp_shard": 1, **axes}), "cpu", facts=EXPERTS).problems


# ---- doctor and stand-ins -----------------------------------------------------------------------------------------------
def test_doctor_tells_the_proved_veomni_from_others_and_from_none(monkeypatch) -> None:
    for found, status in (
        (None, CheckStatus.SKIP),
        (Version("0.1.12"), CheckStatus.OK),
        (Version("0.2"), CheckStatus.WARN),
    ):
        monkeypatch.setattr(versions, "installed", lambda found=found: found)
        assert checks.check_version().status is status
    monkeypatch.setattr(versions, "installed", lambda: Version("0.1.12"))
    listed = checks.check_stand_ins().found
    assert all(s.name in listed for s in standins.STAND_INS)


@pytest.mark.parametrize(
    ("torch", "vision", "status"),
    [
        ("2.13.0+cpu", None, CheckStatus.OK),
        ("2.13.0", "0.28.0", CheckStatus.OK),
        ("2.13.0+cpu", "0.28.0+cpu", CheckStatus.OK),
        ("2.13.0+cpu", "0.28.0", CheckStatus.WARN),
    ],
)
def test_doctor_sees_a_torchvision_of_another_build_than_torch(monkeypatch, torch, vision, status) -> None:
    def version(dist: str) -> str:
        found = {"torch": torch, "torchvision": vision}[dist]
        if found is None:
            raise checks.metadata.PackageNotFoundError(dist)
        return found

    monkeypatch.setattr(checks.metadata, "version", version)
    assert checks.check_torchvision().status is status


def test_every_stand_in_says_what_it_leaves_unproved() -> None:
    names = [s.name for s in standins.STAND_INS]
    assert len(names) == len(set(names)) == 6
    for stand_in in standins.STAND_INS:
        assert stand_in.replaces
        assert stand_in.unproved
        assert stand_in.applies_to(Version(versions.PROVED))
        assert not stand_in.applies_to(Version("0.1.13"))


def test_stand_ins_are_for_the_cpu_and_for_the_version_that_they_were_written_for(monkeypatch) -> None:
    applied: list[str] = []
    fakes = tuple(
        standins.StandIn(s.name, s.replaces, s.unproved, s.versions, lambda n=s.name: applied.append(n))
        for s in standins.STAND_INS
    )
    monkeypatch.setattr(standins, "STAND_INS", fakes)
    monkeypatch.setattr(versions, "installed", lambda: Version("0.1.12"))
    assert standins.prepare("cuda:0") == []
    assert applied == []
    assert standins.prepare("cpu") == applied == [s.name for s in fakes]
    monkeypatch.setattr(versions, "installed", lambda: Version("0.1.13"))
    with pytest.raises(BackendUnavailableError, match="no stand-ins"):
        standins.prepare("cpu")
    monkeypatch.setattr(versions, "installed", lambda: None)
    assert standins.prepare("cpu") == []


def test_grouped_products_are_those_of_each_expert() -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(7, n, generator=generator) for n in (3, 4))
    up = torch.randn(3, 4, 3, generator=generator)
    ends = torch.tensor([4, 4, 7])  # nothing for the second expert
    owner = [0] * 4 + [2] * 3
    found = standins.group_gemm_same_nk(a, up, cumsum_M=ends, max_M=7, transpose_b=True)
    torch.testing.assert_close(found, torch.stack([up[e] @ row for e, row in zip(owner, a, strict=True)]))
    found = standins.group_gemm_same_nk(b, up, cumsum_M=ends, max_M=7)
    torch.testing.assert_close(found, torch.stack([row @ up[e] for e, row in zip(owner, b, strict=True)]))
    weights = torch.full((3, 3, 4), torch.nan)  # memory as it comes
    standins.group_gemm_same_mn(a, b, weights, cumsum_K=ends, max_K=7, transpose_a=True)
    wanted = torch.zeros(3, 3, 4)
    for e, x, y in zip(owner, a, b, strict=True):
        wanted[e] += x[:, None] * y[None]
    torch.testing.assert_close(weights, wanted)


def test_a_forced_sum_of_whole_experts_is_refused() -> None:
    with pytest.raises(AssertionError, match="divide again"):
        standins.sum_expert_gradients([], 1)


def test_the_kernel_for_experts_on_a_gpu_is_for_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("veomni", reason="veomni is not installed (it has an environment of its own)")
    from rlctl.errors import ConfigError
    from rlctl_veomni import kernels

    gpu = torch.device("cuda")
    assert kernels.experts_implementation(VeOmniConfig(), 1, gpu, torch.float32) == "eager"
    with pytest.raises(ConfigError, match="computes in bfloat16"):
        kernels.experts_implementation(VeOmniConfig(), 2, gpu, torch.float32)


def test_experts_on_an_npu_are_veomnis_own_kernel_in_bfloat16() -> None:
    pytest.importorskip("veomni", reason="veomni is not installed (it has an environment of its own)")
    from types import SimpleNamespace
    from typing import Any

    import torch

    from rlctl.errors import ConfigError
    from rlctl_veomni import kernels

    npu: Any = SimpleNamespace(type="npu")  # torch knows no such device without Ascend's extension
    assert kernels.experts_implementation(VeOmniConfig(), 2, npu, torch.bfloat16) == "fused_npu"
    assert kernels.experts_implementation(VeOmniConfig(), 1, npu, torch.float32) == "eager"
    with pytest.raises(ConfigError, match="computes in bfloat16"):
        kernels.experts_implementation(VeOmniConfig(), 2, npu, torch.float32)
