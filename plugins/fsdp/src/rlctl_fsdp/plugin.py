"""What this dist offers, as records. Standard library and ``rlctl`` only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlctl.hookspecs import hookimpl
from rlctl.records import (
    Axis,
    BackendKind,
    BackendSpec,
    Capability,
    Check,
    CheckResult,
    CheckStatus,
    ModelType,
    Support,
)

REQUIREMENTS = ("torch>=2.11,<2.15", "transformers>=5.17,<6", "safetensors>=0.5", "numpy>=1.26")
INSTALL_HINT = "pip install rlctl-plugin-fsdp"
LORA_REQUIREMENT = "peft>=0.21,<0.22"
LORA_HINT = "pip install 'rlctl-plugin-fsdp[lora]'"

_TRAIN_DEVICES = ("cpu", "cuda", "npu")
_ROLLOUT_DEVICES = ("cpu", "cuda", "npu")
_ON_A_DOUBLE = "tests/test_ascend.py::test_fsdp2_and_hf_run_on_the_simulated_npu"

_TRAIN_CELLS: dict[Axis, tuple[Support, str]] = {
    Axis.DP_SHARD: (Support.SUPPORTED, "fully_shard of every layer over the ranks of a replica"),
    Axis.DP_REPLICATE: (
        Support.SUPPORTED,
        "replicas of sharded weights (HSDP): gradients are summed over shards, then over replicas; dp_shard=1 keeps whole "
        "weights on every rank",
    ),
    Axis.TP: (Support.UNSUPPORTED, "whole layers are gathered, no matrix is split between ranks; take megatron"),
    Axis.SP: (Support.UNSUPPORTED, "activation sharding belongs to tp, which this backend lacks; take megatron"),
    Axis.PP: (Support.UNSUPPORTED, "every rank runs all layers; take megatron"),
    Axis.VPP: (Support.UNSUPPORTED, "virtual stages belong to pp, which this backend lacks; take megatron"),
    Axis.CP: (Support.UNSUPPORTED, "keys and values do not travel around a ring; take usp, or megatron"),
    Axis.EP: (
        Support.UNSUPPORTED,
        "experts are sharded like other weights and every rank runs all of them; take veomni or megatron",
    ),
    Axis.ETP: (Support.UNSUPPORTED, "no expert matrix is split between ranks; take megatron"),
    Axis.USP: (
        Support.SUPPORTED,
        "ranks hold slices of the packed rows and swap heads for tokens around attention (Ulysses); weights are sharded over "
        "dp_shard x usp. A model whose other layers look at neighbouring tokens is refused when it is built",
    ),
    Axis.DCP: (Support.NOT_APPLICABLE, "an axis of decoding; this backend trains"),
}

_TRAIN_CONSTRAINTS = {Axis.USP: "heads_divisible_by_usp"}

_TRAINING_ONLY = (Axis.SP, Axis.VPP, Axis.CP, Axis.ETP, Axis.USP)
_ROLLOUT_CELLS: dict[Axis, tuple[Support, str]] = {
    **dict.fromkeys(_TRAINING_ONLY, (Support.NOT_APPLICABLE, "an axis of training")),
    Axis.DP_SHARD: (Support.UNSUPPORTED, "the weights of a rollout are whole on its device; take vllm with tp"),
    Axis.DP_REPLICATE: (Support.SUPPORTED, "each rank generates its share of the prompts from whole weights"),
    Axis.TP: (Support.UNSUPPORTED, "generation runs on one device; take vllm"),
    Axis.PP: (Support.UNSUPPORTED, "generation runs on one device; take vllm with tp"),
    Axis.EP: (Support.UNSUPPORTED, "all experts are on one device; take vllm"),
    Axis.DCP: (Support.UNSUPPORTED, "the KV cache is whole on its device; take vllm"),
}


def _capabilities(
    cells: dict[Axis, tuple[Support, str]],
    devices: Iterable[str],
    model_types: Iterable[ModelType],
    constraints: Mapping[Axis, str] | None = None,
) -> tuple[Capability, ...]:
    named = constraints or {}
    return tuple(
        Capability(
            axis=axis,
            support=support,
            reason=reason,
            model_type=model_type,
            device=device,
            constraint=named.get(axis),
        )
        for model_type in model_types
        for device in devices
        for axis, (support, reason) in cells.items()
    )


@hookimpl
def rlctl_backends() -> list[BackendSpec]:
    """The ``fsdp2`` training backend and the embedded ``hf`` rollout."""
    heads, generates = tuple(ModelType), (ModelType.LANGUAGE_MODEL,)
    return [
        BackendSpec(
            name="fsdp2",
            kind=BackendKind.TRAIN,
            engine="rlctl_fsdp.engine:FSDPEngine",
            config="rlctl_fsdp.config:FSDPConfig",
            api_version=(1, 0),
            model_types=heads,
            devices=tuple((device, None) for device in _TRAIN_DEVICES),
            capabilities=_capabilities(_TRAIN_CELLS, _TRAIN_DEVICES, heads, _TRAIN_CONSTRAINTS),
            requirements=REQUIREMENTS,
            imports=("torch", "transformers", "torch.distributed.fsdp", "rlctl_fsdp.engine"),
            install_hint=INSTALL_HINT,
            aliases=("fsdp",),
            summary="PyTorch FSDP2: any Hugging Face causal LM, critics, LoRA, packed rows, one rank or many, HSDP and Ulysses",
            routing_tests={"npu": _ON_A_DOUBLE},
            lora=True,
        ),
        BackendSpec(
            name="hf",
            kind=BackendKind.ROLLOUT,
            engine="rlctl_fsdp.rollout:HFRollout",
            config="rlctl_fsdp.config:HFRolloutConfig",
            api_version=(1, 0),
            model_types=generates,
            devices=tuple((device, None) for device in _ROLLOUT_DEVICES),
            capabilities=_capabilities(_ROLLOUT_CELLS, _ROLLOUT_DEVICES, generates),
            requirements=REQUIREMENTS,
            imports=("torch", "transformers", "rlctl_fsdp.rollout"),
            install_hint=INSTALL_HINT,
            summary="Embedded generation with transformers, in the training process",
            routing_tests={"npu": _ON_A_DOUBLE},
            scores=True,
        ),
    ]


@hookimpl
def rlctl_checks() -> list[Check]:
    """Whether adapters can be trained."""
    return [Check("fsdp2-lora", check_lora)]


def check_lora() -> CheckResult:
    """peft, which ``model.lora`` needs and nothing else does."""
    from rlctl.requirements import installed_version, unmet_requirements

    version = installed_version("peft")
    unmet = unmet_requirements((LORA_REQUIREMENT,))
    if version is None:
        return CheckResult(
            "fsdp2-lora", CheckStatus.SKIP, "peft is not installed", "peft, for model.lora alone", LORA_HINT
        )
    status = CheckStatus.WARN if unmet else CheckStatus.OK
    next_ = LORA_HINT if unmet else ""
    return CheckResult("fsdp2-lora", status, f"peft {version}", LORA_REQUIREMENT if unmet else "", next_)
