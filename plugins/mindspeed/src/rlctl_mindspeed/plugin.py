"""What this dist offers, as records. Standard library and ``rlctl`` only."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from rlctl.hookspecs import hookimpl
from rlctl.records import Axis, BackendKind, BackendSpec, Capability, Check, CheckResult, ModelType, Support
from rlctl_mindspeed.tables import MINDSPEED_ROUTE

MEGATRON_CORE = ">=0.12.1,<0.13"
"""What MindSpeed patches. On CUDA and the CPU the ``megatron`` backend takes a later one."""
REQUIREMENTS = (
    "torch>=2.7,<2.15",
    "torch-npu>=2.7,<2.15",
    f"megatron-core{MEGATRON_CORE}",
    "mindspeed>=0.12.1,<0.13",
    "transformers>=5.17,<6",
    "safetensors>=0.5",
    "psutil>=5.9",
)
INSTALL_HINT = "pip install rlctl-plugin-mindspeed"
DEVICE = ("npu", "huawei")
CHECKS = (
    ("ascend-libraries", True),
    ("ascend-packages", True),
    ("ascend-versions", True),
    ("ascend-hccl", True),
    ("npu-smi", False),
)
"""(name, whether it is among the quick ones); see :mod:`rlctl_mindspeed.checks`."""

_ON_NPU = f"megatron-core {MEGATRON_CORE.removeprefix('>=').partition(',')[0]} under MindSpeed"
_CELLS: dict[Axis, tuple[Support, str, str | None]] = {
    Axis.DP_SHARD: (
        Support.SUPPORTED,
        f"{_ON_NPU}: weights whole on every rank of the axis, moments and main weights sharded over it",
        None,
    ),
    Axis.DP_REPLICATE: (
        Support.UNSUPPORTED,
        "dp_shard keeps whole weights on every rank already and shards the optimizer; take dp_shard",
        None,
    ),
    Axis.TP: (
        Support.SUPPORTED,
        f"{_ON_NPU}: matrices and the vocabulary split between ranks",
        "heads_and_kv_heads_divisible_by_tp & moe_with_tp_needs_sp",
    ),
    Axis.SP: (
        Support.CONDITIONAL,
        "tied to tp: activations between matrices split over its ranks; off at tp=1, and that is announced",
        "sp_needs_tp",
    ),
    Axis.PP: (Support.SUPPORTED, f"{_ON_NPU}: layers split between ranks, 1F1B", "layers_divisible_by_stages"),
    Axis.VPP: (
        Support.CONDITIONAL,
        "several chunks of layers a rank, interleaved 1F1B schedule: needs pp > 1 and layers that divide by pp x vpp",
        "vpp_needs_pp",
    ),
    Axis.CP: (
        Support.SUPPORTED,
        f"{_ON_NPU}: each row split in zigzag order; keys and values of all ranks are gathered in every layer",
        None,
    ),
    Axis.EP: (Support.SUPPORTED, f"{_ON_NPU}: experts split between ranks", "experts_divisible_by_ep"),
    Axis.ETP: (
        Support.CONDITIONAL,
        "matrices of each expert split between ranks: a mixture of experts only",
        "etp_needs_experts",
    ),
    Axis.USP: (Support.UNSUPPORTED, "heads are not swapped for tokens; take cp, or fsdp2 with usp", None),
    Axis.DCP: (Support.NOT_APPLICABLE, "an axis of decoding; this backend trains", None),
}


def _capabilities(model_types: Iterable[ModelType]) -> tuple[Capability, ...]:
    device, vendor = DEVICE
    return tuple(
        Capability(axis, support, reason, model_type, device, vendor, constraint)
        for model_type in model_types
        for axis, (support, reason, constraint) in _CELLS.items()
    )


def _spec(
    name: str, model_types: tuple[ModelType, ...], summary: str, test: str, aliases: tuple[str, ...] = ()
) -> BackendSpec:
    return BackendSpec(
        name=name,
        kind=BackendKind.TRAIN,
        engine="rlctl_mindspeed.engine:MindSpeedEngine",
        config="rlctl_mindspeed.config:MindSpeedConfig",
        api_version=(1, 0),
        model_types=model_types,
        devices=(DEVICE,),
        capabilities=_capabilities(model_types),
        requirements=REQUIREMENTS,
        imports=(
            "torch",
            "torch_npu",
            "mindspeed.megatron_adaptor",
            "megatron.core",
            "transformers",
            "rlctl_mindspeed.engine",
        ),
        install_hint=INSTALL_HINT,
        aliases=aliases,
        summary=summary,
        one_layout=True,
        remedies={"mindspeed": MINDSPEED_ROUTE},
        routing_tests={"npu": test},
    )


@hookimpl
def rlctl_backends() -> list[BackendSpec]:
    """``megatron`` on an NPU, for both heads; and ``mindspeed_megatron``, the field's second name of it, for language models."""
    return [
        _spec(
            "megatron",
            tuple(ModelType),
            "megatron-core on Ascend, patched by MindSpeed",
            "tests/test_ascend.py::test_the_quickstart_goes_through_mindspeed_and_reports_megatrons_numbers",
        ),
        _spec(
            "mindspeed_megatron",
            (ModelType.LANGUAGE_MODEL,),
            "megatron-core on Ascend under MindSpeed's own name, language models only",
            "plugins/mindspeed/tests/test_mindspeed_plugin.py::test_mindspeed_megatron_is_for_language_models_on_an_npu_only",
            ("mindspeed",),
        ),
    ]


@hookimpl
def rlctl_checks() -> list[Check]:
    """What an Ascend machine needs and what is usually wrong with it. Where nothing points at Ascend all are passed over."""
    return [Check(name, functools.partial(_check, name), quick) for name, quick in CHECKS]


def _check(name: str) -> CheckResult:
    from rlctl_mindspeed import checks

    return checks.CHECKS[name]()


@hookimpl
def rlctl_prepare_process(backend: str, config: Mapping[str, Any]) -> None:
    """MindSpeed's patches, before megatron-core is imported; see :mod:`rlctl_mindspeed.prepare`."""
    from rlctl_mindspeed.prepare import prepare

    prepare(config)
