"""The light module: what it declares, that it stays light, what it refuses before a launch, and its stand-ins."""

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
from rlctl.engine import load_target
from rlctl.errors import BackendUnavailableError
from rlctl.records import Axis, CheckStatus, Support
from rlctl.topology import resolve
from rlctl_megatron import plugin, standins, versions
from rlctl_megatron.checks import check_stand_ins, check_version
from rlctl_megatron.config import MegatronConfig

DENSE = ModelFacts(num_heads=8, num_kv_heads=4, num_layers=6, num_experts=0)
EXPERTS = ModelFacts(num_heads=8, num_kv_heads=4, num_layers=6, num_experts=6)
(SPEC,) = plugin.rlctl_backends()


def _after(code: str) -> object:
    """What ``code`` prints as JSON, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


# ---- the record ---------------------------------------------------------------------------------------------------
def test_declaring_megatron_and_its_checks_is_light() -> None:
    heavy = ("torch", "transformers", "pydantic", "numpy", "megatron", "megatron.core")
    code = (
        "import json, sys, rlctl_megatron.plugin as p; p.rlctl_backends();"
        "said = [c.run().found for c in p.rlctl_checks()];"
        f"print(json.dumps([said, [m for m in {heavy} if m in sys.modules]]))"
    )
    said, loaded = _after(code)  # type: ignore[misc]
    assert loaded == []
    assert str(versions.installed()) in said[0]
    assert "cuda-calls" in said[1]
    assert _after("import json, sys, rlctl_megatron.config; print(json.dumps('torch' in sys.modules))") is False


def test_every_megatron_cell_is_there_once_and_refusals_say_what_to_take() -> None:
    cells = [(c.model_type, c.device, c.axis) for c in SPEC.capabilities]
    assert len(cells) == len(set(cells)) == len(SPEC.model_types) * len(SPEC.devices) * len(Axis)
    for cell in SPEC.capabilities:
        assert cell.reason
        if cell.support is Support.UNSUPPORTED:
            assert "take " in cell.reason, cell
    refused = {c.axis for c in SPEC.capabilities if c.support in (Support.UNSUPPORTED, Support.NOT_APPLICABLE)}
    assert refused == {Axis.DP_REPLICATE, Axis.USP, Axis.DCP}


def test_megatron_targets_exist() -> None:
    load_target(SPEC.engine)
    assert load_target(SPEC.config)() == MegatronConfig()


def test_megatron_requirements_are_those_of_the_dist() -> None:
    project = Path(plugin.__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("installed without its source")
    declared = tomllib.loads(project.read_text())["project"]["dependencies"]
    assert set(plugin.REQUIREMENTS) == {d for d in declared if not d.startswith("rlctl-core")}


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "selective"},
        {"param_dtype": "float16"},
        {"moe_token_dispatcher": "flex"},
        {"logits_budget_mib": 0},
        {"collective_timeout_s": -1},
        {"sequence_parallel": True},
        {"activation_checkpointing": True},
    ],
)
def test_megatron_settings_are_strict(settings) -> None:
    with pytest.raises(ValidationError):
        MegatronConfig.model_validate(settings)


# ---- refused before a launch ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("world", "axes", "facts", "axis", "words", "nearest"),
    [
        (8, {"tp": 8}, DENSE, "tp", "key/value heads must divide by tp", ("tp=4",)),
        (3, {"tp": 3}, DENSE, "tp", "attention heads", ("tp=1",)),
        (2, {"tp": 2}, EXPERTS, "tp", "needs sp", ("sp=true",)),
        (4, {"pp": 4}, DENSE, "pp", "layers must divide by pp", ("pp=2",)),
        (2, {"pp": 2, "vpp": 2}, DENSE, "vpp", "pp x vpp", ("vpp=1", "vpp=3")),
        (2, {"vpp": 2}, DENSE, "vpp", "vpp needs pp > 1", ("vpp=1",)),
        (4, {"ep": 4}, EXPERTS, "ep", "experts divide", ("ep=2",)),
        (2, {"ep": 2}, DENSE, "ep", "experts divide", ("ep=1",)),
        (2, {"etp": 2}, DENSE, "etp", "needs a model with experts", ("etp=1",)),
        (2, {"ep": 2, "etp": 2}, EXPERTS, "ep", "must divide the ranks", ("ep=1",)),
    ],
)
def test_megatron_refuses_before_a_launch_with_the_nearest_choice(world, axes, facts, axis, words, nearest) -> None:
    for device in plugin.DEVICES:
        fit = check_topology(SPEC, resolve(world, axes), device, facts=facts)
        problem = next(p for p in fit.problems if p.axis == axis)
        assert words in problem.reason
        assert set(nearest) <= set(problem.nearest)
        # The choice that is offered is one: the same topology with it is not refused for that axis.
        name, _, value = nearest[0].partition("=")
        mended = {**axes, name: int(value == "true") if name == "sp" else int(value)}
        assert axis not in {p.axis for p in check_topology(SPEC, resolve(world, mended), device, facts=facts).problems}


@pytest.mark.parametrize(("axis", "words"), [("dp_replicate", "take dp_shard"), ("usp", "take cp")])
def test_megatron_names_what_to_take_instead_of_an_axis(axis, words) -> None:
    (problem,) = check_topology(SPEC, resolve(2, {axis: 2}), "cpu").problems
    assert problem.axis == axis
    assert words in problem.reason


def test_sp_without_tp_is_announced_as_off() -> None:
    fit = check_topology(SPEC, resolve(1, {"sp": 1}), "cpu", facts=DENSE)
    assert not fit.problems
    assert fit.notes == ("megatron: sp is tied to tp: it is off while tp is 1",)
    assert not check_topology(SPEC, resolve(2, {"tp": 2, "sp": 1}), "cpu", facts=EXPERTS).notes


# ---- versions and stand-ins -------------------------------------------------------------------------------------------
def test_doctor_says_which_version_was_proved(monkeypatch) -> None:
    assert check_version().status is CheckStatus.OK
    monkeypatch.setattr(versions, "installed", lambda: Version("0.19.2"))
    result = check_version()
    assert result.status is CheckStatus.WARN
    assert "0.19.2" in result.found
    assert versions.PROVED in result.next
    monkeypatch.setattr(versions, "installed", lambda: None)
    assert check_version().status is check_stand_ins().status is CheckStatus.SKIP


def test_a_local_build_of_the_proved_version_is_proved() -> None:
    assert versions.is_proved(Version(versions.PROVED + "+local"))
    assert not versions.is_proved(Version("0.16.2"))


def test_every_stand_in_is_listed_and_says_what_it_leaves_unproved() -> None:
    names = [s.name for s in standins.STAND_INS]
    assert len(set(names)) == len(names)
    said = check_stand_ins().found
    older = {s.name for s in standins.STAND_INS if not s.applies_to(Version(versions.PROVED))}
    assert older == {"no-fp8-cast"}, "of the version that MindSpeed patches alone"
    for stand_in in standins.STAND_INS:
        assert (stand_in.name in said) is (stand_in.name not in older)
        assert stand_in.replaces
        assert stand_in.unproved
        assert stand_in.applies_to(Version(versions.LEGACY))
        assert not stand_in.applies_to(Version("0.15.3"))
        assert not stand_in.applies_to(Version("0.17.0"))


@pytest.mark.parametrize("version", ["0.15.3", "0.17.0", "0.19.2"])
def test_a_version_without_stand_ins_is_refused_on_a_cpu_only(monkeypatch, version) -> None:
    monkeypatch.setattr(versions, "installed", lambda: Version(version))
    with pytest.raises(BackendUnavailableError, match="no stand-ins for a CPU") as error:
        standins.prepare("cpu")
    assert version in str(error.value)
    assert f"megatron-core=={versions.PROVED}" in str(error.value)
    assert standins.prepare("cuda") == []
    assert standins.prepare("cuda:1") == []


def test_stand_ins_touch_megatron_alone_on_a_cpu_and_nothing_for_a_gpu() -> None:
    found = _after(
        """
import json, sys, warnings
warnings.simplefilter("ignore")
from rlctl_megatron import plugin, standins
plugin.rlctl_prepare_process(backend="megatron", config={"device": "cuda"})
early = [m for m in ("torch", "megatron.core") if m in sys.modules]
import importlib, torch
import megatron.core.transformer.moe.token_dispatcher as dispatcher
from megatron.core.tensor_parallel import random as states
from megatron.core.transformer.moe import moe_utils
modules = [importlib.import_module("megatron.core." + name) for name in standins._REDIRECTED]
own = lambda: [getattr(torch, n) for n in dir(torch)] + [getattr(torch.cuda, n) for n in dir(torch.cuda)] \\
    + [getattr(torch.Tensor, n) for n in dir(torch.Tensor)]
patched = lambda: [m.torch is not torch for m in modules] + [
    dispatcher.maybe_move_tensor_to_cpu.__module__ == standins.__name__,
    hasattr(moe_utils, "te_general_gemm"), states._get_cuda_rng_state.__module__ == standins.__name__]
before, of_torch = patched(), own()
on_cuda, after_cuda = standins.prepare("cuda"), patched()
names = standins.prepare("cpu")
redirects, once = [m.torch for m in modules], patched()
again = standins.prepare("cpu")
same = lambda a, b: len(a) == len(b) and all(x is y or x == y for x, y in zip(a, b))
print(json.dumps({
    "early": early, "before": any(before), "on_cuda": on_cuda, "after_cuda": any(after_cuda), "names": names,
    "once": all(once), "again": again, "idempotent": same(redirects, [m.torch for m in modules]),
    "one": len({id(r) for r in redirects}), "torch": same(of_torch, own()),
}))
"""
    )
    assert isinstance(found, dict)
    assert found["early"] == [], "nothing is imported for a GPU"
    assert found["on_cuda"] == []
    assert not found["before"]
    assert not found["after_cuda"]
    assert found["names"] == found["again"]
    assert found["names"] == [s.name for s in standins.STAND_INS if s.applies_to(Version(versions.PROVED))]
    assert found["once"], "and on a CPU every one of them is applied"
    assert found["idempotent"]
    assert found["one"] == 1
    assert found["torch"], "torch itself is as it was"


def test_device_calls_are_answered_for_the_cpu() -> None:
    import torch

    seen = standins._Redirect(torch)
    assert seen.cuda.current_device() == torch.device("cpu")
    assert seen.device("cuda", 1) == torch.device("cpu")
    assert seen.device("meta") == torch.device("meta")
    assert seen.empty(2, device="cuda", pin_memory=True).device.type == "cpu"
    assert seen.empty(2, device="meta").device.type == "meta"
    assert seen.randn is torch.randn
    assert torch.equal(seen.cuda.get_rng_state(), torch.get_rng_state())
    with seen.cuda.stream(seen.cuda.Stream()):
        seen.cuda.current_stream().wait_stream(seen.cuda.default_stream())


def test_tensor_calls_are_answered_only_while_building() -> None:
    import torch

    weight = torch.ones(2)
    with standins.building("cpu"):
        assert weight.cuda() is weight
        assert weight.type() == "torch.cuda.FloatTensor"
        assert weight.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert weight.type(torch.float64).dtype == torch.float64
    assert weight.type() == "torch.FloatTensor"
    with standins.building("cuda"):
        assert weight.type() == "torch.FloatTensor"
