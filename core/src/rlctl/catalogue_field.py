"""The rest of the field: backends whose plugin is not released here, with what each does on every axis, and why not.

A record says what the backend itself can do under a plugin of this contract; nothing in it is evidence. Cells that
differ by device or head are written as changes to the backend's common row. Where a cell refuses, its reason names what
refuses it and which backend to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlctl.records import API_VERSION, Axis, BackendKind, BackendSpec, Capability, ModelType, Support

LM, VALUE = ModelType.LANGUAGE_MODEL, ModelType.VALUE_MODEL
YES, IF, NO, NA = Support.SUPPORTED, Support.CONDITIONAL, Support.UNSUPPORTED, Support.NOT_APPLICABLE
CUDA, NPU, CPU = ("cuda", "nvidia"), ("npu", "huawei"), ("cpu", None)

Cell = tuple[Support, str, str | None]
Row = Mapping[str, Cell]


def _yes(reason: str, constraint: str | None = None) -> Cell:
    return (YES, reason, constraint)


def _if(reason: str, constraint: str | None = None) -> Cell:
    return (IF, reason, constraint)


def _no(reason: str) -> Cell:
    return (NO, reason, None)


def _na(reason: str) -> Cell:
    return (NA, reason, None)


_DECODING: Cell = _na("an axis of decoding; this backend trains")
_TRAINING: Cell = _na("an axis of training; this backend generates")


_REFUSED = "tests/test_npu_routes.py::test_what_has_no_plugin_is_refused_by_name"


@dataclass(frozen=True)
class _Backend:
    """One backend of the field. ``changes`` replaces cells on one device type, ``heads`` lists its model types."""

    name: str
    kind: BackendKind
    summary: str
    devices: Sequence[tuple[str, str | None]]
    row: Row
    dist: str | None = None
    heads: Sequence[ModelType] = (LM,)
    changes: Mapping[str, Row] = field(default_factory=dict)
    requirements: Sequence[str] = ()
    imports: Sequence[str] = ()
    aliases: Sequence[str] = ()

    def spec(self) -> BackendSpec:
        cells: list[Capability] = []
        for head in self.heads:
            for device, vendor in self.devices:
                row = {**self.row, **self.changes.get(device, {})}
                for axis in Axis:
                    support, reason, constraint = row[axis.value]
                    cells.append(Capability(axis, support, reason, head, device, vendor, constraint))
        return BackendSpec(
            name=self.name,
            kind=self.kind,
            engine="",
            config="",
            api_version=API_VERSION,
            model_types=tuple(self.heads),
            devices=tuple(self.devices),
            capabilities=tuple(cells),
            requirements=tuple(self.requirements),
            imports=tuple(self.imports),
            install_hint=f"pip install {self.dist}" if self.dist else "",
            aliases=tuple(self.aliases),
            summary=self.summary,
            routing_tests={"npu": _REFUSED} if NPU in self.devices else {},
        )


_INFERENCE: Row = {
    "dp_shard": _na("an axis of training; an inference engine splits weights with tp"),
    "dp_replicate": _yes("engine replicas"),
    "tp": _yes("tensor parallel layers", "heads_divisible_by_tp"),
    "sp": _TRAINING,
    "pp": _no("an embedded engine with pipeline stages cannot take weights in place; take tp"),
    "vpp": _TRAINING,
    "cp": _TRAINING,
    "ep": _if("the expert group is the whole engine: ep must equal tp x dp", "ep_equals_tp_times_dp"),
    "etp": _TRAINING,
    "usp": _TRAINING,
    "dcp": _if("splits the KV cache within tp: dcp divides tp, at most tp / KV heads", "dcp_within_tp"),
}

_NO_PP = "pipeline stages are refused; take megatron"

_FIELD: tuple[_Backend, ...] = (
    _Backend(
        name="mindspeed_mm",
        kind=BackendKind.TRAIN,
        summary="MindSpeed-MM: DanceGRPO on diffusion transformers, Ascend",
        devices=(NPU,),
        row={
            "dp_shard": _yes("FSDP2 of the transformer"),
            "dp_replicate": _yes("data parallel replicas"),
            "tp": _if("only where the diffusion transformer of DanceGRPO has tensor parallel layers"),
            "sp": _no("belongs to tp, and the DanceGRPO path does not switch it on; take megatron"),
            "pp": _no("the sampling loop of DanceGRPO needs every layer on every rank; take megatron"),
            "vpp": _no("belongs to pp, which the DanceGRPO path lacks; take megatron"),
            "cp": _if("only where the attention of the diffusion transformer splits the sequence"),
            "ep": _no("its diffusion transformers have no experts; take veomni or megatron"),
            "etp": _no("its diffusion transformers have no experts; take megatron"),
            "usp": _no("its split of the sequence is configured as cp; take cp, or veomni for usp"),
            "dcp": _DECODING,
        },
    ),
    _Backend(
        name="torchtitan",
        kind=BackendKind.TRAIN,
        summary="torchtitan: PyTorch-native FSDP2 with tp, cp and ep",
        devices=(CUDA, NPU),
        row={
            "dp_shard": _yes("FSDP2 of every layer"),
            "dp_replicate": _yes("HSDP mesh of replicas and shards"),
            "tp": _yes("DTensor plans of each model", "heads_and_kv_heads_divisible_by_tp"),
            "sp": _if("part of its tp plan: on with tp, never alone", "sp_needs_tp"),
            "pp": _no("an RL engine on it runs forward and backward without its pipeline schedule; take megatron"),
            "vpp": _no("belongs to pp, which is refused; take megatron"),
            "cp": _yes("ring attention over the sequence"),
            "ep": _yes("experts are split over ranks", "experts_divisible_by_ep"),
            "etp": _no("an RL engine on it leaves experts whole within tp; take megatron"),
            "usp": _no("it has no Ulysses head exchange; take cp, or veomni for usp"),
            "dcp": _DECODING,
        },
    ),
    _Backend(
        name="automodel",
        kind=BackendKind.TRAIN,
        summary="NeMo AutoModel: Hugging Face models under FSDP2 with tp, cp and ep, CUDA only",
        devices=(CUDA,),
        row={
            "dp_shard": _yes("FSDP2 of every layer"),
            "dp_replicate": _yes("HSDP mesh of replicas and shards"),
            "tp": _yes("DTensor plans of each model", "heads_and_kv_heads_divisible_by_tp"),
            "sp": _if("part of its tp plan: on with tp, never alone", "sp_needs_tp"),
            "pp": _no("pp must be 1; take megatron"),
            "vpp": _no("belongs to pp, which must be 1; take megatron"),
            "cp": _yes("context parallel attention over the sequence"),
            "ep": _yes("experts are split over ranks", "experts_divisible_by_ep"),
            "etp": _no("an expert's matrices are not split; take megatron"),
            "usp": _no("it has no Ulysses head exchange; take cp, or veomni for usp"),
            "dcp": _DECODING,
        },
    ),
    _Backend(
        name="fsdp_turbo",
        kind=BackendKind.TRAIN,
        summary="FSDP-Turbo: FSDP2 with fused ep and cp, language models only",
        devices=(CUDA, NPU),
        row={
            "dp_shard": _yes("FSDP2 of every layer"),
            "dp_replicate": _no("its meshes have a shard axis only; take fsdp2, veomni or megatron"),
            "tp": _no("no matrix is split between ranks; take megatron"),
            "sp": _no("belongs to tp, which it lacks; take megatron"),
            "pp": _no(_NO_PP),
            "vpp": _no("belongs to pp, which it lacks; take megatron"),
            "cp": _if("its own split of the sequence; excludes usp", "cp_excludes_usp"),
            "ep": _yes("experts are split over ranks", "experts_divisible_by_ep"),
            "etp": _no("an expert's matrices are not split; take megatron"),
            "usp": _if("Ulysses exchange of heads; excludes cp", "usp_excludes_cp"),
            "dcp": _DECODING,
        },
    ),
    _Backend(
        name="sglang",
        kind=BackendKind.ROLLOUT,
        summary="SGLang: generation with a radix cache",
        devices=(CUDA,),
        row={
            **_INFERENCE,
            "ep": _if("experts are split within tp: ep divides tp", "ep_divides_tp"),
            "dcp": _no("it has no decode context parallelism; take vllm"),
        },
    ),
    _Backend(
        name="tensorrt_llm",
        kind=BackendKind.ROLLOUT,
        summary="TensorRT-LLM: generation with compiled engines",
        devices=(CUDA,),
        row={
            **_INFERENCE,
            "ep": _if("experts are split within tp: ep divides tp", "ep_divides_tp"),
            "dcp": _no("its KV cache is not split within tp; take vllm"),
        },
        aliases=("trtllm",),
    ),
)


def field_entries() -> list[tuple[BackendSpec, str | None]]:
    """(record, dist of its planned plugin or None) of every backend here."""
    return [(b.spec(), b.dist) for b in _FIELD]
