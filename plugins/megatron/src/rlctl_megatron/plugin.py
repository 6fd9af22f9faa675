"""What this dist offers, as records. Standard library and ``rlctl`` only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.hookspecs import hookimpl
from rlctl.records import Axis, BackendKind, BackendSpec, Capability, Check, CheckResult, ModelType, Support

REQUIREMENTS = (
    "torch>=2.11,<2.15",
    "megatron-core>=0.12.1,!=0.13.*,!=0.14.*,!=0.15.*,!=0.16.0,<0.20",
    "transformers>=5.17,<6",
    "safetensors>=0.5",
    "psutil>=5.9",
)
INSTALL_HINT = "pip install rlctl-plugin-megatron"
DEVICES = ("cpu", "cuda")

_CELLS: dict[Axis, tuple[Support, str, str | None]] = {
    Axis.DP_SHARD: (
        Support.SUPPORTED,
        "weights whole on every rank of the axis, moments and main weights sharded over it (DistributedOptimizer)",
        None,
    ),
    Axis.DP_REPLICATE: (
        Support.UNSUPPORTED,
        "dp_shard keeps whole weights on every rank already and shards the optimizer; take dp_shard",
        None,
    ),
    Axis.TP: (
        Support.SUPPORTED,
        "matrices and the vocabulary split between ranks",
        "heads_and_kv_heads_divisible_by_tp & moe_with_tp_needs_sp",
    ),
    Axis.SP: (
        Support.CONDITIONAL,
        "tied to tp: activations between matrices split over its ranks; off at tp=1, and that is announced",
        "sp_needs_tp",
    ),
    Axis.PP: (Support.SUPPORTED, "layers split between ranks, 1F1B schedule", "layers_divisible_by_stages"),
    Axis.VPP: (
        Support.CONDITIONAL,
        "several chunks of layers a rank, interleaved 1F1B schedule: needs pp > 1 and layers that divide by pp x vpp",
        "vpp_needs_pp",
    ),
    Axis.CP: (
        Support.SUPPORTED,
        "each row split in zigzag order; keys and values of all ranks are gathered in every layer",
        None,
    ),
    Axis.EP: (
        Support.SUPPORTED,
        "experts split between ranks, tokens sent by all-gather or all-to-all",
        "experts_divisible_by_ep",
    ),
    Axis.ETP: (
        Support.CONDITIONAL,
        "matrices of each expert split between ranks: a mixture of experts only",
        "etp_needs_experts",
    ),
    Axis.USP: (Support.UNSUPPORTED, "heads are not swapped for tokens; take cp, or fsdp2 with usp", None),
    Axis.DCP: (Support.NOT_APPLICABLE, "an axis of decoding; this backend trains", None),
}


def _capabilities() -> tuple[Capability, ...]:
    return tuple(
        Capability(
            axis=axis, support=support, reason=reason, model_type=model_type, device=device, constraint=constraint
        )
        for model_type in ModelType
        for device in DEVICES
        for axis, (support, reason, constraint) in _CELLS.items()
    )


@hookimpl
def rlctl_backends() -> list[BackendSpec]:
    """The ``megatron`` training backend."""
    return [
        BackendSpec(
            name="megatron",
            kind=BackendKind.TRAIN,
            engine="rlctl_megatron.engine:MegatronEngine",
            config="rlctl_megatron.config:MegatronConfig",
            api_version=(1, 0),
            model_types=tuple(ModelType),
            devices=tuple((device, None) for device in DEVICES),
            capabilities=_capabilities(),
            requirements=REQUIREMENTS,
            imports=("torch", "transformers", "megatron.core", "rlctl_megatron.engine"),
            install_hint=INSTALL_HINT,
            # One queue of kernels keeps the order in which megatron's overlapped communication was written.
            env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            one_layout=True,
            summary="megatron-core: tensor, sequence, pipeline, context and expert parallel",
        )
    ]


@hookimpl
def rlctl_checks() -> list[Check]:
    """The CPU stand-ins, and the version of megatron-core that was proved."""
    return [Check("megatron-core", _check_version), Check("megatron-stand-ins", _check_stand_ins)]


def _check_version() -> CheckResult:
    from rlctl_megatron.checks import check_version

    return check_version()


def _check_stand_ins() -> CheckResult:
    from rlctl_megatron.checks import check_stand_ins

    return check_stand_ins()


@hookimpl
def rlctl_prepare_process(backend: str, config: Mapping[str, Any]) -> None:
    """On a CPU, stand-ins for the CUDA calls in megatron-core's way; see :mod:`rlctl_megatron.standins`."""
    from rlctl_megatron.notices import silence
    from rlctl_megatron.standins import prepare

    silence()
    prepare(config.get("device"))
