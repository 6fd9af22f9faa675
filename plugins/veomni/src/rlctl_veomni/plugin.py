"""What this dist offers, as records. Standard library and ``rlctl`` only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.hookspecs import hookimpl
from rlctl.records import Axis, BackendKind, BackendSpec, Capability, Check, CheckResult, ModelType, Support

REQUIREMENTS = ("torch>=2.11,<2.15", "veomni>=0.1.12,<0.1.13", "transformers>=5.9,<5.10", "safetensors>=0.5")
INSTALL_HINT = "pip install rlctl-plugin-veomni"
DEVICES = ("cpu", "cuda", "npu")

_CELLS: dict[Axis, tuple[Support, str, str | None]] = {
    Axis.DP_SHARD: (Support.SUPPORTED, "FSDP2 of every layer over the ranks of a replica", None),
    Axis.DP_REPLICATE: (Support.SUPPORTED, "replicas of sharded weights (HSDP), of experts too", None),
    Axis.TP: (
        Support.UNSUPPORTED,
        "VeOmni's training asserts tp = 1: no matrix is split between ranks; take megatron",
        None,
    ),
    Axis.SP: (
        Support.UNSUPPORTED,
        "activation sharding belongs to tp, which VeOmni lacks; take usp, or megatron",
        None,
    ),
    Axis.PP: (Support.UNSUPPORTED, "VeOmni's training asserts pp = 1: every rank runs all layers; take megatron", None),
    Axis.VPP: (Support.UNSUPPORTED, "virtual stages belong to pp, which VeOmni lacks; take megatron", None),
    Axis.CP: (
        Support.UNSUPPORTED,
        "VeOmni has it for deepseek_v4 alone, which this backend does not run; take usp, or megatron for cp",
        None,
    ),
    Axis.EP: (
        Support.SUPPORTED,
        "experts split between ranks of one replica, tokens sent by all-to-all; what is left of the ranks shards each expert",
        "experts_divisible_by_ep & ep_within_a_replica",
    ),
    Axis.ETP: (Support.UNSUPPORTED, "no expert matrix is split between ranks; take megatron", None),
    Axis.USP: (
        Support.SUPPORTED,
        "ranks hold slices of the packed rows and swap heads for tokens around attention (Ulysses); weights are sharded over "
        "dp_shard x usp",
        "heads_divisible_by_usp",
    ),
    Axis.DCP: (Support.NOT_APPLICABLE, "an axis of decoding; this backend trains", None),
}

_ON_CUDA: dict[Axis, tuple[Support, str, str | None]] = {
    Axis.EP: (
        Support.CONDITIONAL,
        f"{_CELLS[Axis.EP][1]}; in bfloat16 only, which is the default: VeOmni's Triton kernel takes no float32",
        _CELLS[Axis.EP][2],
    ),
}
_ON_NPU: dict[Axis, tuple[Support, str, str | None]] = {
    Axis.EP: (
        Support.CONDITIONAL,
        f"{_CELLS[Axis.EP][1]}; in bfloat16 only, which is the default, by VeOmni's kernel for Ascend",
        _CELLS[Axis.EP][2],
    ),
}
_DIFFERENT = {"cuda": _ON_CUDA, "npu": _ON_NPU}


def _capabilities() -> tuple[Capability, ...]:
    return tuple(
        Capability(
            axis=axis, support=support, reason=reason, model_type=model_type, device=device, constraint=constraint
        )
        for model_type in ModelType
        for device in DEVICES
        for axis, (support, reason, constraint) in {**_CELLS, **_DIFFERENT.get(device, {})}.items()
    )


@hookimpl
def rlctl_backends() -> list[BackendSpec]:
    """The ``veomni`` training backend."""
    return [
        BackendSpec(
            name="veomni",
            kind=BackendKind.TRAIN,
            engine="rlctl_veomni.engine:VeOmniEngine",
            config="rlctl_veomni.config:VeOmniConfig",
            api_version=(1, 0),
            model_types=tuple(ModelType),
            devices=tuple((device, None) for device in DEVICES),
            capabilities=_capabilities(),
            requirements=REQUIREMENTS,
            imports=("torch", "transformers", "veomni", "rlctl_veomni.engine"),
            install_hint=INSTALL_HINT,
            summary="VeOmni: FSDP2 with Ulysses and expert parallelism",
            routing_tests={"npu": "tests/test_npu_routes.py::test_a_run_on_an_npu_reaches_its_backend"},
        )
    ]


@hookimpl
def rlctl_checks() -> list[Check]:
    """The CPU stand-ins, the version of VeOmni that was proved, and a package that it brings and that may not fit."""
    return [
        Check("veomni", _check_version),
        Check("veomni-stand-ins", _check_stand_ins),
        Check("veomni-torchvision", _check_torchvision),
    ]


def _check_version() -> CheckResult:
    from rlctl_veomni.checks import check_version

    return check_version()


def _check_stand_ins() -> CheckResult:
    from rlctl_veomni.checks import check_stand_ins

    return check_stand_ins()


def _check_torchvision() -> CheckResult:
    from rlctl_veomni.checks import check_torchvision

    return check_torchvision()


@hookimpl
def rlctl_prepare_process(backend: str, config: Mapping[str, Any]) -> None:
    """On a CPU, stand-ins for the kernels and collectives that VeOmni has for GPUs; see :mod:`rlctl_veomni.standins`."""
    from rlctl_veomni.notices import silence
    from rlctl_veomni.standins import prepare

    silence()
    prepare(config.get("device"))
