"""The chunks that a rank runs: built without values, then filled from files or a seed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from rlctl import device as devices
from rlctl.errors import ConfigError
from rlctl.records import ModelType
from rlctl_megatron import compat
from rlctl_megatron.architecture import Architecture
from rlctl_megatron.config import MegatronConfig
from rlctl_megatron.families import Family, Layout, Split
from rlctl_megatron.loading import Chunk, chunk_sites
from rlctl_megatron.mapping import layers_of, padded_vocab
from rlctl_megatron.mesh import Place
from rlctl_megatron.specs import ChunkModel


@dataclass(frozen=True)
class Built:
    """What a rank holds.

    Args:
        chunks: the modules by name, as weights are loaded and exported.
        wrapped: the same as the schedule runs them: under gradient buffers when trained.
        config: shared by all chunks; what schedule and gradients read.
    """

    chunks: Sequence[Chunk]
    wrapped: Sequence[nn.Module]
    config: TransformerConfig

    @property
    def models(self) -> list[ChunkModel]:
        return [chunk.module for chunk in self.chunks]  # type: ignore[misc]


def compute_dtype(config: MegatronConfig, model: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """dtype of weights in the computation.

    Raises:
        ConfigError: a combination that was not built: lower precision on a CPU, or other main weights than float32.
    """
    if str(model.get("dtype") or "float32") != "float32":
        raise ConfigError(
            "megatron keeps main weights in float32",
            found=f"model.dtype {model['dtype']}",
            wanted="model.dtype float32; engine.param_dtype sets the computation's dtype",
            next="set model.dtype=float32",
        )
    if config.param_dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if config.param_dtype == "bfloat16" and device.type == "cpu":
        raise ConfigError(
            "megatron computes in float32 on a CPU",
            found="engine.param_dtype bfloat16",
            wanted="auto or float32",
            next="set actor.engine.param_dtype=auto",
        )
    return torch.float32 if config.param_dtype == "float32" else torch.bfloat16


def uses_transformer_engine(config: MegatronConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are made of Transformer Engine's modules: by itself on CUDA in lower precision, where the package is.

    Its matrix products take float32 inputs as TF32 (log-probs up to 0.01 and weights up to 0.2 away after three steps,
    measured with 2.20.2), and it has no float32 attention over packed rows with cp.

    Raises:
        ConfigError: they were asked for where they cannot run, or would not compute in the dtype that was asked for.
    """
    if config.layers == "local":
        return False
    there = importlib.util.find_spec("transformer_engine") is not None
    if config.layers == "auto":
        return there and device.type == "cuda" and dtype is not torch.float32
    if device.type != "cuda" or not there:
        raise ConfigError(
            "Transformer Engine's modules cannot be used here",
            found=f"device {device.type}, transformer_engine {'installed' if there else 'not installed'}",
            wanted="a CUDA device, and the package",
            next="set actor.engine.layers=local"
            + (", or pip install 'transformer-engine[pytorch]'" if device.type == "cuda" else ""),
        )
    if dtype is torch.float32:
        raise ConfigError(
            "Transformer Engine's modules do not compute in float32: they multiply in TF32",
            found="engine.layers transformer_engine with engine.param_dtype float32",
            wanted="lower precision, or megatron-core's local modules",
            next="set actor.engine.param_dtype=bfloat16, or actor.engine.layers=local",
        )
    return True


def transformer_config(
    architecture: Architecture, place: Place, config: MegatronConfig, dtype: torch.dtype
) -> TransformerConfig:
    """megatron-core's configuration of model, schedule and gradients."""
    t = place.topology
    fields = {
        **architecture.transformer,
        "tensor_model_parallel_size": t.tp,
        "sequence_parallel": t.sp and t.tp > 1,
        "pipeline_model_parallel_size": t.pp,
        "virtual_pipeline_model_parallel_size": t.vpp if t.vpp > 1 else None,
        "context_parallel_size": t.cp,
        "expert_model_parallel_size": t.ep,
        "expert_tensor_parallel_size": t.etp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # Weights come from files or a seed, whatever the ranks: nothing is drawn here.
        "perform_initialization": False,
        "use_cpu_initialization": place.device.type == "cpu",
        # The loss is a globally weighted sum already: gradients are added up, never averaged.
        "calculate_per_token_loss": True,
        # Micro-batches are packed to a budget, so no two are of one length.
        "variable_seq_lengths": t.pp > 1,
        "moe_token_dispatcher_type": config.moe_token_dispatcher,
        **dict.fromkeys(
            (
                "bias_activation_fusion",
                "bias_dropout_fusion",
                "masked_softmax_fusion",
                "gradient_accumulation_fusion",
                "apply_rope_fusion",
                "persist_layer_norm",
            ),
            False,  # kernels of Apex and Transformer Engine
        ),
    }
    if t.vpp > 1:
        # With the default pair of flags the interleaved schedule computes wrong numbers, without a word.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if config.recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**fields)


def build_chunks(
    architecture: Architecture, family: Family, place: Place, config: TransformerConfig, *, engine: bool = False
) -> list[Chunk]:
    """This rank's chunks, with whatever memory holds as values.

    Args:
        engine: of Transformer Engine's modules.
    """
    t = place.topology
    # The tracker of random states must know its names, though nothing here draws from them. It seeds the process; whoever draws
    # after an engine was built must not see that.
    with devices.kept_random_state(place.device):
        compat.seed_random_states()
    chunks: list[Chunk] = []
    for number in range(t.vpp):
        stage = number if t.vpp > 1 else None
        first, last = compat.is_first(stage), compat.is_last(stage)
        with compat.at_stage(stage):
            module = ChunkModel(
                config,
                architecture,
                padded_vocab(architecture.vocab_size, t.tp),
                first=first,
                last=last,
                value=family.head is ModelType.VALUE_MODEL,
                engine=engine,
                vp_stage=stage,
            ).to(place.device)
        compat.settle_experts(module)
        layers = layers_of(t, architecture.num_layers, place.pp_rank, number)
        assert len(layers) == len(module.decoder.layers), "megatron and the mapping count layers alike"
        chunks.append(Chunk(module, layers, first, last))
        _mark_split(chunks[-1], family, place)
    return chunks


def _mark_split(chunk: Chunk, family: Family, place: Place) -> None:
    """Tell which weights are split over ranks, and which ranks hold the same ones.

    megatron-core marks split weights where it draws values, which is not done here; without the marks the gradient norm leaves
    out what every tp rank but the first one holds. It takes experts for copies on all data parallel ranks unless ep > 1; with
    etp alone, or tp and whole experts, gradients of different shards and tokens would be summed. Both without a word.
    """
    sites = dict(chunk_sites(chunk, family, place))
    for name, weight in chunk.named_parameters().items():
        entry = sites[name].entry
        split = entry.layout is not Layout.REPLICATED
        weight.tensor_model_parallel = split  # type: ignore[attr-defined]
        weight.partition_dim = (1 if entry.layout is Layout.ROW else 0) if split else -1  # type: ignore[attr-defined]
        weight.partition_stride = 1  # type: ignore[attr-defined]
        weight.allreduce = entry.split is not Split.ETP  # type: ignore[attr-defined]


def wrap(chunks: Sequence[Chunk], config: TransformerConfig, *, train: bool, distributed_optimizer: bool) -> Built:
    """Chunks as the schedule runs them; gradients are added up in float32 buffers and reduced once a step."""
    modules: list[nn.Module] = [chunk.module for chunk in chunks]
    if config.bf16:
        modules = [Float16Module(config, m) for m in modules]
    if train:
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=distributed_optimizer,
        )
        modules = [
            DistributedDataParallel(config, buffers, m, disable_bucketing=i > 0)  # type: ignore[arg-type]
            for i, m in enumerate(modules)
        ]
    return Built(chunks, modules, config)


def let_go(built: Built) -> None:
    """Undo the circles of gradient nodes and buffers, through which Python's collector cannot see: model and groups of an
    engine that has ended would stay for ever. A dispatcher of experts keeps a part of the last graph, and so its nodes."""
    for model in built.models:
        for module in model.modules():
            for holder in (module, getattr(module, "token_dispatcher", None)):
                kept = vars(holder) if holder is not None else {}
                for name in [k for k, v in kept.items() if isinstance(v, torch.Tensor) and v.grad_fn is not None]:
                    kept[name] = None
    for module in built.wrapped:
        nodes = getattr(module, "grad_accs", None)
        if nodes is not None:
            nodes.clear()  # type: ignore[operator]
