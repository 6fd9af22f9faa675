"""The light module: its keys, what they need, which megatron-core they take, and who answers what."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pydantic import ValidationError

import rlctl_megatron.plugin as megatron
from rlctl.capabilities import check_topology
from rlctl.constraints import ModelFacts
from rlctl.engine import load_target
from rlctl.errors import BackendUnavailableError
from rlctl.plugins import PluginEntry, PluginSet, Stage
from rlctl.records import Axis, BackendKind, BackendSpec, CheckStatus, ModelType, Support
from rlctl.registry import resolve_backend
from rlctl.topology import resolve
from rlctl_mindspeed import plugin, tables
from rlctl_mindspeed.config import MindSpeedConfig

SPECS = {spec.name: spec for spec in plugin.rlctl_backends()}
HEADS = (ModelType.LANGUAGE_MODEL, ModelType.VALUE_MODEL)


def usable(spec: BackendSpec, dist: str) -> PluginEntry:
    """As if everything that it requires were installed."""
    free = BackendSpec(**{**vars(spec), "requirements": ()})
    return PluginEntry(dist, dist, "0.1.0", "t", Stage.COMPATIBLE, CheckStatus.OK, backends=(free,))


BOTH = PluginSet(
    [
        *(usable(s, "rlctl-plugin-megatron") for s in megatron.rlctl_backends()),
        PluginEntry(
            "mindspeed",
            "rlctl-plugin-mindspeed",
            "0.1.0",
            "t",
            Stage.COMPATIBLE,
            CheckStatus.OK,
            backends=tuple(BackendSpec(**{**vars(s), "requirements": ()}) for s in SPECS.values()),
        ),
    ]
)


def owner(name: str, head: ModelType, device: str, vendor: str | None) -> str:
    return resolve_backend(BOTH, name, BackendKind.TRAIN, head, device, vendor).dist


# ---- routing ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", HEADS)
def test_megatron_on_an_npu_is_mindspeeds_and_elsewhere_it_is_not(head) -> None:
    assert owner("megatron", head, "npu", "huawei") == "rlctl-plugin-mindspeed"
    assert owner("megatron", head, "cuda", "nvidia") == "rlctl-plugin-megatron"
    assert owner("megatron", head, "cpu", None) == "rlctl-plugin-megatron"


def test_mindspeed_megatron_is_for_language_models_on_an_npu_only() -> None:
    assert owner("mindspeed_megatron", ModelType.LANGUAGE_MODEL, "npu", "huawei") == "rlctl-plugin-mindspeed"
    assert owner("mindspeed", ModelType.LANGUAGE_MODEL, "npu", "huawei") == "rlctl-plugin-mindspeed"
    with pytest.raises(BackendUnavailableError, match="'mindspeed_megatron' has no engine for a value_model") as caught:
        owner("mindspeed_megatron", ModelType.VALUE_MODEL, "npu", "huawei")
    assert caught.value.next == "--backend megatron"
    with pytest.raises(BackendUnavailableError, match="'mindspeed_megatron' has no engine for cpu"):
        owner("mindspeed_megatron", ModelType.LANGUAGE_MODEL, "cpu", None)


def test_another_vendors_npu_is_not_answered() -> None:
    with pytest.raises(BackendUnavailableError, match="no engine for npu/marschip"):
        owner("megatron", ModelType.LANGUAGE_MODEL, "npu", "marschip")


def test_no_key_is_claimed_twice() -> None:
    assert [r.problems for r in BOTH.backends()] == [()] * 3


# ---- records ----------------------------------------------------------------------------------------------------------------
def test_each_cell_is_there_once_and_refusals_say_what_to_take() -> None:
    assert SPECS["megatron"].model_types == HEADS
    assert SPECS["mindspeed_megatron"].model_types == HEADS[:1]
    for spec in SPECS.values():
        cells = [(c.model_type, c.device, c.vendor, c.axis) for c in spec.capabilities]
        assert len(cells) == len(set(cells)) == len(spec.model_types) * len(Axis)
        assert {(d, v) for _, d, v, _ in cells} == {("npu", "huawei")}
        for cell in spec.capabilities:
            assert cell.reason
            assert cell.support is not Support.UNSUPPORTED or "take " in cell.reason


def test_the_axes_are_those_of_megatron_with_the_same_conditions() -> None:
    (base,) = megatron.rlctl_backends()
    wanted = {c.axis: (c.support, c.constraint) for c in base.capabilities if c.device == "cuda"}
    for spec in SPECS.values():
        assert {c.axis: (c.support, c.constraint) for c in spec.capabilities} == wanted


def test_sizes_that_do_not_fit_are_refused_before_a_launch() -> None:
    dense = ModelFacts(num_heads=8, num_kv_heads=4, num_layers=6, num_experts=0)
    (problem,) = check_topology(SPECS["megatron"], resolve(8, {"tp": 8}), "npu", "huawei", facts=dense).problems
    assert problem.nearest[0] == "tp=4"
    assert not check_topology(SPECS["megatron"], resolve(8, {"tp": 4, "pp": 2}), "npu", "huawei", facts=dense).problems


def test_each_route_says_which_megatron_core_it_takes() -> None:
    (base,) = megatron.rlctl_backends()
    for spec, takes, leaves in ((SPECS["megatron"], "0.12.1", "0.16.1"), (base, "0.16.1", "0.13.0")):
        (need,) = [Requirement(r) for r in spec.requirements if r.startswith("megatron-core")]
        assert need.specifier.contains(takes)
        assert not need.specifier.contains(leaves)
    for axis in (Axis.TP, Axis.PP, Axis.CP, Axis.EP, Axis.DP_SHARD):
        reason = next(c.reason for c in SPECS["megatron"].capabilities if c.axis is axis)
        assert reason.startswith("megatron-core 0.12.1 under MindSpeed: ")
    assert SpecifierSet(tables.MINDSPEED_CORE["0.12"]) == SpecifierSet(plugin.MEGATRON_CORE)
    assert any(Requirement(r).specifier.contains("0.12.1") for r in base.requirements if "megatron-core" in r), (
        "one environment may serve the CPU too"
    )


def test_targets_exist_and_the_order_of_imports_is_that_of_the_patches() -> None:
    for spec in SPECS.values():
        assert load_target(spec.config)() == MindSpeedConfig()
        order = [m for m in spec.imports if m in ("torch_npu", "mindspeed.megatron_adaptor", "megatron.core")]
        assert order == ["torch_npu", "mindspeed.megatron_adaptor", "megatron.core"]
        assert spec.one_layout
        assert "placeholder" in spec.remedies["mindspeed"]


def test_the_dist_depends_on_core_and_megatron_and_on_nothing_that_no_index_has() -> None:
    project = Path(plugin.__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("installed without its source")
    declared = tomllib.loads(project.read_text())["project"]["dependencies"]
    assert [Requirement(d).name for d in declared] == ["rlctl-core", "rlctl-plugin-megatron"]


def test_declaring_is_light_and_so_are_the_checks() -> None:
    code = (
        "import json, sys, rlctl_mindspeed.plugin as p; p.rlctl_backends();"
        "said = [(c.name, str(c.run().status)) for c in p.rlctl_checks()];"
        "heavy = ('torch', 'transformers', 'pydantic', 'numpy', 'megatron', 'torch_npu', 'mindspeed');"
        "print(json.dumps([said, [m for m in heavy if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, loaded = json.loads(done.stdout)
    assert loaded == []
    assert [name for name, _ in said] == [
        "ascend-libraries",
        "ascend-packages",
        "ascend-versions",
        "ascend-hccl",
        "npu-smi",
    ]


def test_settings_are_those_of_megatron_without_nvidias_layers() -> None:
    assert MindSpeedConfig(mindspeed_args={"use_flash_attn": True}).mindspeed_args == {"use_flash_attn": True}
    assert set(MindSpeedConfig.model_fields) == {*megatron_settings(), "mindspeed_args"}
    for settings in ({"layers": "transformer_engine"}, {"mindspeed": True}, {"param_dtype": "float16"}):
        with pytest.raises(ValidationError):
            MindSpeedConfig.model_validate(settings)


def megatron_settings() -> set[str]:
    from rlctl_megatron.config import MegatronConfig

    return set(MegatronConfig.model_fields)
